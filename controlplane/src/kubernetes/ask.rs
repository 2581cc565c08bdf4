//! Single requests, with a limited wait for the answer.

use std::time::Duration;

use tokio::time::timeout;

use super::{Api, Asked, Failure};

/// A request that got no answer. The text says what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the API server {}", failure.explain(*asked))]
pub struct Unanswered {
    /// The request.
    pub asked: Asked,
    /// The failure.
    pub failure: Failure,
}

impl Unanswered {
    /// Returns whether an object of the name exists already, or has changed since it was read.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        matches!(self.failure, Failure::Refused { code: 409, .. })
    }
}

impl Api {
    /// Waits for the answer to a request, for `patience` at most. Reads the credentials again when they caused a
    /// failure.
    ///
    /// # Errors
    /// [`Unanswered`].
    pub async fn ask<T>(
        &self,
        asked: Asked,
        patience: Duration,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Unanswered> {
        let failure = match timeout(patience, request).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(kube::Error::Api(status))) => {
                Failure::of_status(status.code, &status.message, None)
            }
            Ok(Err(error)) => self.failure(&error),
            Err(_) => Failure::Silent(patience),
        };
        if failure.wants_new_credentials()
            && let Err(error) = self.renew().await
        {
            tracing::debug!(%error, %asked, "cannot read the credentials again");
        }
        Err(Unanswered { asked, failure })
    }
}
