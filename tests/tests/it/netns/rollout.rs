//! Settings that a control plane chooses: the agent takes them, serves all the while, and goes on with what it had if it
//! cannot.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use kp_controlplane::admission::Admission;
use kp_controlplane::hub::Hub;
use kp_controlplane::server::StatusServer;
use kp_nodeagent::chosen;
use kp_nodeagent::config::Config;
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_server::StatusService as _;
use kplane_tests::client::Probe;
use kplane_tests::load::{Load, Pace};
use kplane_tests::wait::eventually;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tonic::Request;

use crate::netns::alone;
use crate::netns::emptied;
use crate::netns::own_way::{CONTROL, CONTROL_PORT, plane_at};
use kplane_tests::support::{Client, World, node_name};

const DEADLINE: Duration = Duration::from_secs(60);

/// The operator's side: the control plane's status service.
struct Operator<'a> {
    runtime: &'a Runtime,
    server: StatusServer,
    hub: Arc<Hub>,
}

impl Operator<'_> {
    fn show(&self) -> Result<pb::Rollout> {
        let request = Request::new(pb::GetRolloutRequest {});
        let answer = self.runtime.block_on(self.server.get_rollout(request))?;
        Ok(answer.into_inner())
    }

    /// Rolls settings out; returns the rollout at its end.
    fn roll_out(&self, settings: pb::Settings) -> Result<pb::Rollout> {
        let plan = pb::RolloutPlan {
            settings: Some(settings),
            percentages: vec![5],
            healthy_ms: 200,
            timeout_ms: 60_000,
        };
        let request = Request::new(pb::ChangeRolloutRequest {
            change: Some(pb::change_rollout_request::Change::Begin(plan)),
            reason: "a test".to_owned(),
        });
        self.runtime.block_on(self.server.change_rollout(request))?;
        eventually(DEADLINE, "the rollout ends", || {
            let rollout = self.show().map_err(|error| error.to_string())?;
            match rollout.stage() {
                pb::RolloutStage::Running => Err(format!("{rollout:?}")),
                _ => Ok(()),
            }
        })?;
        self.show()
    }

    /// Waits until the node's agent has a backend, everything applied and no doubt about its settings.
    fn has(&self, backend: &str) -> Result<()> {
        eventually(DEADLINE, "the backend", || {
            let record = self.hub.fleet.record(&node_name(1));
            let record = record.filter(|record| record.connected && record.backend == backend);
            let report = record.as_ref().and_then(|record| record.report.clone());
            let head = self.hub.store.head().borrow().revision;
            match report.is_some_and(|report| report.applied_revision == head) {
                true => Ok(()),
                false => Err(format!("{record:?}")),
            }
        })
    }
}

fn backend(name: &str) -> pb::Settings {
    pb::Settings {
        backend: name.to_owned(),
        ..pb::Settings::default()
    }
}

pub(crate) fn settings_go_to_a_node_and_back_and_no_connection_fails() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    fs::write(folder.path().join("s0.yaml"), emptied::yaml(0))?;
    let world = World::without_agents()?;
    let control = world.topology.host("control")?.ns().clone();
    let client = world.net.ns(Client::Outside)?;
    let config = alone::config_with(
        &format!("http://{}:{CONTROL_PORT}", CONTROL[0]),
        cache.path(),
    )?;
    world.node(1)?.run(|| {
        let (runtime, hub) =
            plane_at(&control, folder.path(), &Admission::default(), CONTROL_PORT)?;
        let operator = Operator {
            runtime: &runtime,
            server: StatusServer::new(Arc::clone(&hub)),
            hub,
        };
        let stop = CancellationToken::new();
        let agent = start(&config, &stop)?;
        let own = config.backend.describe().name;
        operator.has(own)?;
        let to: SocketAddr = "10.96.7.0:80".parse()?;
        let load = Load::start(client, Probe::tcp(to), Pace::default())?;
        let passed = pass(&operator, own, cache.path());
        let load = load.stop();
        stop.cancel();
        agent.shutdown_timeout(DEADLINE);
        passed?;
        ensure!(load.lost() == 0 && load.ok() > 0, "{load}");
        Ok(())
    })
}

/// Starts an agent as its program does, in the calling thread's namespace.
fn start(config: &Config, stop: &CancellationToken) -> Result<Runtime> {
    let agent = Runtime::new()?;
    let (config, stop) = (config.clone(), stop.clone());
    agent.spawn(async move { chosen::run(&config, &stop, |_| {}).await });
    Ok(agent)
}

/// Other settings come, some that the node cannot use, and then its own again.
fn pass(operator: &Operator<'_>, own: &str, cache: &Path) -> Result<()> {
    let other = match own {
        "nftables" => "iptables",
        _ => "nftables",
    };
    let done = operator.roll_out(backend(other))?;
    ensure!(done.stage() == pb::RolloutStage::Done, "{done:?}");
    operator.has(other)?;
    ensure!(kept(cache)? == 1, "no file keeps the settings");

    // This machine has no IPVS.
    let back = operator.roll_out(backend("ipvs"))?;
    ensure!(back.stage() == pb::RolloutStage::Back, "{back:?}");
    ensure!(back.reason_back.contains("node-1"), "{back:?}");
    operator.has(other)?;

    let done = operator.roll_out(pb::Settings::default())?;
    ensure!(done.stage() == pb::RolloutStage::Done, "{done:?}");
    operator.has(own)?;
    ensure!(kept(cache)? == 0, "a file is left");
    Ok(())
}

/// Returns the number of files that keep settings.
fn kept(cache: &Path) -> Result<usize> {
    let files = fs::read_dir(cache)?.collect::<Result<Vec<_>, _>>()?;
    let names = files.iter().map(fs::DirEntry::file_name);
    let kept = names.filter(|name| name.as_encoded_bytes().starts_with(b"settings-"));
    Ok(kept.count())
}
