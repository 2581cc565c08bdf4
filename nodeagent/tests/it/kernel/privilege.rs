//! An agent without privileges: what it says is what is missing.

use std::fs;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::agent::{Agent, has};
use kplane_rig::kernel::in_netns;

/// C7: the rights of an agent in a Pod are enough to count packets. Seen: they were not, and the log blamed the kernel.
#[test]
fn c7_packets_are_counted_with_the_rights_of_a_pod() {
    in_netns(|| {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("web.yaml"), super::leftovers::SERVICE).unwrap();
        let mut command = Command::new("setpriv");
        command
            .args(["--bounding-set=-all,+net_admin,+net_raw", "--inh-caps=-all"])
            .arg(env!("CARGO_BIN_EXE_kp-nodeagent"))
            .args([
                "--standalone",
                "--backend=iptables",
                "--node-name=n1",
                "--log-format=json",
                "--cache-dir=",
            ])
            .args([
                "--status-bind-address=",
                "--healthz-bind-address=",
                "--manifests",
            ])
            .arg(folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut agent = Agent::spawn(command);
        let lines = agent.until("update applied");
        assert!(!has(&lines, "are not counted"), "{lines:#?}");
        agent.stop();
        let saved = ["iptables-nft-save", "iptables-legacy-save"]
            .map(|program| {
                String::from_utf8(Command::new(program).output().unwrap().stdout).unwrap()
            })
            .concat();
        assert!(
            saved.contains("-m nfacct") && !saved.contains("KPLANE-PROBE"),
            "{saved}"
        );
    });
}

/// The unit files grant no more to an agent in mode nftables.
#[test]
fn mode_nftables_needs_one_right() {
    in_netns(|| {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("web.yaml"), super::leftovers::SERVICE).unwrap();
        let cache = folder.path().join("cache");
        let mut command = Command::new("setpriv");
        command
            .args([
                "--bounding-set=-all,+net_admin",
                "--inh-caps=-all",
                "--no-new-privs",
            ])
            .arg(env!("CARGO_BIN_EXE_kp-nodeagent"))
            .args([
                "--standalone",
                "--node-name=n1",
                "--log-format=json",
                "--pre-stop-port=7447",
            ])
            .args([
                "--count-connections",
                "--flows",
                "--network-policy",
                "--conntrack-max-per-core=0",
                "--oom-score-adj=1000",
            ])
            .args([
                "--status-bind-address=",
                "--healthz-bind-address=",
                "--cache-dir",
            ])
            .arg(&cache)
            .arg("--manifests")
            .arg(folder.path().join("web.yaml"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut agent = Agent::spawn(command);
        let lines = agent.until("update applied");
        let text = serde_json::to_string(&lines).unwrap();
        for refusal in ["not permitted", "Permission denied", "may not"] {
            assert!(!text.contains(refusal), "{refusal}: {lines:#?}");
        }
        agent.stop();
    });
}

/// Every part of the kernel looks as if it were not there.
#[test]
fn without_privileges_that_is_what_is_said() {
    in_netns(|| {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("web.yaml"), super::leftovers::SERVICE).unwrap();
        for backend in ["nftables", "iptables", "ipvs"] {
            let output = Command::new("setpriv")
                .args(["--bounding-set=-all", "--inh-caps=-all"])
                .arg(env!("CARGO_BIN_EXE_kp-nodeagent"))
                .args(["--standalone", "--backend", backend, "--manifests"])
                .arg(folder.path())
                .args(["--status-bind-address=", "--healthz-bind-address="])
                .output()
                .unwrap();
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{backend}: {stderr}");
            let last = stderr.lines().last().unwrap_or_default();
            assert!(
                last.contains("not permitted to change"),
                "{backend}: {stderr}"
            );
            assert!(last.contains("CAP_NET_ADMIN"), "{backend}: {stderr}");
            assert!(
                !last.contains("load the kernel module"),
                "{backend}: {stderr}"
            );
        }
    });
}
