//! The reasons why the control plane did not answer.

use std::time::Duration;

use kplane_model::ServiceName;
use tonic::Code;

use crate::args;
use crate::connection;
use kplane_view::time::human;

/// The reason why the control plane did not answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No connection could be made.
    #[error(transparent)]
    Route(#[from] connection::ReachError),
    /// The connection ended.
    #[error("lost the connection to {server}: {cause}")]
    Lost { server: String, cause: String },
    /// No answer came in time.
    #[error("no answer from {server} within {}. Wait longer with --timeout", human(*timeout))]
    Timeout { server: String, timeout: Duration },
    /// The address belongs to another service.
    #[error(
        "{server} does not offer kplane.v1.StatusService, or not this request of it. Use the control plane's status \
         address, port 7466; a control plane that is older than this kpctl must be updated"
    )]
    NotStatus { server: String },
    /// The address belongs to another service, or to a control plane from before this request.
    #[error(
        "{server} does not offer StatusService/WatchConvergence. Use the control plane's status \
         address, port 7466; a control plane that is older than this kpctl must be updated"
    )]
    NoConvergence { server: String },
    /// The control plane is from before this service.
    #[error(
        "{server} does not offer RecorderService: the control plane is older than this kpctl, and keeps no record of \
         what happened. Update it"
    )]
    NoRecord { server: String },
    /// The Service does not exist.
    #[error("no Service {name}{}", did_you_mean(similar))]
    NoService {
        name: ServiceName,
        /// Services with similar names, the most similar first.
        similar: Vec<String>,
    },
    /// Any other refusal.
    #[error("{server} refused: {message} ({code:?})")]
    Refused {
        server: String,
        code: Code,
        message: String,
    },
}

impl Error {
    /// Returns whether the same request may succeed a second later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Route(error) => error.is_transient(),
            Self::Lost { .. } | Self::Timeout { .. } => true,
            Self::NotStatus { .. }
            | Self::NoConvergence { .. }
            | Self::NoRecord { .. }
            | Self::NoService { .. }
            | Self::Refused { .. } => false,
        }
    }

    /// Returns whether the control plane does not do what the request is about, such as policies that no node enforces.
    pub(crate) fn is_precondition(&self) -> bool {
        matches!(
            self,
            Self::Refused {
                code: Code::FailedPrecondition,
                ..
            }
        )
    }

    /// Returns whether the control plane does not accept the credentials, or no longer does.
    pub(crate) fn is_unauthenticated(&self) -> bool {
        matches!(
            self,
            Self::Refused {
                code: Code::Unauthenticated,
                ..
            }
        )
    }
}

fn did_you_mean(similar: &[String]) -> String {
    match similar {
        [] => format!(". List them with: {} get services", args::program()),
        similar => format!(". Did you mean {}?", similar.join(" or ")),
    }
}
