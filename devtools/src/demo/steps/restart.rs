//! Kills an agent and starts it again under load: the kernel keeps serving, and the new agent takes
//! over the rules it finds.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use kplane_proto::v1::{Fleet, NodeState, SyncStats};

use super::super::interrupt;
use super::super::screen::{count, span};
use super::super::stage::{Show, Stage};
use super::super::status::last_sync;
use super::fleet::kpctl;
use super::load::Loads;
use super::roll::port_of;

/// Time without an agent, and time under load after its return.
const PAUSE: Duration = Duration::from_millis(700);

/// Kills the agent of the first node, and starts it again.
pub(super) fn run(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let Some(star) = stage.star.clone() else {
        show.screen
            .aside("without a Service to call there is nothing to see: left out");
        return Ok(());
    };
    let began = Instant::now();
    let node = stage.objects.nodes[0].name.to_string();
    let loads = Loads::start(stage, port_of(stage, &star)?, &[&node])?;
    interrupt::sleep(PAUSE)?;

    stage.cast.kill_agent(&node)?;
    let gone = |fleet: &Fleet| state(fleet, &node, NodeState::Disconnected);
    stage
        .status
        .wait(&mut stage.cast, "the control plane notices", gone)?;
    let mut wrong = kpctl(&show.screen, stage, &["get", "nodes"])?;
    show.screen.gap();
    let working = show
        .screen
        .working(format!("{node} works without its agent"));
    interrupt::sleep(PAUSE)?;

    let (started, at) = (Instant::now(), SystemTime::now());
    stage.start_agent(&node)?;
    let back = |fleet: &Fleet| {
        state(fleet, &node, NodeState::InSync)?;
        synced_since(fleet, &node, at)
    };
    let sync = stage
        .status
        .wait(&mut stage.cast, "the agent is back", back)?;
    let took = started.elapsed();
    interrupt::sleep(PAUSE)?;
    drop(working);
    let seen = loads.stop(&show.screen);
    wrong.extend(seen.wrong);

    let what = format!("agent on {node} killed and restarted");
    let failed = format!("{} of {}", seen.failed, count(seen.connects));
    show.check((&what, "0 connects failed"), failed, wrong, began);
    show.screen.aside(format!(
        "the new agent was in sync {} after its start; it changed {} things in the kernel",
        span(took),
        count(sync.operations),
    ));
    let changes = format!("{} changes", count(sync.operations));
    let wrong = match sync.operations {
        0 => Vec::new(),
        _ => vec![format!(
            "{changes} in the kernel, although nothing has changed meanwhile"
        )],
    };
    let seen = format!("{changes}, in sync in {}", span(took));
    show.check(
        ("it takes over what the kernel holds", "0 changes"),
        seen,
        wrong,
        started,
    );
    Ok(())
}

fn state(fleet: &Fleet, node: &str, wanted: NodeState) -> Result<(), String> {
    let found = fleet.nodes.iter().find(|status| status.name == node);
    let state = found.map(kplane_proto::v1::NodeStatus::state);
    (state == Some(wanted))
        .then_some(())
        .ok_or_else(|| format!("{state:?}"))
}

/// Returns the first report of the new agent; until then the control plane has the old agent's
/// report.
fn synced_since(fleet: &Fleet, node: &str, at: SystemTime) -> Result<SyncStats, String> {
    let found = fleet.nodes.iter().find(|status| status.name == node);
    let sync = found.and_then(last_sync).ok_or("no report")?;
    let finished = UNIX_EPOCH + Duration::from_millis(sync.finished_at_ms);
    (finished >= at)
        .then_some(*sync)
        .ok_or_else(|| "the report of the old agent".to_owned())
}
