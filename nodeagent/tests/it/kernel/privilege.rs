//! An agent without privileges: what it says is what is missing.

use std::fs;
use std::process::Command;

use tempfile::TempDir;

use kplane_rig::kernel::in_netns;

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
