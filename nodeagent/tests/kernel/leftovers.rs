//! The program on a node that kube-proxy served before (I4).

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::netns::{in_netns, nft};

const DEADLINE: Duration = Duration::from_secs(30);

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80}]}
";
const NODE: &str = "{apiVersion: v1, kind: Node, metadata: {name: n1}}\n";
const TABLES: &str = "table ip kube-proxy {}\ntable ip6 kube-proxy {}\n";

fn binary(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kp-nodeagent"));
    command
        .args(args)
        .env_remove("RUST_LOG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn cleanup() -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = binary(&["--cleanup", "--cache-dir="]).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// An agent of its own, with its log.
struct Agent {
    child: Child,
    log: std::io::Lines<BufReader<ChildStderr>>,
}

impl Agent {
    fn start(manifests: &Path) -> Self {
        let mut child = binary(&["--standalone", "--manifests"])
            .arg(manifests)
            .args(["--node-name", "n1", "--log-format", "json"])
            .args(["--healthz-bind-address", "", "--status-bind-address", ""])
            .arg("--cache-dir=")
            .spawn()
            .unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, log }
    }

    /// Reads the log up to the line with this message; returns everything up to it.
    fn until(&mut self, message: &str) -> Vec<Value> {
        let mut lines = Vec::new();
        for line in &mut self.log {
            let line: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let found = line["fields"]["message"] == message;
            lines.push(line);
            if found {
                return lines;
            }
        }
        panic!("the agent ended without saying {message:?}: {lines:#?}");
    }

    fn stop(mut self) {
        kill(
            Pid::from_raw(self.child.id().try_into().unwrap()),
            Signal::SIGTERM,
        )
        .unwrap();
        self.log.for_each(drop);
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

fn has(lines: &[Value], message: &str) -> bool {
    let text = |line: &Value| {
        line["fields"]["message"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    lines.iter().any(|line| text(line).contains(message))
}

/// A process called kube-proxy, which does nothing.
struct Rival(Child);

impl Rival {
    fn start(folder: &Path) -> Self {
        let program = folder.join("kube-proxy");
        fs::copy("/bin/sleep", &program).unwrap();
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
        assert!(!has(&lines, "kube-proxy is running"), "{lines:#?}");
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

#[test]
fn i4_a_kube_proxy_that_still_runs_is_named() {
    in_netns(|| {
        nft(&["-f", "-"], TABLES);
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("web.yaml"), SERVICE).unwrap();
        let programs = TempDir::new().unwrap();
        let rival = Rival::start(programs.path());
        let mut agent = Agent::start(folder.path());
        let lines = agent.until("removed what kube-proxy left");
        let named = |line: &&Value| has(std::slice::from_ref(*line), "kube-proxy is running");
        let warning = lines.iter().find(named).unwrap();
        assert_eq!(warning["level"], "WARN");
        assert_eq!(warning["fields"]["pid"], rival.0.id());
        agent.stop();
    });
}

#[test]
fn i4_cleanup_says_what_is_gone_and_what_is_left() {
    in_netns(|| {
        nft(&["-f", "-"], TABLES);
        let ours = "gone: kplane's rules (nftables)\n";
        let theirs = "gone: kube-proxy's nftables table ip kube-proxy\n\
                      gone: kube-proxy's nftables table ip6 kube-proxy\n";
        assert_eq!(
            cleanup(),
            (Some(0), format!("{ours}{theirs}"), String::new())
        );
        assert_eq!(cleanup(), (Some(0), ours.to_owned(), String::new()));
        assert_eq!(nft(&["list", "ruleset"], ""), "");

        // Chains that others need stay, and that is no success.
        let needed = "table ip nat {\n\
            chain KUBE-MARK-MASQ { counter; }\n\
            chain CNI-DN-1 { counter jump KUBE-MARK-MASQ; }\n}\n";
        nft(&["-f", "-"], needed);
        nft(&["-f", "-"], TABLES);
        let (code, stdout, stderr) = cleanup();
        assert_eq!(
            (code, stdout),
            (Some(1), format!("{ours}{theirs}")),
            "{stderr}"
        );
        assert!(stderr.contains("KUBE-MARK-MASQ kept"), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    });
}

/// Runs the clean-up where no programs are but those in one folder; returns its standard error.
fn cleanup_without_programs(but: &Path) -> String {
    let hidden = "for folder in /usr/local/sbin /usr/sbin /sbin; do \
                  mount -t tmpfs none $folder || exit 77; done; PATH=\"$1\" exec \"$0\" --cleanup";
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
            fs::copy(program, folder.path().join(name)).unwrap();
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
