//! Answers to questions about flows, in the wire format.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use kplane_dataplane::backend::Kind;
use kplane_dataplane::flows::{Count, FlowTarget, count};
use kplane_model::parse_ip;
use kplane_proto::convert::protocol;
use kplane_proto::v1 as pb;

/// Maximum number of targets in a question.
const TARGETS: usize = 256;
/// Longest time to count. The control plane waits for longer.
pub(super) const WITHIN: Duration = Duration::from_secs(4);

/// The right to read the tables: one question at a time, so that many cost a node no more than one core.
static TURN: Mutex<()> = Mutex::new(());

/// Counts the flows that lead to the targets of a question. Blocks.
pub(crate) fn counts(backend: &str, question: &pb::FlowQuestion) -> pb::FlowCounts {
    let counted = try_counts(backend, question);
    counted.unwrap_or_else(|error| pb::FlowCounts {
        error,
        ..pb::FlowCounts::default()
    })
}

fn try_counts(backend: &str, question: &pb::FlowQuestion) -> Result<pb::FlowCounts, String> {
    let unknown = || "the agent does not understand the question".to_owned();
    let kind = Kind::named(backend).ok_or_else(unknown)?;
    let targets = question.targets.iter().take(TARGETS).map(target);
    let targets: Vec<FlowTarget> = targets.collect::<Option<_>>().ok_or_else(unknown)?;
    let _turn = turn()?;
    let counted = count(kind, &targets, WITHIN)?;
    let counts = (0..).zip(&counted.counts);
    let counts = counts.filter(|(_, count)| count.flows + count.direct > 0);
    Ok(pb::FlowCounts {
        counts: counts.map(|(target, count)| wire(target, count)).collect(),
        table: counted.table.to_owned(),
        read: counted.read,
        error: String::new(),
    })
}

/// Takes the right to read the tables, or says that an earlier question has it.
pub(super) fn turn() -> Result<MutexGuard<'static, ()>, String> {
    let turn = TURN.try_lock();
    turn.map_err(|_| "the agent still counts for an earlier question".to_owned())
}

fn target(target: &pb::FlowTarget) -> Option<FlowTarget> {
    let port = u16::try_from(target.port).ok()?;
    Some(FlowTarget {
        ip: parse_ip(&target.address).ok()?,
        port: match port {
            0 => None,
            port => Some((protocol(target.protocol).ok()?, port)),
        },
    })
}

fn wire(target: u32, count: &Count) -> pb::FlowCount {
    pb::FlowCount {
        target,
        flows: count.flows,
        direct: count.direct,
        newest_s: count.ages.map(|(newest, _)| newest.as_secs()),
        oldest_s: count.ages.map(|(_, oldest)| oldest.as_secs()),
    }
}
