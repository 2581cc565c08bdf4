//! Forgets the clients of session affinity whose endpoint is gone (A11).

use kplane_model::EndpointAddr;

use super::access::TableAccess;
use super::affinity_id::AffinityId;
use super::clients::{Client, Remembered};
use kplane_netlink::{CommitError, NetlinkError};

/// Most attempts to forget the stale clients of a group. If the kernel itself forgets a client between the
/// read and the deletion, the whole deletion fails, and both are repeated.
const ATTEMPTS: u32 = 8;

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
pub(super) fn forget_stale<K: TableAccess>(
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
