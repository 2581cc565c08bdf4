//! The program without a control plane, after one that was killed.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kp_controlplane::app::{Config, Origin, build};
use kplane_rig::link::Netlink;
use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::agent::{Agent, has};
use super::leftovers::{CompetingProxy, SERVICE};
use kplane_rig::kernel::{in_netns, nft};

const DEADLINE: Duration = Duration::from_secs(30);

/// An agent with a cache file.
fn start(cache: &Path, source: &[&str]) -> Agent {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kp-nodeagent"));
    command
        .arg("--cache-dir")
        .arg(cache)
        .args(["--node-name", "n1", "--log-format", "json"])
        .args(["--healthz-bind-address=", "--metrics-bind-address="])
        .args(source)
        .env_remove("RUST_LOG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Agent::spawn(command)
}

/// Starts an agent where no control plane answers.
fn start_alone(cache: &Path) -> Agent {
    start(cache, &["--control-plane", "http://127.0.0.1:9"])
}

/// Serves a Service, and is killed when the cache file is there. Returns the kernel's rules.
fn served_and_killed(cache: &Path) -> String {
    served(cache, SERVICE)
}

/// Serves manifests as above, from a control plane that ends, too.
fn served(cache: &Path, manifests: &str) -> String {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("web.yaml"), manifests).unwrap();
    Netlink::open().unwrap().up("lo").unwrap();
    let runtime = Runtime::new().unwrap();
    let config = Config {
        agent_listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        ..Config::new(Origin::Manifests(folder.path().to_owned()))
    };
    let plane = runtime.block_on(build(config)).unwrap();
    let address = format!("http://{}", plane.agent_addr.unwrap());
    runtime.spawn(plane.wait());
    let mut agent = start(cache, &["--control-plane", &address]);
    agent.until("update applied");
    let begun = Instant::now();
    while !cache.join("desired-n1").exists() {
        assert!(begun.elapsed() < DEADLINE, "no cache file");
        std::thread::sleep(Duration::from_millis(5));
    }
    // SIGKILL.
    drop(agent);
    nft(&["list", "ruleset"], "")
}

fn operations(lines: &[Value]) -> u64 {
    lines.last().unwrap()["fields"]["operations"].as_u64().unwrap()
}

#[test]
fn a_kernel_that_holds_the_same_as_the_file_is_adopted_without_a_write() {
    in_netns(|| {
        let cache = TempDir::new().unwrap();
        let before = served_and_killed(cache.path());
        let mut agent = start_alone(cache.path());
        let lines = agent.until("update applied");
        assert_eq!(operations(&lines), 0, "{lines:#?}");
        assert_eq!(nft(&["list", "ruleset"], ""), before);
        agent.stop();
    });
}

#[test]
fn a_kube_proxy_that_runs_is_newer_than_the_file() {
    in_netns(|| {
        let cache = TempDir::new().unwrap();
        served_and_killed(cache.path());
        nft(&["flush", "ruleset"], "");
        let programs = TempDir::new().unwrap();
        let competing_proxy = CompetingProxy::start(programs.path());
        let mut agent = start_alone(cache.path());
        let lines = agent.until(
            "no control plane answers, but kube-proxy runs on this node: the agent does not serve from its cache file \
             while it does",
        );
        let evidence = lines.last().unwrap()["fields"]["evidence"].to_string();
        assert!(
            evidence.contains(&format!("process {}", competing_proxy.pid())),
            "{evidence}"
        );
        assert!(!nft(&["list", "ruleset"], "").contains("10.96.0.10"));
        agent.stop();
    });
}

/// The agent was killed before it saved its last change.
#[test]
fn a_file_that_is_older_than_the_kernel_is_served_all_the_same() {
    in_netns(|| {
        let (cache, copy) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let before = served_and_killed(cache.path());
        let older = copy.path().join("desired-n1");
        fs::copy(cache.path().join("desired-n1"), &older).unwrap();
        let second = SERVICE.replace("web", "two").replace(".0.1", ".0.2");
        let after = served(cache.path(), &format!("{SERVICE}---{second}"));
        assert!(after.contains("10.96.0.20") && after != before, "{after}");
        let mut agent = start_alone(copy.path());
        let lines = agent.until("update applied");
        assert!(operations(&lines) > 0, "{lines:#?}");
        assert_eq!(nft(&["list", "ruleset"], ""), before);
        agent.stop();
    });
}

/// Measured: an agent with another folder served 50 Services of the first one for 70 s, from the cache file.
#[test]
fn a_file_of_another_source_is_not_used() {
    in_netns(|| {
        let [cache, first, second] = [(); 3].map(|()| TempDir::new().unwrap());
        let many: Vec<String> = (10..60)
            .map(|number| {
                let other = SERVICE.replace("web", &format!("w{number}"));
                other.replace("10.96.0.10", &format!("10.96.1.{number}"))
            })
            .collect();
        fs::write(first.path().join("all.yaml"), many.join("---")).unwrap();
        fs::write(second.path().join("web.yaml"), SERVICE).unwrap();
        let alone = |folder: &TempDir| {
            let folder = folder.path().to_str().unwrap();
            let source = [
                "--standalone",
                "--status-bind-address=",
                "--manifests",
                folder,
            ];
            start(cache.path(), &source)
        };
        let mut agent = alone(&first);
        agent.until("update applied");
        agent.stop();
        assert!(nft(&["list", "ruleset"], "").contains("10.96.1.59"));

        // The same folder goes on with what is there.
        let mut agent = alone(&first);
        let lines = agent.until("update applied");
        assert!(
            has(&lines, "read the cache of what this node served"),
            "{lines:#?}"
        );
        assert_eq!(operations(&lines), 0);
        agent.stop();

        nft(&["flush", "ruleset"], "");
        let mut agent = alone(&second);
        let lines = agent.until("update applied");
        assert!(has(&lines, "cannot use the cache"), "{lines:#?}");
        let rules = nft(&["list", "ruleset"], "");
        assert!(
            rules.contains("10.96.0.10") && !rules.contains("10.96.1."),
            "{rules}"
        );
        agent.stop();

        // A control plane is another source as well.
        nft(&["flush", "ruleset"], "");
        let mut agent = start_alone(cache.path());
        agent.until(
            "cannot use the cache of what this node served; the agent will replace the file",
        );
        agent.stop();
    });
}
