//! Forgets the clients of session affinity whose endpoint is gone (A11).

use std::collections::BTreeSet;

use kplane_model::EndpointAddr;

use super::access::TableAccess;
use super::affinity_id::AffinityId;
use super::clients::{Client, Remembered};
use kplane_netlink::{CommitError, NetlinkError};

/// Most attempts to forget the stale clients of a group. If the kernel itself forgets a client between the
/// read and the deletion, the whole deletion fails, and both are repeated.
const ATTEMPTS: u32 = 8;

/// Most groups whose clients a check reads in turn: the kernel takes a third of a millisecond to find a map among 10,000.
const AT_A_CHECK: usize = 256;

/// The groups whose clients a check reads.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Groups that may have stale clients, because forgetting them failed.
    failed: BTreeSet<AffinityId>,
    /// The last group that had its turn.
    last: Option<AffinityId>,
}

impl Turns {
    /// Records that stale clients of a group may be left.
    pub(super) fn failed(&mut self, group: AffinityId) {
        self.failed.insert(group);
    }

    /// Returns the groups of the next check, out of all: those that failed, and 256 in turn.
    pub(super) fn next(&mut self, all: &BTreeSet<AffinityId>) -> BTreeSet<AffinityId> {
        let behind = |group: &&AffinityId| self.last.is_none_or(|last| **group > last);
        let first = all.iter().filter(behind);
        let mut groups: Vec<_> =
            first.chain(all).take(AT_A_CHECK.min(all.len())).copied().collect();
        self.last = groups.last().copied();
        groups.extend(std::mem::take(&mut self.failed).intersection(all));
        groups.into_iter().collect()
    }
}

/// An error while forgetting clients.
#[derive(Debug, thiserror::Error)]
pub(super) enum ForgetError {
    #[error("cannot read the remembered clients: {0}")]
    Read(#[from] NetlinkError),
    #[error("cannot forget clients: {0}")]
    Forget(#[from] CommitError),
    #[error("the kernel keeps adding clients of removed endpoints")]
    KeepsChanging,
}

/// Forgets all clients of a group whose endpoint is not one of `endpoints` (sorted). It runs after the
/// transaction that removed endpoints. From then on, only a client that is still remembered with a removed
/// endpoint can get that endpoint. A packet that is being processed at that moment may store the client
/// again, but it is finished when the kernel acknowledges the deletion. So the last read, which must find no
/// such client, is reliable.
pub(super) fn forget_stale<K: TableAccess + ?Sized>(
    kernel: &mut K,
    group: AffinityId,
    endpoints: &[EndpointAddr],
) -> Result<(), ForgetError> {
    let stays = |client: &Client| match client.endpoint {
        Remembered::Whole(endpoint) => endpoints.binary_search(&endpoint).is_ok(),
        Remembered::Part(_) => false,
    };
    for _ in 0..ATTEMPTS {
        let mut clients = kernel.clients(group)?;
        clients.retain(|client| !stays(client));
        if clients.is_empty() {
            return Ok(());
        }
        match kernel.forget(group, &clients) {
            Ok(()) => {}
            Err(CommitError::Rejected { .. } | CommitError::Refused(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(ForgetError::KeepsChanging)
}

#[cfg(test)]
mod tests {
    use kplane_model::ServiceKey;

    use super::super::affinity_id::Scope;
    use super::*;

    #[test]
    fn each_group_has_its_turn_and_those_that_failed_are_in_the_next_check() {
        let group = |n| {
            AffinityId::new(
                &ServiceKey::sample("shop", &format!("web-{n}")),
                Scope::Cluster,
            )
        };
        let all: BTreeSet<_> = (0..600).map(group).collect();
        let mut turns = Turns::default();
        let mut seen = turns.next(&all);
        assert_eq!(seen.len(), AT_A_CHECK);
        let failed = *seen.first().unwrap();
        turns.failed(failed);
        // A group that is gone is asked nothing.
        turns.failed(group(600));
        let second = turns.next(&all);
        assert!(second.contains(&failed) && second.len() == AT_A_CHECK + 1);
        seen.extend(second);
        let third = turns.next(&all);
        assert!(!third.contains(&group(600)) && third.len() == AT_A_CHECK);
        seen.extend(third);
        assert_eq!(seen, all);
        let few: BTreeSet<_> = (0..3).map(group).collect();
        assert_eq!(turns.next(&few), few);
        assert_eq!(turns.next(&BTreeSet::new()), BTreeSet::new());
    }
}
