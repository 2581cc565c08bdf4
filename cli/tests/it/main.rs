//! The real binary against a real gRPC server.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]

mod support;

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kpctl_samples as samples;
use kplane_proto::v1 as pb;
use support::{ControlPlane, Done, Running, at_home, kpctl, nobody, program, run};
use tempfile::TempDir;

fn healthy() -> ControlPlane {
    ControlPlane::start(samples::healthy_fleet())
}

fn troubled() -> ControlPlane {
    ControlPlane::start(samples::troubled_fleet())
}

fn done(server: SocketAddr, args: &[&str]) -> Done {
    run(&mut kpctl(server, args))
}

/// The output of a command that must do its work without a word on stderr.
fn text(server: SocketAddr, args: &[&str]) -> String {
    let done = done(server, args);
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""), "{args:?}");
    done.stdout
}

/// What a command that must fail with this exit code says on stderr.
fn error(code: i32, server: SocketAddr, args: &[&str]) -> String {
    let done = done(server, args);
    assert_eq!(done.code, Some(code), "{args:?}: {done:?}");
    done.stderr
}

/// A change that is not only one of the clock.
fn next_revision(fleet: &mut pb::Fleet) {
    fleet.control_plane.as_mut().unwrap().revision += 1;
}

#[test]
fn every_command_prints_plain_text_into_a_pipe_and_cuts_nothing() {
    let plane = troubled();
    let commands: [&[&str]; 7] = [
        &["status"],
        &["fleet"],
        &["get", "services"],
        &["get", "ep", "-n", "shop"],
        &["get", "nodes"],
        &["describe", "svc", "web", "-n", "shop"],
        &["version"],
    ];
    for command in commands {
        let text = text(plane.address, command);
        assert!(!text.is_empty());
        assert!(text.is_ascii(), "{command:?}: {text:?}");
        assert!(!text.contains('\x1b'), "{command:?}: {text:?}");
        assert!(!text.contains("..") && !text.contains("end in"), "{text}");
    }
    let mut fleet = samples::fleet(Vec::new());
    let name = format!("{}.eu-west-1.compute.internal", "a".repeat(200));
    fleet.nodes = vec![samples::failing(&name), samples::node("b.internal")];
    let plane = ControlPlane::start(fleet);
    for command in [&["status"][..], &["get", "nodes"]] {
        let text = text(plane.address, command);
        assert!(text.contains(&format!("\n{name}  Failing  ")), "{text}");
    }
}

#[test]
fn names_and_templates_for_scripts() {
    let plane = troubled();
    let get = |args: &[&str]| text(plane.address, args);
    let nodes = "node/node-a\nnode/node-b\nnode/node-c\nnode/node-d\nnode/node-e\n";
    assert_eq!(get(&["get", "nodes", "-o", "name"]), nodes);
    assert_eq!(get(&["status", "-o", "name"]), nodes);
    assert_eq!(
        get(&["get", "svc", "-o", "name"]),
        "service/kube-system/kube-dns\nservice/shop/database\nservice/shop/web\n"
    );
    assert_eq!(
        get(&["get", "ep", "-n", "shop", "-o", "name"]),
        "endpoints/shop/database\nendpoints/shop/web\n"
    );
    let template = r#"jsonpath={range .items[?(@.state!="InSync")]}{.name} {.state}{"\n"}{end}"#;
    assert_eq!(
        get(&["get", "nodes", "-o", template]),
        "node-b Syncing\nnode-c Failing\nnode-d Disconnected\nnode-e NoAgent\n"
    );
    let nothing = error(1, plane.address, &["version", "-o", "name"]);
    assert!(nothing.contains("no list of names"), "{nothing}");
    let wrong = error(
        2,
        plane.address,
        &["get", "nodes", "-o", "jsonpath={.items"],
    );
    assert!(wrong.contains("has no '}'"), "{wrong}");
    let wrong = error(2, plane.address, &["get", "nodes", "-o", "csv"]);
    assert!(wrong.contains("jsonpath=TEMPLATE"), "{wrong}");
}

#[test]
fn network_policies() {
    let plane = troubled();
    let get = |args: &[&str]| text(plane.address, args);
    assert_eq!(
        get(&["get", "policies", "-o", "name"]),
        "policy/kube-system/dns\npolicy/shop/default-deny\npolicy/shop/web\n"
    );
    let sorted = [
        "get",
        "netpol",
        "-n",
        "shop",
        "--no-headers",
        "--sort-by",
        "pods",
    ];
    assert_eq!(
        get(&sorted),
        "web           Ingress         0\ndefault-deny  Ingress,Egress  41\n"
    );
    let policy = get(&["describe", "policy", "policy/shop/db"]);
    assert!(policy.starts_with("NetworkPolicy   shop/db\n"), "{policy}");
    let none = error(1, plane.address, &["describe", "netpol", "x", "-n", "shop"]);
    assert!(none.contains("no NetworkPolicy shop/x"), "{none}");
    let why = |from, options: &[&'static str]| {
        [&["why", "pod/shop/db-0:9187", "--from", from], options].concat()
    };
    let denied = get(&why(
        "pod/shop/web-1",
        &["-o", "jsonpath={.allowed} {.ingress.verdict}"],
    ));
    assert_eq!(denied, "false Denied\n");
    let off = error(1, plane.address, &why("10.0.0.7", &[]));
    assert!(off.contains("enforce no NetworkPolicies"), "{off}");
    error(2, plane.address, &why("pod", &[]));
    error(2, plane.address, &why("10.0.0.7", &["--via", "node-a"]));
    error(2, plane.address, &["why", "shop/web", "--from", "10.0.0.7"]);
    // Without a kubeconfig, the control plane finds the Pod.
    let named = get(&["why", "shop/web", "--from", "pod/shop/client-1"]);
    assert!(named.contains("from pod shop/client-1 to"), "{named}");
}

#[test]
fn denied_packets() {
    let plane = troubled();
    let counts = text(plane.address, &["drops"]);
    assert!(
        counts.contains("shop/db-0   10.244.1.7  node-1  Ingress    12,345\n"),
        "{counts}"
    );
    // It ends by itself.
    let path = "jsonpath={.packets[0].fromPod} {.packets[0].isolating[0]}";
    let follow = ["drops", "--follow", "--for", "1s", "-n", "shop", "-o", path];
    assert_eq!(text(plane.address, &follow), "shop/web-1 shop/db\n");
    let follow = text(plane.address, &["drops", "-f", "--for", "1s"]);
    let line =
        "shop/web-1 (10.244.2.9:40332) to shop/db-0 (10.244.1.7:5432) TCP: isolated by shop/db\n";
    assert!(
        follow.contains(line) && follow.contains("2 of 2 nodes answered"),
        "{follow}"
    );
    let none = error(1, plane.address, &["drops", "--pod", "shop/x"]);
    assert!(none.contains("no Pod shop/x"), "{none}");
    error(2, plane.address, &["drops", "--follow", "--for", "2h"]);
    error(2, plane.address, &["drops", "--pod", "shop/"]);
}

#[test]
fn who_is_connected() {
    let plane = healthy();
    let asked = done(plane.address, &["flows", "service/shop/web"]);
    assert_eq!(asked.code, Some(6), "{asked:?}");
    let expected = "\
Service         shop/web
Connections     4,714 open, from 2 clients to 1 endpoint; 2 of 3 nodes answered

CLIENT               ENDPOINT    PORT      OPEN   STATE                         OLDEST  BYTES    NODE
shop/cart-1          shop/web-1  http/TCP  4,713  4,711 established, 2 closing  1h1m    7.0 MiB  node-1
192.0.2.7 (outside)  shop/web-1  http/TCP  1      unreplied                     -       -        node-2

node-2: no bytes are counted: net.netfilter.nf_conntrack_acct is 0, or was when connections began
node-2: no ages are kept: net.netfilter.nf_conntrack_timestamp is 0, or was when connections began

Unknown: node-3: its agent is not connected
";
    assert_eq!(asked.stdout, expected);
    let path = "jsonpath={.flows[0].clientName} {.flows[1].clientKind} {.nodes.silent[0].node}";
    let json = done(plane.address, &["flows", "web", "-n", "shop", "-o", path]);
    assert_eq!(json.stdout, "shop/cart-1 Outside node-3\n");
    let none = done(plane.address, &["flows", "shop/web", "--from", "outside"]);
    assert!(none.stdout.contains("No client is connected"), "{none:?}");
    let unknown = error(1, plane.address, &["flows", "shop/x"]);
    assert!(unknown.contains("no Service shop/x"), "{unknown}");
    error(2, plane.address, &["flows", "shop/web", "--to", "outside"]);

    let args = ["flows", "shop/web", "-w", "-o", "json"];
    let watch = Running::start(&mut kpctl(plane.address, &args));
    let next = || -> serde_json::Value { serde_json::from_str(&watch.stdout.next()).unwrap() };
    assert_eq!(next()["flows"][0]["established"], 4_711);
    plane.fleet.send_modify(next_revision);
    assert_eq!(next()["flows"][0]["established"], 4_712);
}

#[test]
fn who_talked_to_whom() {
    let plane = healthy();
    let asked = done(plane.address, &["graph", "--since", "1h"]);
    assert_eq!(asked.code, Some(6), "{asked:?}");
    let expected = "\
Connections     14,136 began in 1h, 345 failed, from 2 clients to 1 Service port; 2 of 3 nodes answered

CLIENT               SERVICE            ENDPOINT    CONN/S  FAILED    BYTES
shop/cart-1          shop/web http/TCP  shop/web-1  2.00    0         837 MiB
shop/cart-1          shop/web http/TCP  shop/\"];\\   1.91    345 (5%)  802 MiB
192.0.2.7 (outside)  shop/web http/TCP  shop/web-1  0.01    0         4.1 MiB

Unknown: node-3: its agent does not count connections
";
    assert_eq!(asked.stdout, expected);
    let dot = done(plane.address, &["graph", "shop/web", "-o", "dot"]);
    assert!(dot.stdout.starts_with("digraph kplane {\n"), "{dot:?}");
    let hostile = r#"  n3 [label="shop/\"];\\", shape=component];"#;
    assert!(dot.stdout.contains(hostile), "{dot:?}");
    let path =
        "jsonpath={.edges[1].clientName} {.edges[1].failed} {.edges[2].clientKind} {.sinceSeconds}";
    let json = done(plane.address, &["graph", "--since", "10m", "-o", path]);
    assert_eq!(json.stdout, "shop/cart-1 345 Outside 600\n");
    let none = done(plane.address, &["graph", "-n", "empty"]);
    assert!(none.stdout.contains("No connection"), "{none:?}");
    error(2, plane.address, &["graph", "--since", "2h"]);
    error(2, plane.address, &["graph", "a/b/c"]);
    let wrong = error(1, plane.address, &["status", "-o", "dot"]);
    assert!(wrong.contains("-o dot is for kpctl get graph"), "{wrong}");
}

#[test]
fn rows_are_selected_and_sorted() {
    let plane = troubled();
    let get = |args: &[&str]| text(plane.address, &[&["get"], args].concat());
    let first = |text: &str| -> Vec<String> {
        text.lines()
            .filter_map(|line| line.split(' ').next())
            .map(str::to_owned)
            .collect()
    };
    let services = get(&["services", "-n", "shop", "--no-headers"]);
    assert_eq!(first(&services), ["database", "web", "web"]);
    let sorted = ["nodes", "--no-headers", "--sort-by", "revisions.lag"];
    assert_eq!(
        first(&get(&sorted)),
        ["node-a", "node-c", "node-b", "node-d", "node-e"]
    );
    let wrong = ["get", "nodes", "--sort-by", "lag"];
    assert!(error(1, plane.address, &wrong).contains("the fields are "));
    let states = ["nodes", "--state", "failing,noagent", "--no-headers"];
    assert_eq!(first(&get(&states)), ["node-c", "node-e"]);
    assert_eq!(first(&get(&["node", "node/node-b"]))[1..], ["node-b"]);
    assert_eq!(
        get(&["nodes", "--zone", "nowhere", "--no-headers"]).lines().next(),
        Some("No nodes.")
    );
    let web = get(&["service", "shop/web", "--no-headers"]);
    assert_eq!(web.lines().count(), 2, "{web}");
    assert!(web.starts_with("web   10.96.0.10 "), "{web}");
    let endpoints = get(&["endpoints", "web", "-n", "shop", "--node", "node-a"]);
    assert_eq!(endpoints.matches("node-a").count(), 2, "{endpoints}");
    assert!(!endpoints.contains("node-b"), "{endpoints}");
    let none = error(1, plane.address, &["get", "service", "shop/wbe"]);
    assert!(none.contains("shop/web"), "{none}");
    let none = error(1, plane.address, &["get", "node", "nowhere"]);
    assert!(none.contains("no node nowhere is known"), "{none}");
}

#[test]
fn help_is_a_command() {
    let plane = healthy();
    let help = text(plane.address, &["help", "get", "nodes"]);
    assert!(help.contains("--state"), "{help}");
    assert!(text(plane.address, &["help"]).contains("Exit codes:"));
}

#[test]
fn formats_of_every_command() {
    let plane = troubled();
    let commands: [(&[&str], &str); 6] = [
        (&["status"], "Fleet"),
        (&["get", "svc"], "ServiceList"),
        (&["get", "endpoints"], "EndpointList"),
        (&["get", "no"], "NodeList"),
        (&["describe", "service", "shop/web"], "ServiceDescription"),
        (&["version"], "Version"),
    ];
    for (command, kind) in commands {
        let json = text(plane.address, &[command, &["-o", "json"]].concat());
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["kind"], kind);
        let yaml = text(plane.address, &[command, &["-o", "yaml"]].concat());
        let yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
        assert_eq!(yaml, json);
        let wide = text(plane.address, &[command, &["-o", "wide"]].concat());
        assert!(!wide.contains('\x1b') && wide.is_ascii());
    }
}

#[test]
fn namespaces_are_the_servers_business() {
    let plane = healthy();
    let all = text(plane.address, &["get", "svc", "-A"]);
    assert!(all.contains("kube-dns") && all.contains("web"));
    let one = text(plane.address, &["get", "svc", "-n", "kube-system"]);
    assert!(one.contains("kube-dns") && !one.contains("web"));
    let none = text(plane.address, &["get", "ep", "-n", "empty"]);
    assert_eq!(none, "No endpoints in namespace empty.\n");
}

#[test]
fn check_is_for_scripts() {
    let check = ["status", "--check"];
    assert_eq!(done(healthy().address, &check).code, Some(0));
    let plane = troubled();
    let trouble = done(plane.address, &check);
    assert_eq!(trouble.code, Some(3));
    // One tenant's mistake is no reason to stop a rollout, and a node that lags is none to blame the input.
    let mut mistake = samples::healthy_fleet();
    mistake.control_plane.as_mut().unwrap().issues = samples::issues();
    let mistake = ControlPlane::start(mistake);
    let lagging = ControlPlane::start(samples::fleet(vec![samples::syncing("n")]));
    for (plane, codes) in [(&mistake, [3, 0, 3]), (&lagging, [3, 3, 0])] {
        let what = ["all", "nodes", "input"].map(|what| format!("--check={what}"));
        let ended = what.each_ref().map(|what| {
            let done = done(plane.address, &["status", what]);
            done.code.unwrap()
        });
        assert_eq!(ended, codes);
    }
    let one = |node: &str| done(plane.address, &["status", node, "--check"]);
    assert_eq!(one("node-a").code, Some(0));
    assert_eq!(one("node-b").code, Some(3));
    assert!(one("node-b").stdout.starts_with("Node            node-b\n"));
    assert_eq!(trouble.stdout, text(plane.address, &["status"]));
    assert_eq!(
        error(
            3,
            ControlPlane::start(samples::fleet(Vec::new())).address,
            &check
        ),
        ""
    );
}

#[test]
fn approve_lets_go_what_was_shown() {
    let plane = ControlPlane::start(samples::holding_fleet());
    let check = ["status", "--check"];
    assert_eq!(done(plane.address, &check).code, Some(3));
    // Nobody is there to be asked: what it is about is shown, and nothing is done.
    let refused = done(plane.address, &["approve"]);
    assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""));
    assert!(refused.stderr.contains("991 services"), "{refused:?}");
    assert!(refused.stderr.contains("use --yes"), "{refused:?}");
    assert!(plane.fleet.borrow().control_plane.as_ref().unwrap().held.is_some());

    let json = text(plane.address, &["approve", "--yes", "-o", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&json["kind"], &json["approved"]),
        (&"Approval".into(), &true.into())
    );
    assert_eq!(json["held"]["services"], 991);
    let nothing = "Nothing waits for approval.\n";
    assert_eq!(text(plane.address, &["approve"]), nothing);
    assert_eq!(text(plane.address, &["approve", "--yes"]), nothing);
}

#[test]
fn approve_at_a_terminal_asks() {
    let plane = ControlPlane::start(samples::holding_fleet());
    let at_terminal = |answer: &str| {
        // util-linux: a terminal of its own for the program, fed from a pipe.
        let mut command = std::process::Command::new("script");
        let kpctl = env!("CARGO_BIN_EXE_kpctl");
        command
            .args(["-qec", &format!("{kpctl} approve"), "/dev/null"])
            .env("KPLANE_SERVER", plane.address.to_string())
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped());
        let mut child = command.spawn().ok()?;
        let mut stdin = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut stdin, format!("{answer}\n").as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        drop(stdin);
        Some((
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        ))
    };
    let Some((code, text)) = at_terminal("n") else {
        eprintln!("skipped: there is no `script` program");
        return;
    };
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.contains("[y/N]") && text.contains("Nothing was approved."),
        "{text}"
    );
    let (code, text) = at_terminal("y").unwrap();
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("Approved: "), "{text}");
}

#[test]
fn watch_prints_a_block_a_change() {
    let plane = healthy();
    let watch = Running::start(&mut kpctl(plane.address, &["status", "-w"]));
    watch.stdout.find("3/3 in sync");
    watch.stdout.find("node-c  InSync");
    plane.fleet.send_modify(|fleet| fleet.nodes[1] = samples::syncing("node-b"));
    assert_eq!(watch.stdout.next(), "", "between two blocks");
    watch.stdout.find("2/3 in sync, 1 syncing");
    watch.stdout.find("node-b  Syncing");
}

#[test]
fn watch_prints_an_object_a_line_and_only_for_changes() {
    let plane = healthy();
    for command in [&["status"][..], &["get", "nodes"]] {
        let args = [command, &["--watch", "-o", "json"]].concat();
        let watch = Running::start(&mut kpctl(plane.address, &args));
        let first: serde_json::Value = serde_json::from_str(&watch.stdout.next()).unwrap();
        plane.fleet.send_modify(|fleet| {
            fleet.control_plane.as_mut().unwrap().now_ms += 1_000;
            fleet.nodes[0].last_heard_ms += 1_000;
        });
        plane.fleet.send_modify(|fleet| fleet.nodes.push(samples::node("z")));
        let second: serde_json::Value = serde_json::from_str(&watch.stdout.next()).unwrap();
        let nodes = |value: &serde_json::Value| {
            let list = value.get("nodes").or_else(|| value.get("items"));
            list.unwrap().as_array().unwrap().len()
        };
        assert_eq!(nodes(&second), nodes(&first) + 1);
    }
}

#[test]
fn watch_of_services_starts_with_all_of_them() {
    let plane = healthy();
    let args = ["get", "services", "-w", "-o", "json"];
    let watch = Running::start(&mut kpctl(plane.address, &args));
    let next = || -> Vec<String> {
        let json: serde_json::Value = serde_json::from_str(&watch.stdout.next()).unwrap();
        json["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| item["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(next(), ["kube-dns"]);
    plane.fleet.send_modify(next_revision);
    assert_eq!(next(), ["kube-dns", "database", "web"]);
    plane.fleet.send_modify(next_revision);
    assert_eq!(next(), ["kube-dns"]);
}

#[test]
fn watch_outlives_the_control_plane() {
    let plane = healthy();
    let address = plane.address;
    let watch = Running::start(&mut kpctl(address, &["status", "-w", "-o", "json"]));
    watch.stdout.next();
    drop(plane);
    let trouble = watch.stderr.find("trying again");
    assert!(trouble.contains("error: "), "{trouble}");
    let mut fleet = samples::healthy_fleet();
    next_revision(&mut fleet);
    let _plane = ControlPlane::start_at(address, fleet);
    assert!(watch.stdout.next().contains("\"revision\":4712"));
}

/// Waits until this many watches follow the convergence.
fn followed(plane: &ControlPlane, watches: usize) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while plane.convergence.receiver_count() < watches {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn wait_ends_when_the_goal_is_reached() {
    let plane = healthy();
    plane.convergence.send_replace(samples::lagging());
    let mut wait = Running::start(&mut kpctl(plane.address, &["wait", "service/shop/web"]));
    followed(&plane, 1);
    plane.convergence.send_replace(samples::converged());
    assert_eq!(
        wait.stdout.next(),
        "service/shop/web: in the kernel of 5,000 of 5,000 nodes; p50 9ms, p99 40ms, max 1.3s"
    );
    assert_eq!(wait.wait().code(), Some(0));
}

#[test]
fn wait_that_does_not_reach_its_goal_names_the_laggards_and_the_next_step() {
    let plane = healthy();
    plane.convergence.send_replace(samples::lagging());
    let args = ["wait", "svc/web", "-n", "shop", "--timeout", "1s"];
    let done = done(plane.address, &args);
    // In a log it says at once what it waits for.
    let said = "waiting: service/shop/web: in the kernel of 4,987 of 5,000 nodes\n";
    assert_eq!(
        (done.code, done.stderr.as_str()),
        (Some(1), said),
        "{done:?}"
    );
    let laggards = "\nand 10 more nodes\n\nNext\n  kpctl describe service shop/web\n";
    assert!(done.stdout.ends_with(laggards), "{}", done.stdout);
}

#[test]
fn wait_exit_codes() {
    let plane = healthy();
    // What is reached is reached at once.
    let code = |args: &[&str], expected| {
        let limit = ["--timeout", if expected == 0 { "30s" } else { "100ms" }];
        let args = [&["wait"], args, &limit[..]].concat();
        assert_eq!(done(plane.address, &args).code, Some(expected), "{args:?}");
    };
    plane.convergence.send_replace(samples::lagging());
    for (args, expected) in [
        (&["svc/web"][..], 1),
        (&["svc/web", "--threshold", "99.8%"], 1),
        (&["svc/web", "--threshold", "99.7%"], 0),
        (&["svc/web", "--for", "verified", "--threshold", "99%"], 1),
        (&["svc/web", "--for=verified", "--threshold", "98"], 0),
        (&["svc/web", "--for=deleted", "--threshold=1%"], 1),
        (&["svc", "web", "shop/api", "--threshold", "99%"], 0),
        (&["shop/web"], 2),
        (&["pod/web"], 2),
        (&["svc/web", "--threshold", "0%"], 2),
        (&["svc/web", "--for=ready"], 2),
        (&[], 2),
    ] {
        code(args, expected);
    }
    plane.convergence.send_replace(pb::Convergence {
        state: pb::ServiceState::Deleted.into(),
        ..samples::converged()
    });
    code(&["svc/web", "--for=deleted"], 0);
    code(&["svc/web"], 1);
    plane.convergence.send_replace(pb::Convergence {
        state: pb::ServiceState::Uncertain.into(),
        ..samples::converged()
    });
    code(&["svc/web", "--for=deleted"], 1);
    assert!(error(1, nobody(), &["wait", "svc/web"]).contains("connection refused"));
    let other = ControlPlane::start_other();
    let old = error(1, other.address, &["wait", "svc/web"]);
    assert!(old.contains("older than this kpctl"), "{old}");
}

#[test]
fn wait_prints_one_document_of_the_last_state() {
    let plane = healthy();
    plane.convergence.send_replace(samples::lagging());
    let args = ["wait", "svc/a", "svc/b", "--timeout", "1s", "-o"];
    let json = done(plane.address, &[&args[..], &["json"]].concat());
    assert_eq!(json.code, Some(1), "{json:?}");
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(
        (&json["kind"], &json["reached"]),
        (&"Wait".into(), &false.into())
    );
    assert_eq!(json["services"][1]["name"], "b");
    assert_eq!(json["services"][0]["programmed"], 4_987);
    let yaml = done(plane.address, &[&args[..], &["yaml"]].concat()).stdout;
    let yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(yaml, json);
}

/// A terminal shows how far it is, also that the first answer has arrived.
#[test]
fn wait_at_a_terminal_shows_its_progress_and_outlives_the_control_plane() {
    let plane = healthy();
    let address = plane.address;
    plane.convergence.send_replace(samples::lagging());
    let mut command = std::process::Command::new("script");
    let kpctl = env!("CARGO_BIN_EXE_kpctl");
    command
        .args([
            "-qec",
            &format!("{kpctl} wait svc/shop/web --timeout 25s"),
            "/dev/null",
        ])
        .env("KPLANE_SERVER", address.to_string())
        .env("TERM", "xterm")
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped());
    let Ok(mut child) = command.spawn() else {
        eprintln!("skipped: there is no `script` program");
        return;
    };
    // The command ends by itself.
    let mut output = child.stdout.take().unwrap();
    let mut text = String::new();
    let mut read_until = |wanted: &str| {
        let mut some = [0; 512];
        while !text.contains(wanted) {
            let read = std::io::Read::read(&mut output, &mut some).unwrap();
            assert!(read > 0, "no {wanted:?} in {text:?}");
            text.push_str(&String::from_utf8_lossy(&some[..read]));
        }
        text = text.split_off(text.find(wanted).unwrap() + wanted.len());
    };
    let progress = "\rservice/shop/web: in the kernel of 4,987 of 5,000 nodes\u{1b}[K";
    read_until(progress);
    drop(plane);
    read_until("trying again");
    let plane = ControlPlane::start_at(address, samples::healthy_fleet());
    plane.convergence.send_replace(samples::lagging());
    read_until(progress);
    plane.convergence.send_replace(samples::converged());
    // The progress is gone before the result is shown.
    read_until("\r\u{1b}[K\u{1b}[32mservice/shop/web: in the kernel of 5,000 of 5,000 nodes");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn describe_knows_what_was_meant() {
    let plane = healthy();
    let text = text(plane.address, &["describe", "service", "shop/web"]);
    assert!(
        text.contains("in the kernel of 4,987 of 5,000 nodes"),
        "{text}"
    );
    let error = |service| error(1, plane.address, &["describe", "service", service]);
    assert_eq!(
        error("shop/wbe"),
        "error: no Service shop/wbe. Did you mean shop/web?\n"
    );
    assert_eq!(
        error("kube-dns"),
        "error: no Service default/kube-dns. Did you mean kube-system/kube-dns?\n"
    );
    assert_eq!(
        error("payments"),
        "error: no Service default/payments. List them with: kpctl get services\n"
    );
}

#[test]
fn refusals_are_told_without_their_escape_codes() {
    let plane = healthy();
    let text = error(1, plane.address, &["describe", "svc", "secret"]);
    assert!(text.contains("not ?[31mfor you"), "{text:?}");
}

#[test]
fn nobody_listens() {
    let address = nobody();
    let expected = format!(
        "error: cannot connect to http://{address}: connection refused. Check that kp-controlplane \
         runs there; --server or KPLANE_SERVER sets its address\n"
    );
    for command in [&["status"][..], &["status", "-w"], &["get", "svc", "-w"]] {
        assert_eq!(error(1, address, command), expected);
    }
}

#[test]
fn nobody_answers() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    for command in [&["status"][..], &["status", "-w"], &["get", "svc"]] {
        let args = [command, &["--timeout", "200ms"]].concat();
        let text = error(1, address, &args);
        let expected = format!("error: no answer from http://{address} within 200ms.");
        assert!(text.starts_with(&expected), "{text}");
    }
}

#[test]
fn a_stream_stays_empty() {
    let plane = ControlPlane::start(pb::Fleet::default());
    let args = ["status", "-w", "--timeout", "200ms"];
    assert!(error(1, plane.address, &args).contains("within 200ms."));
}

#[test]
fn somebody_else_answers() {
    let other = ControlPlane::start_other();
    let text = error(1, other.address, &["status"]);
    assert!(
        text.contains("does not offer kplane.v1.StatusService"),
        "{text}"
    );
}

#[test]
fn the_flag_comes_before_the_environment() {
    let plane = healthy();
    let server = format!("http://{}", plane.address);
    text(nobody(), &["status", "--server", &server]);
}

#[test]
fn wrong_usage() {
    let wrong: [&[&str]; 10] = [
        &[],
        &["frobnicate"],
        &["status", "--check", "--watch"],
        &["status", "-o", "xml"],
        &["status", "--timeout", "0"],
        &["status", "--server", "https://cp:7466"],
        &["status", "--server", "http://192.0.2.1:7466"],
        &["get", "svc", "-n", "shop", "-A"],
        &["describe", "svc", "a/b/c"],
        &["describe", "svc", "a/b", "-n", "c"],
    ];
    for args in wrong {
        assert_ne!(error(2, nobody(), args), "", "{args:?}");
    }
}

#[test]
fn version_shows_what_it_knows() {
    let plane = healthy();
    let own = concat!("Client          ", env!("CARGO_PKG_VERSION"), "\n");
    let both = format!("{own}Control plane   0.1.0\n");
    assert_eq!(text(plane.address, &["version"]), both);
    assert_eq!(text(nobody(), &["version", "--client"]), own);
    let alone = done(nobody(), &["version"]);
    assert_eq!((alone.code, alone.stdout.as_str()), (Some(1), own));
}

#[test]
fn completion_needs_no_server() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = text(nobody(), &["completion", shell]);
        assert!(
            script.contains("kpctl") && script.contains("KPCTL_COMPLETE"),
            "{script}"
        );
    }
}

/// What bash offers for the last of some words.
fn offered(server: SocketAddr, words: &[&str]) -> Vec<String> {
    let mut command = kpctl(server, &[]);
    command.arg("--").arg("kpctl").args(words);
    command.env("KPCTL_COMPLETE", "bash");
    command.env("_CLAP_COMPLETE_INDEX", words.len().to_string());
    command.env("_CLAP_IFS", "\n");
    let done = run(&mut command);
    assert_eq!(
        (done.code, done.stderr.as_str()),
        (Some(0), ""),
        "{words:?}"
    );
    done.stdout.lines().map(str::to_owned).collect()
}

#[test]
fn completion_knows_services_and_nodes() {
    let plane = troubled();
    for (words, expected) in [
        (
            &["describe", "service", ""][..],
            &["kube-system/kube-dns", "shop/database", "shop/web"][..],
        ),
        (&["describe", "service", "shop/w"], &["shop/web"]),
        (
            &["describe", "service", "-n", "shop", ""],
            &["database", "web"],
        ),
        (&["why", "kube"], &["kube-system/kube-dns"]),
        (
            &["wait", "service/s"],
            &["service/shop/database", "service/shop/web"],
        ),
        (&["get", "ep", "-n", ""], &["kube-system", "shop"]),
        (&["get", "nodes", "--zone", ""], &["eu-west-1a"]),
        (&["describe", "policy", "shop/d"], &["shop/default-deny"]),
        (&["status", "node-b"], &["node-b"]),
        (
            &["freeze", "--node", ""],
            &["node-a", "node-b", "node-c", "node-d", "node-e"],
        ),
        (&["get", "svc", "-o", "js"], &["json", "jsonpath="]),
        (&["get", "no", "--state", "F"], &["Failing", "Frozen"]),
    ] {
        assert_eq!(offered(plane.address, words), expected, "{words:?}");
    }
    let commands = offered(plane.address, &["desc"]);
    assert_eq!(commands, ["describe"]);
    let options = offered(plane.address, &["status", "--ch"]);
    assert_eq!(options, ["--check"]);
    // Nobody answers, and nothing breaks the line.
    let options = offered(nobody(), &["describe", "service", ""]);
    assert!(options.iter().all(|of| of.starts_with("--")), "{options:?}");
    let nothing = offered(nobody(), &["describe", "service", "s"]);
    assert_eq!(nothing, Vec::<String>::new());
}

#[test]
fn kubectl_completes_the_plugin() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubectl_complete-kplane");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kpctl"), &path).unwrap();
    let plane = troubled();
    let complete = |words: &[&str]| run(&mut program(&path, plane.address, words)).stdout;
    assert_eq!(
        complete(&["describe", "svc", "shop/"]),
        "shop/database\nshop/web\n:36\n"
    );
    let commands = complete(&["de"]);
    assert_eq!(
        commands,
        "describe\tShow everything about one object\n:36\n"
    );
}

#[test]
fn kubectl_plugin_knows_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubectl-kplane");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kpctl"), &path).unwrap();
    let plane = troubled();
    let help = run(&mut program(&path, plane.address, &["status", "--help"])).stdout;
    assert!(help.contains("Usage: kubectl kplane status"), "{help}");
    let status = run(&mut program(&path, plane.address, &["status"])).stdout;
    assert!(status.contains("\n  kubectl kplane describe service shop/web\n"));
}

#[test]
fn a_reader_may_leave() {
    let plane = healthy();
    let mut child = kpctl(plane.address, &["status"]).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// A home folder with a kubeconfig whose API server does not run; its file, and the server.
fn home() -> (TempDir, PathBuf, String) {
    let home = TempDir::new().unwrap();
    let server = format!("https://{}", nobody());
    let file = home.path().join(".kube/config");
    fs::create_dir(home.path().join(".kube")).unwrap();
    let text = format!(
        "current-context: a\n\
         clusters: [{{name: a, cluster: {{server: {server:?}, certificate-authority-data: Cg==}}}}]\n\
         contexts: [{{name: a, context: {{cluster: a, user: a}}}}]\n\
         users: [{{name: a, user: {{token: secret}}}}]\n"
    );
    fs::write(&file, text).unwrap();
    (home, file, server)
}

#[test]
fn a_kubeconfig_leads_to_the_api_server() {
    let (home, file, server) = home();
    let plane = healthy();
    let unreachable = format!("error: the API server {server} (context a) cannot be reached: ");
    let done = run(&mut at_home(home.path(), &["status"]));
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.stderr.starts_with(&unreachable), "{done:?}");
    assert!(done.stderr.contains("--server 127.0.0.1"), "{done:?}");
    // A flag comes before the environment, whatever they name.
    let flag = ["status", "--kubeconfig", file.to_str().unwrap()];
    assert!(error(1, plane.address, &flag).starts_with(&unreachable));
    let mut named = at_home(home.path(), &["status", "--server"]);
    let done = run(named.arg(plane.address.to_string()));
    assert_eq!(done.code, Some(0), "{done:?}");
    // The kubeconfig's token is for its own cluster.
    assert_eq!(plane.lock.seen(), None);
}

#[test]
fn a_broken_kubeconfig_stops_only_those_who_need_it() {
    let (home, file, _) = home();
    fs::write(&file, "users: [").unwrap();
    let done = run(&mut at_home(home.path(), &["status"]));
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.stderr.contains("is not a kubeconfig"), "{done:?}");
    for args in [&["version", "--client"][..], &["completion", "bash"]] {
        let done = run(&mut at_home(home.path(), args));
        assert_eq!(done.code, Some(0), "{done:?}");
    }
    let done = run(&mut at_home(home.path(), &["status", "--context", "b"]));
    assert_eq!(done.code, Some(1), "{done:?}");
}

#[test]
fn a_token_goes_with_every_call() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("token");
    fs::write(&file, "first\n").unwrap();
    let plane = healthy();
    plane.lock.want("Bearer first");
    let file_name = file.to_str().unwrap();
    let token = ["--token-file", file_name];
    text(plane.address, &[&["status"], &token[..]].concat());
    let describe = ["describe", "svc", "shop/web"];
    text(plane.address, &[&describe, &token[..]].concat());
    let refused = error(1, plane.address, &["status"]);
    assert!(refused.contains("not valid any more"), "{refused}");

    // A watch reads the file again when the token is no longer accepted. A control plane without watches of Services is
    // asked every second.
    plane.fleet.send_modify(|fleet| fleet.control_plane = None);
    let watch = ["get", "svc", "-w", "-o", "json"];
    let watch = [&watch, &token[..]].concat();
    let watch = Running::start(&mut kpctl(plane.address, &watch));
    watch.stdout.next();
    fs::write(&file, "second").unwrap();
    plane.lock.want("Bearer second");
    watch.stderr.find("trying again");
    let deadline = Instant::now() + Duration::from_secs(30);
    while plane.lock.seen().as_deref() != Some("Bearer second") {
        assert!(Instant::now() < deadline, "{:?}", plane.lock.seen());
        std::thread::sleep(Duration::from_millis(20));
    }
    // Without a new one it ends.
    plane.lock.want("Bearer third");
    let last = watch.stderr.find("refused");
    assert!(!last.contains("again"), "{last}");
}

#[test]
fn tokens_that_cannot_be_used() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("token");
    let args = ["status", "--token-file", file.to_str().unwrap()];
    assert!(error(1, nobody(), &args).contains("cannot read /"));
    fs::write(&file, "two words").unwrap();
    let refused = error(1, nobody(), &args);
    assert!(refused.contains("no token") && !refused.contains("two words"));
}

#[test]
fn freeze_and_thaw_say_which_nodes_and_need_exactly_one_way_to_select() {
    let plane = healthy();
    let frozen = text(plane.address, &["freeze", "--node", "a", "--node", "b"]);
    assert_eq!(frozen, "Frozen: 2 nodes. Frozen now: 2 nodes.\n");
    let thawed = text(plane.address, &["thaw", "--all"]);
    assert_eq!(thawed, "Thawed: all nodes. Frozen now: 0 nodes.\n");
    let json = text(plane.address, &["freeze", "--node", "a", "-o", "json"]);
    assert!(json.contains("\"kind\": \"Freeze\""), "{json}");
    let why = ["freeze", "--zone", "z", "--reason", "a drill"];
    assert!(text(plane.address, &why).starts_with("Frozen: "));
    error(2, plane.address, &["freeze"]);
    error(2, plane.address, &["freeze", "--reason", "a drill"]);
    error(2, plane.address, &["thaw", "--all", "--node", "a"]);
}

#[test]
fn publications_are_listed_newest_first() {
    let plane = healthy();
    let history = text(plane.address, &["history"]);
    let lines: Vec<_> = history.lines().collect();
    assert!(
        lines[1].starts_with("19") && lines[1].contains("1m "),
        "{history}"
    );
    assert!(lines[2].starts_with("17"), "{history}");
}

#[test]
fn manual_pages_are_written_into_a_new_directory() {
    let folder = tempfile::tempdir().unwrap();
    let new = folder.path().join("share/man1");
    let done = run(&mut kpctl(nobody(), &["man", new.to_str().unwrap()]));
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(new.join("kpctl-describe-service.1").exists());
}
