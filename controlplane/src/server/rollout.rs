//! Rollouts of settings: operators begin and end them, and each replica helps them on their way (`kpctl rollout`).

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kplane_proto::v1 as pb;
use tokio::time::{Instant, sleep};
use tonic::Status;
use tracing::{error, info};

use super::pages::Picture;
use super::{millis, operator};
use crate::hub::Hub;
use crate::identity::{Right, Visitor};
use crate::orders::{Fleet, MAX_STEPS, Rollout, Settings, Stage, Turn};
use crate::peers::{Collected, Peers};
use crate::rollout::{Covered, Verdict, judge};

/// Interval between two readings of the states of a step's nodes.
const LOOK: Duration = Duration::from_secs(1);
/// Longest time for which nodes must be healthy.
const MAX_HEALTHY: Duration = Duration::from_secs(3_600);
/// Longest time of a step, and the time if none is given.
const MAX_TIMEOUT: Duration = Duration::from_secs(86_400);
const TIMEOUT: Duration = Duration::from_secs(300);
/// Steps if none are given.
const STEPS: [u8; 3] = [5, 25, 100];
/// Backends that may be chosen.
const BACKENDS: [&str; 3] = ["nftables", "iptables", "ipvs"];
/// Layouts of mode iptables.
const LAYOUTS: [&str; 2] = ["tree", "compat"];
/// Greatest bit of a packet mark.
const MAX_BIT: u32 = 31;

/// Begins or ends a rollout.
pub(super) async fn change(
    hub: &Hub,
    visitor: Option<&Visitor>,
    request: pb::ChangeRolloutRequest,
) -> Result<(), Status> {
    use pb::change_rollout_request::Change;
    let reason = request.reason;
    operator::check_reason(&reason)?;
    let by = operator::name(visitor);
    let at_ms = millis(SystemTime::now());
    let (turn, what) = match request.change {
        Some(Change::Begin(plan)) => {
            let rollout = planned(plan)?;
            let what = format!("began a rollout of {}", rollout.settings);
            let rollout = Rollout {
                by,
                reason,
                at_ms,
                step_at_ms: at_ms,
                ..rollout
            };
            (Turn::Begin(Box::new(rollout)), what)
        }
        Some(Change::Stop(_)) => {
            let who = if by.is_empty() { "an operator" } else { &by };
            let why = match reason.as_str() {
                "" => format!("stopped by {who}"),
                reason => format!("stopped by {who}: {reason}"),
            };
            let turn = Turn::End {
                number: None,
                stage: Stage::Back(why),
                at_ms,
            };
            (turn, "stopped the rollout".to_owned())
        }
        None => return Err(Status::invalid_argument("neither begin nor stop is given")),
    };
    let turned = hub.orders.turn(turn).await;
    turned.map_err(|why| operator::refusal("nothing changed", &why))?;
    info!("an operator {what}");
    if let Some(visitor) = visitor {
        visitor.did(&Right::Act, &what);
    }
    Ok(())
}

/// Checks a plan, and returns its first step, of nobody and at no time yet.
fn planned(plan: pb::RolloutPlan) -> Result<Rollout, Status> {
    let wrong = |what: &str| Err(Status::invalid_argument(what));
    let settings = Settings::from(plan.settings.unwrap_or_default());
    let is_one_of = |name: &str, names: &[&str]| name.is_empty() || names.contains(&name);
    if !is_one_of(&settings.backend, &BACKENDS) {
        return wrong("the backend must be nftables, iptables or ipvs");
    }
    if !is_one_of(&settings.iptables_layout, &LAYOUTS) {
        return wrong("the iptables layout must be tree or compat");
    }
    if settings.masquerade_bit.is_some_and(|bit| bit > MAX_BIT) {
        return wrong("the masquerade bit must be 0 to 31");
    }
    let given = plan
        .percentages
        .iter()
        .map(|percent| u8::try_from(*percent));
    let Ok(mut steps) = given.collect::<Result<Vec<u8>, _>>() else {
        return wrong("percentages must be 1 to 100");
    };
    if steps.is_empty() {
        steps = STEPS.to_vec();
    }
    if steps.last() != Some(&100) {
        steps.push(100);
    }
    let grow = steps.is_sorted_by(|one, next| one < next);
    if !grow || steps.first() == Some(&0) || steps.len() > MAX_STEPS {
        return wrong("percentages must be 1 to 100 and grow, 16 at most");
    }
    let (healthy, timeout) = (
        Duration::from_millis(plan.healthy_ms),
        Duration::from_millis(plan.timeout_ms),
    );
    let timeout = if timeout.is_zero() { TIMEOUT } else { timeout };
    if healthy > MAX_HEALTHY || timeout > MAX_TIMEOUT || timeout <= healthy {
        return wrong(
            "nodes must be healthy for an hour at most, a step may take a day at most, and it must be able to take \
             longer than nodes must be healthy",
        );
    }
    let in_milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Ok(Rollout {
        // The order's number is not known before it is written: until the first look no node is covered.
        number: 0,
        up_to: 0,
        settings,
        steps,
        step: 0,
        healthy_ms: in_milliseconds(healthy),
        timeout_ms: in_milliseconds(timeout),
        by: String::new(),
        reason: String::new(),
        at_ms: 0,
        step_at_ms: 0,
        stage: Stage::Running,
    })
}

/// Returns the last place of a step that covers a percentage of the nodes whose agents are connected to any replica.
async fn last_place(hub: &Hub, peers: Option<&Peers>, number: u64, percent: u8) -> u64 {
    let others = others(peers).await;
    let picture = Picture::with(hub, &others);
    let connected = picture.nodes().filter(|(_, node)| node.is_connected());
    Rollout::last_place(number, percent, connected.map(|(name, _)| name))
}

/// Returns what other replicas know of their nodes.
async fn others(peers: Option<&Peers>) -> Arc<Collected> {
    match peers {
        Some(peers) => peers.nodes().await,
        None => Arc::default(),
    }
}

/// Returns the settings of the fleet, and how far the last rollout is.
pub(super) async fn show(hub: &Hub, peers: Option<&Peers>) -> pb::Rollout {
    let Some(fleet) = hub.orders.fleet() else {
        return pb::Rollout::default();
    };
    let base = Some(pb::Settings::from(&fleet.base));
    let Some(rollout) = fleet.rollout else {
        return pb::Rollout {
            base,
            ..pb::Rollout::default()
        };
    };
    let covered = look(hub, peers, &rollout).await;
    let reason_back = match &rollout.stage {
        Stage::Back(why) => why.clone(),
        Stage::Running | Stage::Done => String::new(),
    };
    pb::Rollout {
        base,
        number: rollout.number,
        settings: Some((&rollout.settings).into()),
        percentages: rollout
            .steps
            .iter()
            .map(|percent| (*percent).into())
            .collect(),
        step: u32::try_from(rollout.step).unwrap_or(u32::MAX),
        stage: match rollout.stage {
            Stage::Running => pb::RolloutStage::Running,
            Stage::Done => pb::RolloutStage::Done,
            Stage::Back(_) => pb::RolloutStage::Back,
        }
        .into(),
        reason_back,
        by: rollout.by,
        reason: rollout.reason,
        began_ms: rollout.at_ms,
        step_ms: rollout.step_at_ms,
        healthy_ms: rollout.healthy_ms,
        timeout_ms: rollout.timeout_ms,
        covered: covered.nodes,
        healthy: covered.healthy,
        later: covered.later,
        lags: covered.lags,
    }
}

/// Returns the states of the nodes that a step covers, from all replicas.
async fn look(hub: &Hub, peers: Option<&Peers>, rollout: &Rollout) -> Covered {
    let others = others(peers).await;
    let picture = Picture::with(hub, &others);
    let statuses = picture.nodes().filter(|(name, _)| rollout.covers(name));
    let mut covered = Covered::default();
    for (name, node) in statuses {
        covered.add(rollout, &picture.status(name, node));
    }
    covered.miss(picture.missing());
    covered
}

/// Helps rollouts on their way for as long as the control plane runs. Every replica does: the document lets only one of
/// them make each turn.
pub(crate) async fn help(hub: Arc<Hub>, peers: Option<Arc<Peers>>) {
    let mut orders = hub.orders.changes();
    let mut healthy = None::<((u64, usize), Instant)>;
    loop {
        let running = |fleet: Fleet| fleet.rollout.filter(Rollout::is_running);
        let Some(rollout) = hub.orders.fleet().and_then(running) else {
            healthy = None;
            if orders.changed().await.is_err() {
                return;
            }
            continue;
        };
        if let Some(turn) = next_turn(&hub, peers.as_deref(), &rollout, &mut healthy).await {
            tell(&turn, &rollout);
            if let Err(error) = hub.orders.turn(turn).await {
                error!(%error, "cannot go on with the rollout; trying again");
            }
        }
        sleep(LOOK).await;
    }
}

/// Returns the turn that is due.
async fn next_turn(
    hub: &Hub,
    peers: Option<&Peers>,
    rollout: &Rollout,
    healthy: &mut Option<((u64, usize), Instant)>,
) -> Option<Turn> {
    let at_ms = millis(SystemTime::now());
    let number = rollout.number;
    if rollout.up_to == 0 {
        let up_to = last_place(hub, peers, number, rollout.first_percent()).await;
        return Some(Turn::Cover {
            number,
            up_to,
            at_ms,
        });
    }
    let covered = look(hub, peers, rollout).await;
    let step = (number, rollout.step);
    let since = healthy.filter(|(of, _)| *of == step && covered.all_healthy());
    let (_, since) = *healthy.insert(since.unwrap_or((step, Instant::now())));
    let lasted = Duration::from_millis(at_ms.saturating_sub(rollout.step_at_ms));
    let end = |stage| {
        Some(Turn::End {
            number: Some(number),
            stage,
            at_ms,
        })
    };
    match judge(rollout, &covered, since.elapsed(), lasted) {
        Verdict::Wait => None,
        Verdict::Back(why) => end(Stage::Back(why)),
        Verdict::Good => match rollout.next_percent() {
            Some(percent) => Some(Turn::Next {
                number,
                from: rollout.step,
                up_to: last_place(hub, peers, number, percent).await,
                at_ms,
            }),
            None => end(Stage::Done),
        },
    }
}

fn tell(turn: &Turn, rollout: &Rollout) {
    let settings = &rollout.settings;
    match turn {
        Turn::End {
            stage: Stage::Back(why),
            ..
        } => error!(
            %settings, why,
            "the rollout failed: all nodes get the settings from before again"
        ),
        Turn::End { .. } => info!(%settings, "the rollout is done: all nodes have the settings"),
        Turn::Next { .. } => {
            let percent = rollout.next_percent();
            info!(%settings, percent, "the rollout goes on with more nodes");
        }
        Turn::Begin(_) | Turn::Cover { .. } => {
            info!(%settings, percent = rollout.first_percent(), "the rollout begins with its first nodes");
        }
    }
}
