//! Relays as programs, started by their flags.

use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};

use kplane_proto::v1::status_service_client::StatusServiceClient;

use super::*;

/// A control plane in a process of its own.
struct Program {
    child: Child,
    address: Ipv4Addr,
}

impl Program {
    fn start(at: SocketAddr, source: &[&str]) -> Self {
        let IpAddr::V4(address) = at.ip() else {
            panic!("{at}");
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_kp-controlplane"));
        command.args(source);
        for (flag, port) in [("agent", 7443), ("status", 7444), ("http", 7445)] {
            command.arg(format!("--{flag}-listen={address}:{port}"));
        }
        let child = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn();
        Self {
            child: child.unwrap(),
            address,
        }
    }

    /// Waits until the program says this of itself.
    async fn until(
        &self,
        wanted: impl Fn(&pb::ControlPlaneStatus) -> bool,
    ) -> pb::ControlPlaneStatus {
        let until = Instant::now() + DEADLINE;
        let address = format!("http://{}:7444", self.address);
        loop {
            if let Ok(mut client) = StatusServiceClient::connect(address.clone()).await
                && let Ok(fleet) = client.get_fleet(pb::GetFleetRequest::default()).await
                && let Some(status) = fleet.into_inner().control_plane
                && wanted(&status)
            {
                return status;
            }
            assert!(Instant::now() < until);
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have been killed before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_relay_outlives_a_root_that_is_killed() {
    let [top, own] = addresses();
    let folder = folder(12);
    let manifests = ["--manifests", folder.path().to_str().unwrap()];
    let root = Program::start(top, &manifests);
    let place = top.ip().to_string();
    let relay = Program::start(own, &["--source-controlplane", &place]);
    let status = relay.until(|status| status.synced).await;
    assert_eq!((status.services, status.endpoints), (12, 24));
    assert_eq!(status.source, format!("relay of {top} (level 1)"));
    drop(root);
    let cut_off = relay.until(|status| status.errors > 0).await;
    assert!(cut_off.synced && cut_off.services == 12);
    assert_eq!(cut_off.revision, status.revision);
    let _root = Program::start(top, &manifests);
    let back = relay.until(|status| status.errors == 0).await;
    assert_eq!(
        (back.revision, back.epoch),
        (status.revision, status.epoch),
        "nothing changed"
    );
    write(folder.path(), 0..13);
    relay.until(|status| status.services == 13).await;
}

#[test]
fn the_source_is_one_of_several() {
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kp-controlplane"));
        let output = command.args(args).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    for (args, part) in [
        (&[][..], "--source-controlplane"),
        (
            &["--manifests", "x", "--source-controlplane", "y"],
            "cannot be used with",
        ),
        (
            &["--check", "x", "--source-controlplane", "y"],
            "cannot be used with",
        ),
        (&["--manifests", "x", "--in-cluster"], "cannot be used with"),
        (
            &["--kubeconfig", "x", "--in-cluster"],
            "cannot be used with",
        ),
        (
            &["--manifests", "x", "--source-server-name", "y"],
            "cannot be used with",
        ),
        (
            &["--kubeconfig", "x", "--source-token-file", "y"],
            "--source-controlplane",
        ),
        (
            &["--source-controlplane", "a/b"],
            "HOST, HOST:PORT or [IPv6]:PORT",
        ),
    ] {
        let error = run(args);
        assert!(error.contains(part), "{args:?}: {error}");
    }
}
