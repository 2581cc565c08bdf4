//! The program on a node that kube-proxy served before (I4).

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::agent::{Agent, has};
use kplane_rig::kernel::{in_netns, nft};

const DEADLINE: Duration = Duration::from_secs(30);

/// With endpoints: Services without any EndpointSlice are a picture that lacks something.
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
pub(crate) struct Rival(Child);

impl Rival {
    pub(crate) fn start(folder: &Path) -> Self {
        let program = folder.join("kube-proxy");
        copy_program(Path::new("/bin/sleep"), &program);
        let child = Command::new(program).arg("600").spawn().unwrap();
        // Its name is its own once the program has taken the place of this one.
        let comm = format!("/proc/{}/comm", child.id());
        let start = Instant::now();
        while fs::read_to_string(&comm).unwrap() != "kube-proxy\n" {
            assert!(start.elapsed() < DEADLINE, "no kube-proxy in {comm}");
            std::thread::yield_now();
        }
        Self(child)
    }
}

impl Rival {
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not before there is a Service to serve, and not before it is served; once.
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

        // What comes back later is somebody's who still works.
        nft(&["-f", "-"], TABLES);
        fs::remove_file(folder.path().join("web.yaml")).unwrap();
        agent.until("update applied");
        assert!(nft(&["list", "tables"], "").contains("table ip kube-proxy"));
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
        let rival = Rival::start(programs.path());
        let mut agent = Agent::start(folder.path());
        let lines = agent.until(
            "kube-proxy also runs on this node and may serve what the agent refuses; stop \
             kube-proxy, and the agent removes its rules",
        );
        let warning = lines.last().unwrap();
        assert_eq!(warning["level"], "WARN");
        let evidence = warning["fields"]["evidence"].to_string();
        let process = format!("process {} is a kube-proxy", rival.pid());
        assert!(evidence.contains(&process), "{evidence}");
        assert!(!has(&lines, "removed what kube-proxy left"), "{lines:#?}");
        assert!(nft(&["list", "tables"], "").contains("table ip kube-proxy"));

        drop(rival);
        let lines = agent.until("removed what kube-proxy left");
        assert!(has(&lines, "kube-proxy no longer runs on this node"));
        let tables = nft(&["list", "tables"], "");
        assert_eq!(tables, "table ip kplane\ntable ip6 kplane\n");
        agent.stop();
    });
}

/// Runs the clean-up where no programs are but those in one folder; returns its standard error.
fn cleanup_without_programs(but: &Path) -> String {
    let hidden = "for folder in /usr/local/sbin /usr/sbin /sbin; do \
                  mount -t tmpfs none $folder || exit 77; done; PATH=\"$1\" exec \"$0\" --cleanup-kube-proxy";
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", hidden])
        .arg(env!("CARGO_BIN_EXE_kp-nodeagent"))
        .arg(but)
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    stderr
}

/// An image without iptables: chains are seen all the same, and named.
#[test]
fn i4_without_the_programs_chains_are_named() {
    in_netns(|| {
        nft(
            &["-f", "-"],
            "table ip nat { chain KUBE-SERVICES { counter; }; }\n",
        );
        let stderr = cleanup_without_programs(TempDir::new().unwrap().path());
        assert!(stderr.contains("there is no iptables-nft-save"), "{stderr}");
        assert!(!stderr.contains("ip6tables"), "{stderr}");
    });
}

/// With the programs of one kind only: its chains go, and the other kind is named.
#[test]
fn i4_with_the_programs_of_one_kind_the_other_is_named() {
    in_netns(|| {
        let table = "table ip nat { chain KUBE-SERVICES { counter; }; }\n";
        nft(&["-f", "-"], table);
        let legacy = Command::new("iptables-legacy")
            .args(["-t", "nat", "-N", "KUBE-SERVICES"])
            .status();
        assert!(legacy.unwrap().success());
        let folder = TempDir::new().unwrap();
        for verb in ["save", "restore"] {
            let name = format!("iptables-nft-{verb}");
            // Programs of iptables are links to one that goes by its name.
            let program = fs::canonicalize(Path::new("/usr/sbin").join(&name)).unwrap();
            copy_program(&program, &folder.path().join(name));
        }
        let stderr = cleanup_without_programs(folder.path());
        assert!(
            stderr.contains("there is no iptables-legacy-save"),
            "{stderr}"
        );
        assert!(!stderr.contains("iptables-nft-"), "{stderr}");
        let ruleset = nft(&["list", "ruleset"], "");
        assert!(!ruleset.contains("KUBE-"), "{ruleset}");
    });
}
