//! The program on a node that kube-proxy served before (I4).

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kplane_rig::link::Netlink;
use kplane_rig::process::Process;
use serde_json::Value;
use tempfile::TempDir;

use super::agent::{Agent, binary, has};
use kplane_rig::kernel::{in_netns, nft};

const DEADLINE: Duration = Duration::from_secs(30);

/// With endpoints: Services without any EndpointSlice are a snapshot that lacks something.
pub(crate) const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-x, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: '', port: 8080}]
endpoints: [{addresses: [10.244.0.9]}]
";
const NODE: &str = "{apiVersion: v1, kind: Node, metadata: {name: n1}}\n";
pub(crate) const TABLES: &str = "table ip kube-proxy {}\ntable ip6 kube-proxy {}\n";

/// Copies a program, not by this process: a child of another test would hold the copy open for writing, and nothing may
/// run it then.
fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status().unwrap();
    assert!(copied.success(), "{}", from.display());
}

/// A process called kube-proxy, which does nothing.
pub(crate) struct CompetingProxy(Process);

impl CompetingProxy {
    pub(crate) fn start(folder: &Path) -> Self {
        let program = folder.join("kube-proxy");
        copy_program(Path::new("/bin/sleep"), &program);
        let mut command = Command::new(program);
        command.arg("600");
        let process = Process::start(command).unwrap();
        // Its name is its own once the program has taken the place of this one.
        let comm = format!("/proc/{}/comm", process.id());
        let start = Instant::now();
        while fs::read_to_string(&comm).unwrap() != "kube-proxy\n" {
            assert!(start.elapsed() < DEADLINE, "no kube-proxy in {comm}");
            std::thread::yield_now();
        }
        Self(process)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

/// Not before there is a Service to serve, and not before it is served.
#[test]
fn i4_an_agent_removes_what_kube_proxy_left_when_it_serves() {
    in_netns(|| {
        nft(&["-f", "-"], TABLES);
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("node.yaml"), NODE).unwrap();
        let mut agent = Agent::start(folder.path());
        let lines = agent.until("update applied");
        assert!(!has(&lines, "what kube-proxy left"), "{lines:#?}");
        assert!(nft(&["list", "tables"], "").contains("table ip kube-proxy"));

        fs::write(folder.path().join("web.yaml"), SERVICE).unwrap();
        let lines = agent.until("removed what kube-proxy left");
        assert!(has(&lines, "update applied"), "{lines:#?}");
        assert!(!has(&lines, "kube-proxy also runs"), "{lines:#?}");
        let tables = nft(&["list", "tables"], "");
        assert_eq!(tables, "table ip kplane\ntable ip6 kplane\n");

        agent.stop();
    });
}

/// Its rules are removed when it has ended, and until then the status says so.
#[test]
fn i4_a_kube_proxy_that_still_runs_keeps_its_rules() {
    in_netns(|| {
        nft(&["-f", "-"], TABLES);
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("web.yaml"), SERVICE).unwrap();
        let programs = TempDir::new().unwrap();
        let competing_proxy = CompetingProxy::start(programs.path());
        let mut agent = Agent::start(folder.path());
        let lines = agent.until(
            "kube-proxy also runs on this node and may serve what the agent refuses; stop \
             kube-proxy, and the agent removes its rules",
        );
        let warning = lines.last().unwrap();
        assert_eq!(warning["level"], "WARN");
        let evidence = warning["fields"]["evidence"].to_string();
        let process = format!("process {} is a kube-proxy", competing_proxy.pid());
        assert!(evidence.contains(&process), "{evidence}");
        assert!(!has(&lines, "removed what kube-proxy left"), "{lines:#?}");
        assert!(nft(&["list", "tables"], "").contains("table ip kube-proxy"));

        drop(competing_proxy);
        let lines = agent.until("removed what kube-proxy left");
        assert!(has(&lines, "kube-proxy no longer runs on this node"));
        let tables = nft(&["list", "tables"], "");
        assert_eq!(tables, "table ip kplane\ntable ip6 kplane\n");
        agent.stop();
    });
}

/// The agent's program where no programs of iptables are, as in an image without them.
fn without_programs(flags: &[&str]) -> Command {
    let hidden = "for folder in /usr/local/sbin /usr/sbin /sbin; do \
                  mount -t tmpfs none $folder || exit 77; done; export PATH=/nowhere; exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", hidden])
        .arg(env!("CARGO_BIN_EXE_kp-nodeagent"))
        .args(flags)
        .env_remove("RUST_LOG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Rules of kube-proxy, and of others in the same tables, in nf_tables.
const IN_NF_TABLES: &str = "\
    *filter\n:KUBE-FORWARD - [0:0]\n:KUBE-FIREWALL - [0:0]\n-A FORWARD -j KUBE-FORWARD\n-A INPUT -j KUBE-FIREWALL\n\
    -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT\nCOMMIT\n\
    *nat\n:KUBE-SERVICES - [0:0]\n:KUBE-SVC-ERIFXISQEP7F7OF4 - [0:0]\n:KUBE-SVC-MINE - [0:0]\n:KUBE-SVC-D-A - [0:0]\n\
    :KUBE-SEP-IT2ZTR26TO4XFPTO - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n:KUBE-POSTROUTING - [0:0]\n:CNI-DN-1 - [0:0]\n\
    -A PREROUTING -m comment --comment \"a \\\"strange\\\" one\" -j KUBE-SERVICES\n\
    -A PREROUTING -j KUBE-SVC-MINE\n-A OUTPUT -j KUBE-SERVICES\n-A POSTROUTING -j KUBE-POSTROUTING\n\
    -A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-D-A\n\
    -A KUBE-SVC-D-A -g KUBE-SVC-ERIFXISQEP7F7OF4\n\
    -A KUBE-SVC-ERIFXISQEP7F7OF4 -m statistic --mode random --probability 0.5 -j KUBE-SEP-IT2ZTR26TO4XFPTO\n\
    -A KUBE-SEP-IT2ZTR26TO4XFPTO -s 10.244.0.9/32 -j KUBE-MARK-MASQ\n\
    -A KUBE-SEP-IT2ZTR26TO4XFPTO -p tcp -m tcp -j DNAT --to-destination 10.244.0.9:8080\n\
    -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n\
    -A KUBE-POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully\n\
    -A CNI-DN-1 -s 10.244.0.3/32 -j RETURN\nCOMMIT\n";
/// Chains of kube-proxy and kplane in [`IN_NF_TABLES`].
const GONE: [&str; 7] = [
    "KUBE-FORWARD",
    "KUBE-SERVICES",
    "KUBE-SVC-ERIF",
    "KUBE-SVC-D-A",
    "KUBE-SEP-",
    "KUBE-MARK-MASQ",
    "KUBE-POSTROUTING",
];
/// Chains of others there.
const STAYS: [&str; 5] = [
    "jump KUBE-FIREWALL",
    "chain KUBE-FIREWALL",
    "jump KUBE-SVC-MINE",
    "chain KUBE-SVC-MINE",
    "chain CNI-DN-1",
];

/// Returns all rules. nft warns of tables of iptables.
fn ruleset() -> String {
    let output = Command::new("nft").args(["list", "ruleset"]).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

/// Executes a text for `iptables-restore`.
fn restore(program: &str, text: &str) {
    let mut child = Command::new(format!("{program}-restore"))
        .arg("--noflush")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
}

/// An image without iptables: chains in nf_tables go all the same, and what may be in legacy iptables is named.
#[test]
fn i4_without_the_programs_chains_in_nf_tables_go_and_legacy_tables_are_named() {
    in_netns(|| {
        restore("iptables-nft", IN_NF_TABLES);
        restore(
            "ip6tables-nft",
            "*nat\n:KUBE-SERVICES - [0:0]\n-A OUTPUT -j KUBE-SERVICES\nCOMMIT\n",
        );
        let cleanup =
            || without_programs(&["--cleanup-kube-proxy", "--cache-dir="]).output().unwrap();
        let output = cleanup();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert_eq!(
            (output.status.code(), output.stderr),
            (Some(0), Vec::new()),
            "{stdout}"
        );
        let removed = "removed: kube-proxy's iptables-nft: 6 chains and 3 jumps in table nat";
        assert!(stdout.contains(removed), "{stdout}");
        let rules = ruleset();
        for chain in GONE {
            assert!(!rules.contains(chain), "{chain}: {rules}");
        }
        for chain in STAYS {
            assert!(rules.contains(chain), "{chain}: {rules}");
        }
        // A rule of another program keeps its chain, and all behind it.
        restore("iptables-nft", IN_NF_TABLES);
        restore(
            "iptables-nft",
            "*nat\n-A CNI-DN-1 -j KUBE-SVC-ERIFXISQEP7F7OF4\nCOMMIT\n",
        );
        let output = cleanup();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(
            stderr.contains("KUBE-SVC-ERIFXISQEP7F7OF4 kept"),
            "{stderr}"
        );
        let rules = ruleset();
        assert!(!rules.contains("KUBE-SERVICES"), "{rules}");
        assert!(rules.contains("chain KUBE-SEP-"), "{rules}");

        let legacy = Command::new("iptables-legacy")
            .args(["-t", "nat", "-N", "KUBE-SERVICES"])
            .status();
        assert!(legacy.unwrap().success());
        let stderr = String::from_utf8(cleanup().stderr).unwrap();
        assert!(
            stderr.contains("there is no iptables-legacy-save"),
            "{stderr}"
        );
        assert!(!stderr.contains("ip6tables"), "{stderr}");
    });
}

/// What an agent cannot remove is a failure of its node, until it is gone.
#[test]
fn i4_rules_that_an_agent_cannot_remove_are_told_until_they_are_gone() {
    in_netns(|| {
        restore("iptables-nft", IN_NF_TABLES);
        let legacy = |verb: &str| {
            let ran = Command::new("iptables-legacy")
                .args(["-t", "nat", verb, "KUBE-SERVICES"])
                .status();
            assert!(ran.unwrap().success());
        };
        legacy("-N");
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("web.yaml"), SERVICE).unwrap();
        let manifests = folder.path().to_str().unwrap();
        let flags = [
            "--standalone",
            "--manifests",
            manifests,
            "--node-name=n1",
            "--log-format=json",
        ];
        let ports = [
            "--cache-dir=",
            "--status-bind-address=",
            "--healthz-bind-address=127.0.0.1:7256",
        ];
        Netlink::open().unwrap().up("lo").unwrap();
        let mut agent = Agent::spawn(without_programs(&[&flags[..], &ports].concat()));
        let lines = agent.until("cannot remove rules that lead packets as well as kplane's");
        assert!(has(&lines, "removed what kube-proxy left"), "{lines:#?}");
        let reported = lines.last().unwrap()["fields"]["problem"].to_string();
        assert!(reported.contains("agent.variant=iptables"), "{reported}");
        assert!(!ruleset().contains("KUBE-SERVICES"));
        agent.stop();
    });
}

/// A node is looked at before an agent runs there.
#[test]
fn i4_a_check_before_the_start_names_old_rules() {
    let found = |mut command: Command| -> (String, String) {
        let findings: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        let mut findings = findings.as_array().unwrap().iter();
        let rules = findings.find(|finding| finding["check"] == "old-rules").unwrap();
        (
            rules["outcome"].as_str().unwrap().to_owned(),
            rules["details"].to_string(),
        )
    };
    in_netns(|| {
        let check = || binary(&["--preflight"]);
        assert_eq!(found(check()), ("Ok".to_owned(), "[]".to_owned()));
        restore("iptables-nft", IN_NF_TABLES);
        let (outcome, details) = found(check());
        assert_eq!(outcome, "Warning", "{details}");
        assert!(
            details.contains("6 chains and 3 jumps in table nat"),
            "{details}"
        );
        let folder = TempDir::new().unwrap();
        let competing_proxy = CompetingProxy::start(folder.path());
        assert_eq!(found(check()).0, "Ok");
        drop(competing_proxy);
        let legacy = Command::new("iptables-legacy")
            .args(["-t", "nat", "-N", "KUBE-SERVICES"])
            .status();
        assert!(legacy.unwrap().success());
        let (outcome, details) = found(without_programs(&["--preflight", "--cache-dir="]));
        assert_eq!(outcome, "Bad", "{details}");
        assert!(
            details.contains("there is no iptables-legacy-save"),
            "{details}"
        );
    });
}
