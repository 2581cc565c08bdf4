//! The end of an agent: with the connections of its userspace proxy, or without.

use std::sync::Arc;

use kplane_dataplane::backend::Proxy;

use super::{Ended, TaskError};
use crate::handover::{Handover, Successor};

/// The reason why an agent ends.
pub(super) enum Cause {
    Shutdown,
    Successor(Successor),
    Failure(Option<Result<Result<(), TaskError>, tokio::task::JoinError>>),
}

impl Cause {
    /// Ends the userspace proxy, which goes on without the engine until then.
    pub(super) async fn end(
        self,
        mut handover: Handover,
        proxy: Option<Arc<dyn Proxy>>,
    ) -> Result<Ended, TaskError> {
        match self {
            Self::Shutdown => {
                handover.drain(proxy).await;
                Ok(Ended::Stopped)
            }
            Self::Successor(successor) => {
                if handover.hand_over(proxy, successor).await {
                    Ok(Ended::Stopped)
                } else {
                    Ok(Ended::Resumed)
                }
            }
            Self::Failure(failed) => {
                failed.map_or(Ok(()), |failed| failed?).map(|()| Ended::Stopped)
            }
        }
    }
}
