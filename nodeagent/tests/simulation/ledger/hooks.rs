//! Pods that wait to end, and who leads to them.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use kplane_proto::v1::LeavingOutcome;
use tokio::time::Instant;

use super::{H1, Ledger, Notes, Sides};
use crate::truth::PORTS;

/// The time in which a question reaches a replica. A Pod that no slice names by then counts as one without a Service.
const ASKING: Duration = Duration::from_secs(2);

/// A Pod that waits to end.
#[derive(Debug)]
pub(super) struct Leaving {
    slice: (u8, u8),
    ip: IpAddr,
    since: Instant,
}

impl Ledger {
    /// Notes that a Pod of a slice waits to end; returns the token of its question.
    pub(crate) fn ask(&mut self, slice: (u8, u8), ip: IpAddr) -> u64 {
        self.asked += 1;
        let since = Instant::now();
        self.leaving.insert(self.asked, Leaving { slice, ip, since });
        self.asked
    }

    /// Notes that a slice has other Pods now, of which one may have the address of another before.
    pub(crate) fn rewritten(&mut self, slice: (u8, u8), ips: impl IntoIterator<Item = IpAddr>) {
        let ips = Vec::from_iter(ips);
        self.leaving.retain(|_, leaving| {
            let is_asked = leaving.since.elapsed() >= ASKING;
            leaving.slice != slice || is_asked && !ips.contains(&leaving.ip)
        });
    }

    /// Notes that an agent and a replica speak with each other from now on.
    pub(crate) fn joins(&mut self, node: u8, epoch: u64) {
        self.agents[usize::from(node)].joined = Some((epoch, Instant::now()));
    }

    /// Notes that they do so no more, or that one of them does not hear the other.
    pub(crate) fn leaves(&mut self, node: u8, epoch: u64) {
        self.agents[usize::from(node)].joined.take_if(|(joined, _)| *joined == epoch);
    }

    /// Notes what a kernel has.
    pub(crate) fn serves(&mut self, node: u8, sides: &Sides) {
        self.served[usize::from(node)].clone_from(sides);
    }

    /// Checks what a replica answers to a Pod that waits to end.
    pub(crate) fn left(&mut self, epoch: u64, token: u64, outcome: LeavingOutcome) {
        // A change of the source wakes the questions in any order.
        self.note(("left", epoch), || {
            format!("epoch {epoch} answers hook {token}: {outcome:?}")
        });
        let Some(Leaving { ip, since, .. }) = self.leaving.remove(&token) else {
            return;
        };
        if outcome != LeavingOutcome::Gone {
            return;
        }
        let ends = PORTS.map(|(_, _, target)| SocketAddr::new(ip, target));
        let leads = |sides: &Sides| {
            sides
                .iter()
                .flat_map(|(side, _)| side.values())
                .flat_map(|entry| &entry.places)
                .any(|(_, place)| ends.iter().any(|end| place.leads_to(end)))
        };
        // A replica asks the nodes that it reaches when the question comes.
        let is_asked =
            |notes: &Notes| notes.joined.is_some_and(|(joined, at)| joined == epoch && at <= since);
        let leading = self
            .agents
            .iter()
            .zip(&self.served)
            .enumerate()
            .filter(|(_, (notes, _))| is_asked(notes))
            .find(|(_, (_, sides))| leads(sides));
        if let Some((node, _)) = leading {
            let text = format!("n{node} leads to {ip}, and epoch {epoch} says that it is gone");
            self.break_invariant(H1, text);
        }
    }
}
