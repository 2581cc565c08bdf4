//! kplane's text for iptables in the real tools, both flavours. The output of `iptables-save` must be what
//! kplane expects.

use std::io::Write as _;
use std::net::IpAddr;
use std::process::{Command, Stdio};

use kplane_dataplane::backend::iptables::restore::{Limits, parts};
use kplane_dataplane::backend::iptables::{
    BuiltIn, ChainName, FoundRules, Layout, RuleSettings, Ruleset, TableName,
};
use kplane_dataplane::backend::{Change, PodInterface};
use kplane_dataplane::plan::{NodePlan, NodeSettings, ServicePlan, plan_service};
use kplane_model::{
    Cidr, EndpointAddr, Family, KeyParts, LocalEndpoints, NodeFacts, Protocol, ServiceKey,
    ServiceName, ServicePort, ServiceProgram, TrafficPolicy,
};

use kplane_rig::kernel::in_netns;

const FLAVOURS: [&str; 2] = ["nft", "legacy"];

/// An address whose last four bytes are `low`.
fn ip(family: Family, low: u32) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(low.into()),
        // Some addresses are printed with an IPv4 address at their end.
        Family::V6 if low.is_multiple_of(3) => IpAddr::V6(u128::from(low).into()),
        Family::V6 => IpAddr::V6((0xfd00_u128 << 112 | u128::from(low)).into()),
    }
}

/// The name of a tool: `iptables-nft-save`.
fn tool(family: Family, flavour: &str, what: &str) -> String {
    let program = match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    };
    format!("{program}-{flavour}-{what}")
}

fn run(program: &str, arguments: &[&str], input: &str) -> String {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}; install the Debian package iptables"));
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {errors}\n{input}");
    String::from_utf8(output.stdout).unwrap()
}

fn found(save: &str) -> FoundRules {
    let mut found = FoundRules::default();
    let mut table = None;
    for line in save.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = TableName::parse(name);
        }
        let Some(table) = table else { continue };
        let chain = |text: &str| ChainName::parse(text.split(' ').next().unwrap());
        if let Some(name) = line.strip_prefix(':').and_then(chain) {
            found.chain(table, name);
        } else if let Some(name) = line.strip_prefix("-A ").and_then(chain) {
            found.rule(table, name, line);
        } else if line.starts_with("-A ") {
            found.jump(table, line);
        }
    }
    found
}

/// Returns a ServicePort with all features.
fn service(number: u16, family: Family, endpoints: u16) -> ServicePlan {
    let key = ServiceKey::from(KeyParts {
        service: ServiceName::new("shop", &format!("web-{number}")),
        port_name: if number.is_multiple_of(2) { "" } else { "http" }.into(),
        protocol: Protocol::ALL[usize::from(number % 3)],
        family,
    });
    let addr = |n: u16| EndpointAddr::new(ip(family, 0x0af4_0000 + u32::from(n)), 8080);
    let place = |base: u32| ip(family, base + u32::from(number));
    let range = match family {
        Family::V4 => ["203.0.113.0/24", "192.0.2.1/32"],
        Family::V6 => ["2001:db8::/32", "::/96"],
    };
    let external = match number % 4 {
        0 | 1 => TrafficPolicy::Local,
        _ => TrafficPolicy::Cluster,
    };
    let port = ServicePort {
        port: if number < 50 { 1 + number } else { 65_535 },
        cluster_ip: match number {
            // Many ports of one address, so that the tree divides its ports.
            ..50 => ip(family, 0x0a60_0000),
            _ => place(0x0a60_0000),
        },
        external_ips: vec![place(0xc000_0200)],
        load_balancer_ips: vec![place(0xc633_6400)],
        node_port: Some(30_000 + number),
        external_policy: external,
        affinity_timeout_s: number.is_multiple_of(5).then_some(86_400),
        source_ranges: match number % 7 {
            0 => range.map(|range| range.parse::<Cidr>().unwrap()).into(),
            _ => Vec::new(),
        },
        health_check_node_port: (external == TrafficPolicy::Local).then_some(32_000 + number),
        ..ServicePort::sample(key.clone())
    };
    let program = ServiceProgram::sample(port, (0..endpoints).map(addr).collect());
    let here = endpoints.min(number % 3);
    let local = LocalEndpoints::sample(key, (0..here).map(addr));
    plan_service(&program, Some(&local), &NodeFacts::default())
}

/// Stages, restores and saves. Checks that the saved rules are the known ones, and returns them.
fn apply(ruleset: &mut Ruleset, flavour: &str, limits: Limits, change: Change<'_>) -> String {
    let staged = ruleset.stage(change);
    assert_eq!(staged.failures, []);
    let text: String = staged.steps.iter().flat_map(|step| parts(step, limits)).collect();
    let restore = tool(change.family, flavour, "restore");
    run(&restore, &["--noflush", "-w", "5"], &text);
    ruleset.accept(staged);
    let save = run(&tool(change.family, flavour, "save"), &[], "");
    let found = found(&save);
    if let Some(difference) = ruleset.difference(&found) {
        panic!("{flavour}: {difference}\n{text}\n{save}");
    }
    save
}

fn all(
    family: Family,
    numbers: impl Iterator<Item = u16>,
) -> Vec<(ServiceKey, Option<ServicePlan>)> {
    let plan = |number: u16| service(number, family, [2, 0, 3, 1][usize::from(number % 4)]);
    numbers.map(plan).map(|plan| (plan.key.clone(), Some(plan))).collect()
}

fn node(family: Family, pods: &[&str], nodeports: &[&str]) -> NodePlan {
    let ranges = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    let settings = NodeSettings {
        cluster_cidrs: ranges(pods),
        nodeport_addresses: ranges(nodeports),
        ..NodeSettings::default()
    };
    NodePlan::new(family, &NodeFacts::default(), &settings)
}

fn both(test: impl Fn(Family, &str) + Sync) {
    for flavour in FLAVOURS {
        for family in Family::ALL {
            in_netns(|| test(family, flavour));
        }
    }
}

const PODS: [&str; 2] = ["10.244.0.0/16", "fd24::/16"];
const EVERYWHERE: [&str; 2] = ["0.0.0.0/0", "::/0"];

#[test]
fn what_is_saved_is_what_was_restored() {
    both(|family, flavour| {
        let node = node(family, &PODS, &EVERYWHERE);
        for layout in [Layout::Compat, Layout::Tree] {
            let settings = RuleSettings {
                layout,
                ..RuleSettings::new(family)
            };
            // The start is the present state: nothing at first, then the chains of the other layout.
            let save = run(&tool(family, flavour, "save"), &[], "");
            let mut ruleset = Ruleset::adopt(settings, found(&save));
            let services = all(family, 0..120);
            let change = |services, complete| Change {
                family,
                node: &node,
                services,
                complete,
            };
            apply(&mut ruleset, flavour, Limits::NFT, change(&services, true));
            let fewer: Vec<_> =
                services.iter().map(|(key, _)| (key.clone(), None)).take(70).collect();
            apply(&mut ruleset, flavour, Limits::NFT, change(&fewer, false));
            let more = all(family, 0..30);
            let save = apply(&mut ruleset, flavour, Limits::NFT, change(&more, false));
            // The rules are recognized, whichever program wrote them.
            let mut adopted = Ruleset::adopt(settings, found(&save));
            let now: Vec<_> = services.iter().skip(70).chain(&more).cloned().collect();
            let staged = adopted.stage(change(&now, true));
            assert!(staged.is_empty(), "{staged:#?}");
            adopted.accept(staged);
        }
    });
}

#[test]
fn a_big_change_in_parts_is_the_same_as_at_once() {
    both(|family, flavour| {
        let node = node(family, &PODS, &EVERYWHERE);
        let services = all(family, 0..60);
        let change = |services| Change {
            family,
            node: &node,
            services,
            complete: true,
        };
        let limits = Limits {
            chains: 20,
            rules: 30,
        };
        let mut ruleset = Ruleset::new(RuleSettings::new(family));
        apply(&mut ruleset, flavour, limits, change(&services));
        let others = all(family, 40..100);
        apply(&mut ruleset, flavour, limits, change(&others));
        let none = Vec::new();
        apply(&mut ruleset, flavour, limits, change(&none));
    });
}

#[test]
fn c5_settings_are_printed_as_they_are_written() {
    both(|family, flavour| {
        let one = &EVERYWHERE;
        let nodes = [
            node(family, &PODS, one),
            node(family, &[], one),
            node(
                family,
                &["10.1.0.0/16", "10.2.0.0/16", "fd01::/64", "fd02::/64"],
                one,
            ),
            node(
                family,
                &PODS,
                &["192.0.2.0/24", "127.0.0.0/8", "2001:db8::/32", "::1/128"],
            ),
            node(family, &PODS, &["96.0.0.0/3", "::/64"]),
        ];
        let interface = |name, prefix| PodInterface::new(name, prefix);
        let interfaces = [
            None,
            interface("cbr0", false),
            interface("veth", true),
            interface("fifteen-letters", true),
            interface("a#b$c;d", false),
        ];
        let services = all(family, 0..3);
        let save = || run(&tool(family, flavour, "save"), &[], "");
        for (number, bit) in (0..).zip([0, 14, 31, 7, 15]) {
            let node: &NodePlan = &nodes[number];
            let settings = RuleSettings {
                masquerade_bit: bit,
                random_fully: number != 1,
                localhost_nodeports: number != 4,
                tcp_be_liberal: number == 2,
                pod_interface: interfaces[(number + 2) % 5],
                ..RuleSettings::new(family)
            };
            let mut ruleset = Ruleset::adopt(settings, found(&save()));
            let change = Change {
                family,
                node,
                services: &services,
                complete: true,
            };
            apply(&mut ruleset, flavour, Limits::NFT, change);
        }
        let settings = RuleSettings::new(family);
        let mut ruleset = Ruleset::adopt(settings, found(&save()));
        for node in &nodes {
            let change = Change {
                family,
                node,
                services: &services,
                complete: node == &nodes[0],
            };
            apply(&mut ruleset, flavour, Limits::NFT, change);
        }
        for name in ["INPUT", "FORWARD", "OUTPUT"] {
            let chain = BuiltIn::parse(name).unwrap();
            let jump = format!("-A {chain} ");
            assert!(save().contains(&jump));
        }
    });
}

#[test]
fn c3_shares_of_many_endpoints_are_printed_as_they_are_written() {
    both(|family, flavour| {
        let node = node(family, &PODS, &EVERYWHERE);
        let plan = service(1, family, 1_200);
        let services = vec![(plan.key.clone(), Some(plan))];
        let change = Change {
            family,
            node: &node,
            services: &services,
            complete: true,
        };
        let mut ruleset = Ruleset::new(RuleSettings::new(family));
        let ours = apply(&mut ruleset, flavour, Limits::NFT, change);
        // kube-proxy writes ten decimals.
        let mut theirs = "*nat\n:KUBE-TEST - [0:0]\n".to_owned();
        for left in (2..=1_200_u32).rev() {
            let share = 1.0 / f64::from(left);
            let line = "-A KUBE-TEST -m statistic --mode random --probability";
            theirs.push_str(&format!("{line} {share:.10} -j RETURN\n"));
        }
        theirs.push_str("COMMIT\n");
        run(&tool(family, flavour, "restore"), &["--noflush"], &theirs);
        let theirs = run(&tool(family, flavour, "save"), &["-t", "nat"], "");
        let shares = |save: &str, chain: &str| -> Vec<String> {
            save.lines()
                .filter(|line| line.starts_with(&format!("-A {chain}")))
                .filter_map(|line| line.split("--probability ").nth(1))
                .filter_map(|rest| rest.split(' ').next())
                .map(str::to_owned)
                .collect()
        };
        let ours = shares(&ours, "KUBE-SVC-");
        assert_eq!(ours.len(), 1_199);
        assert_eq!(ours, shares(&theirs, "KUBE-TEST "));
    });
}
