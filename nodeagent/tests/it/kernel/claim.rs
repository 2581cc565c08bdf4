//! Two agents on one node.

use std::fs;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};

use tempfile::TempDir;

use super::agent::{Agent, binary, has};
use kplane_rig::kernel::{in_netns, nft};

const WAITS: &str =
    "another kp-nodeagent programs this network namespace; waiting up to 30s for it to end";

/// Each would put right what the other one writes, for ever.
#[test]
fn a_second_agent_waits_for_the_end_of_the_first() {
    in_netns(|| {
        let folder = TempDir::new().unwrap();
        let service = |name: &str| {
            let text = super::leftovers::SERVICE.replace("web", name);
            fs::write(folder.path().join(format!("{name}.yaml")), text).unwrap();
        };
        service("web");
        let mut first = Agent::start(folder.path());
        first.until("update applied");
        let mut second = Agent::start(folder.path());
        let lines = second.until(WAITS);
        let pid = format!("process {} of user", first.child.id());
        let said = lines.last().unwrap()["fields"]["holder"].to_string();
        assert!(said.contains(&pid), "{said}");
        assert!(!has(&lines, "agent starts"), "{lines:#?}");
        // The first one hears of it, and goes on.
        first.until(
            "refused another process that wants to program this network namespace, such as a \
             second agent or a cleanup; this agent already does",
        );
        service("more");
        first.until("update applied");
        first.stop();
        second.until("update applied");
        assert!(nft(&["list", "tables"], "").contains("table ip kplane"));
        second.stop();
    });
}

/// A container with the node's network may bind the name as root. It does not reach the agents' folder.
#[test]
fn a_process_that_is_no_agent_keeps_none_from_starting() {
    in_netns(|| {
        let name = SocketAddr::from_abstract_name("kplane-agent").unwrap();
        let _enemy = UnixListener::bind_addr(&name).unwrap();
        let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
        let [manifests, cache] = folders.each_ref().map(TempDir::path);
        let cache = format!("--cache-dir={}", cache.display());
        let start = || Agent::start_with(manifests, &["--healthz-bind-address=", &cache]);
        let clean = |flags: &[&str]| binary(&["--cleanup", &cache]).args(flags).output().unwrap();
        let mut first = start();
        let lines = first.until("update applied");
        assert!(has(&lines, "is not an agent"), "{lines:#?}");
        // An agent without the name still has its folder.
        for flags in [&[][..], &["--dry-run"]] {
            let refused = clean(flags);
            assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        }
        let mut second = start();
        second.until(WAITS);
        first.stop();
        second.until("update applied");
        second.stop();
        assert_eq!(clean(&[]).status.code(), Some(0));
    });
}

/// Whoever is stopped while it waits ends.
#[test]
fn a_second_agent_that_waits_can_be_stopped() {
    in_netns(|| {
        let folder = TempDir::new().unwrap();
        let mut first = Agent::start(folder.path());
        first.until("update applied");
        let mut second = Agent::start(folder.path());
        second.until(WAITS);
        second.stop();
        first.stop();
    });
}
