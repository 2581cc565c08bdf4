//! A node that kube-proxy served comes to us: ours starts, what kube-proxy left goes, and nobody
//! notices (I4).

use anyhow::{Context as _, Result, ensure};
use kplane_dataplane::backend::Kind;
use kplane_dataplane::leftovers::{self, Removal};
use kplane_model::{Family, Protocol};
use kplane_tests::client::Probe;
use kplane_tests::netns::NetNs;
use kplane_tests::privilege::need_tools;

use crate::netns::churn::Loads;
use kplane_tests::support::ipvs::run;
use kplane_tests::support::kube_proxy::Mode;
use kplane_tests::support::nft::nft;
use kplane_tests::support::{At, Client, Seen, Setup, World, ask, tcp_service};
use kplane_tests::wait::DEADLINE;

/// Everybody who reaches a Service with a node port.
pub(crate) const EVERYBODY: [(Client, At, Family); 5] = [
    (Client::PodHere, At::ClusterIp, Family::V4),
    (Client::Outside, At::ClusterIp, Family::V6),
    (Client::Outside, At::NodePort, Family::V4),
    (Client::Node, At::ClusterIp, Family::V6),
    (Client::PodHere, At::NodePort, Family::V6),
];

/// What the agent does when ours serves, and at `--cleanup`.
fn remove(node: &NetNs) -> Result<Removal> {
    node.run(|| Ok(leftovers::find(Kind::Nftables.serving([None; 2])).remove()))
}

fn remove_all(node: &NetNs) -> Result<Vec<String>> {
    let outcome = remove(node)?;
    ensure!(outcome.problems.is_empty(), "{:?}", outcome.problems);
    let left = node.run(|| Ok(leftovers::find(Kind::Nftables.serving([None; 2]))))?;
    ensure!(left.is_empty(), "left: {left}");
    Ok(outcome.removed)
}

const IPTABLES: [&str; 2] = ["iptables-legacy-save", "iptables-nft-save"];

pub(crate) fn i4_nothing_fails_while_its_nftables_rules_are_replaced() -> Result<()> {
    need_tools(&["nft"])?;
    nothing_fails_while_replaced(Mode::Nftables)
}

pub(crate) fn i4_nothing_fails_while_its_legacy_iptables_rules_are_replaced() -> Result<()> {
    need_tools(&IPTABLES)?;
    nothing_fails_while_replaced(Mode::Legacy)
}

pub(crate) fn i4_nothing_fails_while_its_nft_iptables_rules_are_replaced() -> Result<()> {
    need_tools(&IPTABLES)?;
    nothing_fails_while_replaced(Mode::Nft)
}

fn nothing_fails_while_replaced(mode: Mode) -> Result<()> {
    let service = tcp_service();
    let mut world = World::new(Setup::PodRanges)?;
    let node = world.node(1)?.clone();
    // That its rules serve at all, and not ours.
    let to = service.address(At::ClusterIp, Family::V4, 1);
    let before = ask(&world.net, Client::Outside, Protocol::Tcp, to)?;
    ensure!(!matches!(before, Seen::Hit { .. }), "{before} before rules");
    mode.serve(&node, &service)?;
    let loads = Loads::start(&world, &service, &EVERYBODY)?;
    let mut session = Probe::tcp(to).open(world.net.ns(Client::Outside)?)?;
    loads.progress(5)?;

    let first = world.first()?;
    first.replace(std::slice::from_ref(&service))?;
    loads.progress(5)?;
    for round in 0..2 {
        let removed = remove_all(&node)?;
        ensure!(!removed.is_empty(), "nothing was removed in round {round}");
        loads.progress(20)?;
        session.echo(DEADLINE)?;
        // It comes back, as a kube-proxy does that still runs.
        if round == 0 {
            mode.serve(&node, &service)?;
            loads.progress(5)?;
        }
    }
    ensure!(remove_all(&node)?.is_empty(), "removed something again");
    session.echo(DEADLINE)?;
    world.first()?.ensure_equal()?;
    loads.none_lost()
}

/// Chains of kubelet's, of a container network and of an administrator, in all tables.
const OTHERS: &str = "\
    *mangle\n:KUBE-IPTABLES-HINT - [0:0]\n:KUBE-KUBELET-CANARY - [0:0]\n-A PREROUTING -j ACCEPT\n\
    COMMIT\n\
    *filter\n\
    :KUBE-FIREWALL - [0:0]\n\
    :KUBE-KUBELET-CANARY - [0:0]\n\
    :MINE - [0:0]\n\
    -A INPUT -j KUBE-FIREWALL\n\
    -A OUTPUT -j KUBE-FIREWALL\n\
    -A FORWARD -m comment --comment \"not to -j KUBE-FORWARD\" -j MINE\n\
    -A KUBE-FIREWALL -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -m comment --comment \"block incoming localnet connections\" -m mark --mark 0x123 -j DROP\n\
    -A MINE -m comment --comment \"say \\\"hello\\\"\" -j RETURN\n\
    COMMIT\n\
    *nat\n\
    :KUBE-KUBELET-CANARY - [0:0]\n\
    :KUBE-MARK-DROP - [0:0]\n\
    :KUBE-SVC-MINE - [0:0]\n\
    -A PREROUTING -j KUBE-SVC-MINE\n\
    -A OUTPUT -j KUBE-SVC-MINE\n\
    -A POSTROUTING -m mark --mark 0x123 -j ACCEPT\n\
    -A KUBE-MARK-DROP -j MARK --or-mark 0x8000\n\
    COMMIT\n";

/// C8: kubelet's rule in KUBE-FIREWALL included.
pub(crate) fn i4_rules_of_kubelet_and_others_stay_as_they_were() -> Result<()> {
    need_tools(&IPTABLES)?;
    need_tools(&["nft"])?;
    let node = NetNs::new("node")?;
    let pairs = [Mode::Legacy, Mode::Nft].map(|mode| Family::ALL.map(|family| (mode, family)));
    let all = pairs.as_flattened();
    let list = || -> Result<Vec<Vec<String>>> {
        all.iter().map(|(mode, family)| mode.save(&node, *family)).collect()
    };
    for (mode, family) in all {
        mode.restore(&node, *family, OTHERS)?;
    }
    nft(
        &node,
        "add table inet mine; add chain inet mine KUBE-SERVICES",
    )?;
    let before = list()?;
    for mode in [Mode::Nftables, Mode::Legacy, Mode::Nft] {
        mode.serve(&node, &tcp_service())?;
    }
    ensure!(list()? != before, "kube-proxy's rules change nothing");
    let removed = remove_all(&node)?;
    // Two tables of nftables; three of iptables in two kinds and two families.
    ensure!(removed.len() == 2 + 12, "{removed:#?}");
    let after = list()?;
    ensure!(after == before, "before: {before:#?}\nafter: {after:#?}");
    nft(&node, "list chain inet mine KUBE-SERVICES").map(drop)
}

pub(crate) fn i4_chains_that_others_need_are_kept_and_named() -> Result<()> {
    need_tools(&IPTABLES)?;
    let node = NetNs::new("node")?;
    for mode in [Mode::Legacy, Mode::Nft] {
        mode.serve(&node, &tcp_service())?;
        let others = "*nat\n:CNI-DN-1 - [0:0]\n-A CNI-DN-1 -j KUBE-MARK-MASQ\nCOMMIT\n";
        mode.restore(&node, Family::V4, others)?;
        for _ in 0..2 {
            let outcome = remove(&node)?;
            let problems: Vec<String> = outcome.problems.iter().map(ToString::to_string).collect();
            let [problem] = &problems[..] else {
                anyhow::bail!("{problems:?}")
            };
            ensure!(
                problem.contains("KUBE-MARK-MASQ, KUBE-POSTROUTING kept"),
                "{problem}"
            );
        }
        let left = mode.save(&node, Family::V4)?;
        let mut kube = left.iter().filter(|line| line.contains("KUBE-"));
        let known = ["KUBE-MARK-MASQ", "KUBE-POSTROUTING"];
        let foreign = kube.find(|line| known.iter().all(|name| !line.contains(name)));
        ensure!(foreign.is_none(), "{foreign:?}");
        // They still do what they did.
        let rules = [
            "-A POSTROUTING",
            "-A KUBE-POSTROUTING",
            "-A KUBE-MARK-MASQ",
            "-A CNI-DN-1",
        ];
        for rule in rules {
            ensure!(
                left.iter().any(|l| l.starts_with(rule)),
                "no {rule} in {left:#?}"
            );
        }
        mode.restore(
            &node,
            Family::V4,
            "*nat\n-F CNI-DN-1\n-X CNI-DN-1\nCOMMIT\n",
        )?;
        remove_all(&node)?;
    }
    Ok(())
}

/// D2, D3: the link stands for the dummy link that this kernel may not have.
pub(crate) fn i4_what_ipvs_mode_left_is_removed() -> Result<()> {
    need_tools(&["ipset"])?;
    need_tools(&IPTABLES)?;
    let node = NetNs::new("node")?;
    let peer = NetNs::new("peer")?;
    let link = node.netlink()?;
    link.veth("kube-ipvs0", &peer, "other")?;
    link.add_address("kube-ipvs0", "10.96.0.1".parse()?, 32)?;
    for set in [
        "KUBE-CLUSTER-IP hash:ip,port",
        "KUBE-6-CLUSTER-IP hash:ip,port family inet6",
        "KUBE-LOOP-BACK hash:ip,port,ip",
        "KUBE-NODE-PORT-TCP bitmap:port range 0-65535",
        "MINE hash:ip",
    ] {
        run(&node, &format!("ipset create {set}"))?;
    }
    run(&node, "ipset add KUBE-CLUSTER-IP 10.96.0.1,tcp:80")?;
    // A set that is in use cannot go before its rule.
    let rules = "*nat\n\
        :KUBE-SERVICES - [0:0]\n\
        :KUBE-LOAD-BALANCER - [0:0]\n\
        -A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
        -A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT\n\
        COMMIT\n\
        *filter\n:KUBE-IPVS-FILTER - [0:0]\n\
        -A INPUT -m comment --comment \"kubernetes ipvs access filter\" -j KUBE-IPVS-FILTER\n\
        COMMIT\n";
    Mode::Legacy.restore(&node, Family::V4, rules)?;
    let removed = remove_all(&node)?;
    ensure!(removed.len() == 2 + 1 + 4, "{removed:#?}");
    ensure!(link.index("kube-ipvs0").is_err(), "the link is there");
    let sets = run(&node, "ipset list -name")?;
    ensure!(sets == "MINE\n", "{sets}");
    ensure!(remove_all(&node)?.is_empty(), "removed something again");
    // A set that somebody else uses is named, and nothing else is held up by it.
    run(&node, "ipset create KUBE-LOOP-BACK hash:ip,port,ip")?;
    run(&node, "ipset create KUBE-CLUSTER-IP hash:ip,port")?;
    let used =
        "*filter\n-A INPUT -m set --match-set KUBE-LOOP-BACK dst,dst,src -j ACCEPT\nCOMMIT\n";
    Mode::Legacy.restore(&node, Family::V4, used)?;
    let outcome = remove(&node)?;
    ensure!(outcome.removed == ["IP set KUBE-CLUSTER-IP"], "{outcome:?}");
    let problem = outcome.problems.first().context("no problem")?.to_string();
    ensure!(
        problem.contains("ipset destroy KUBE-LOOP-BACK"),
        "{problem}"
    );
    Ok(())
}

pub(crate) fn i4_cleanup_removes_everything_of_both_and_may_be_repeated() -> Result<()> {
    need_tools(&IPTABLES)?;
    need_tools(&["nft"])?;
    let service = tcp_service();
    let mut world = World::serving(Setup::PodRanges, std::slice::from_ref(&service))?;
    let node = world.node(1)?.clone();
    for mode in [Mode::Nftables, Mode::Legacy, Mode::Nft] {
        mode.serve(&node, &service)?;
    }
    for _ in 0..2 {
        world.first()?.cleanup()?;
        remove_all(&node)?;
        let left = nft(&node, "list ruleset")?;
        ensure!(
            !left.contains("KUBE-") && !left.contains("kube-proxy"),
            "{left}"
        );
        ensure!(!left.contains("kplane"), "{left}");
    }
    let to = service.address(At::ClusterIp, Family::V4, 1);
    let seen = ask(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    ensure!(!matches!(seen, Seen::Hit { .. }), "{seen} without rules");
    Ok(())
}

/// `iptables-nft` makes tables where it is asked for one; a namespace without any stays so.
pub(crate) fn i4_looking_creates_nothing() -> Result<()> {
    need_tools(&IPTABLES)?;
    need_tools(&["nft"])?;
    let node = NetNs::new("node")?;
    ensure!(
        remove_all(&node)?.is_empty(),
        "something in an empty namespace"
    );
    let ruleset = nft(&node, "list ruleset")?;
    ensure!(ruleset.is_empty(), "{ruleset}");
    let legacy = node.run(|| {
        let names = std::fs::read_to_string("/proc/thread-self/net/ip_tables_names");
        Ok(names.unwrap_or_default())
    })?;
    ensure!(legacy.is_empty(), "{legacy}");
    Ok(())
}
