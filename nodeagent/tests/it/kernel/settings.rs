//! Settings of the kernel: when the agent changes them, and who puts them back (F6, I4).

use std::fs;
use std::process::{Command, Output};

use tempfile::TempDir;

use super::agent::{Agent, binary};
use super::leftovers::{CompetingProxy, SERVICE};
use kplane_rig::kernel::{in_netns, nft};

/// A setting that each network namespace has for itself.
const ESTABLISHED: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established";

/// Reads the setting in the network namespace of this thread.
fn established() -> String {
    fs::read_to_string(ESTABLISHED).unwrap().trim().to_owned()
}

fn text(output: &Output) -> (Option<i32>, String) {
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    (output.status.code(), text.concat())
}

/// A pod's environment would name a source.
fn outside_of_a_pod(flags: &[&str]) -> Command {
    let mut command = binary(flags);
    command.env_remove("KUBERNETES_SERVICE_HOST");
    command.args(["--healthz-bind-address=", "--status-bind-address="]);
    command
}

#[test]
fn a_wrong_command_line_changes_nothing() {
    in_netns(|| {
        let before = established();
        let cases: [&[&str]; 3] = [
            &["--standalone"],
            &["--standalone", "--kubeconfig=/no/such/file"],
            &[
                "--control-plane=https://192.0.2.1:7443",
                "--certificate-authority=/no/such/file",
            ],
        ];
        for flags in cases {
            let output = outside_of_a_pod(flags).output().unwrap();
            assert_eq!(output.status.code(), Some(1), "{:?}", text(&output));
            assert_eq!(established(), before, "{flags:?}");
            assert_eq!(nft(&["list", "ruleset"], ""), "", "{flags:?}");
        }
    });
}

/// A restart keeps what is set, and does not take it for the machine's own.
#[test]
fn i4_f6_a_cleanup_puts_back_what_agents_changed() {
    in_netns(|| {
        let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
        let [manifests, cache] = folders.each_ref().map(TempDir::path);
        fs::write(manifests.join("web.yaml"), SERVICE).unwrap();
        let cache = format!("--cache-dir={}", cache.display());
        let run = |timeout: &str| {
            let timeout = format!("--conntrack-tcp-timeout-established={timeout}s");
            let flags = ["--healthz-bind-address=", &cache, &timeout];
            let mut agent = Agent::start_with(manifests, &flags);
            agent.until("update applied");
            agent.stop();
        };
        let clean = |flags: &[&str]| {
            let output = binary(&["--cleanup", &cache]).args(flags).output().unwrap();
            let (code, text) = text(&output);
            assert_eq!(code, Some(0), "{text}");
            text
        };
        let name = "net.netfilter.nf_conntrack_tcp_timeout_established";
        fs::write(ESTABLISHED, "4321").unwrap();
        for timeout in ["1000", "2000", "2000"] {
            run(timeout);
            assert_eq!(established(), timeout);
        }
        let would = clean(&["--dry-run"]);
        let line = format!("would set: {name} = 4321, as before\n");
        assert!(would.contains(&line), "{would}");
        assert_eq!(established(), "2000");
        let done = clean(&[]);
        assert!(done.contains(&line.replace("would set", "set")), "{done}");
        assert_eq!(established(), "4321");
        // A kube-proxy found the value that it wanted, and relies on it.
        run("1000");
        let programs = TempDir::new().unwrap();
        let competing_proxy = CompetingProxy::start(programs.path());
        let kept = clean(&[]);
        drop(competing_proxy);
        assert!(kept.contains("kept: kernel settings"), "{kept}");
        assert_eq!(established(), "1000");
        // What was set by somebody else stays.
        fs::write(ESTABLISHED, "4321").unwrap();
        run("1000");
        fs::write(ESTABLISHED, "777").unwrap();
        assert!(!clean(&[]).contains(name));
        assert_eq!(established(), "777");
        assert_eq!(clean(&[]), "there was nothing to remove\n");
    });
}
