//! Single requests, with a limited wait for the answer.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
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
    pub fn is_conflict(&self) -> bool {
        matches!(self.failure, Failure::Refused { code: 409, .. })
    }
}

/// Counts of requests that failed, by verb and kind of failure. Watches and lists of the source are not among them.
#[derive(Debug, Default)]
pub struct Failures(Mutex<BTreeMap<(&'static str, &'static str), u64>>);

impl Failures {
    fn count(&self, verb: &'static str, reason: &'static str) {
        *self.0.lock().entry((verb, reason)).or_default() += 1;
    }

    /// Returns the counts by verb and reason.
    pub fn all(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        self.0.lock().clone()
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
        self.failures().count(asked.verb, failure.name());
        if failure.wants_new_credentials()
            && let Err(error) = self.renew().await
        {
            tracing::debug!(%error, %asked, "cannot read the credentials again");
        }
        Err(Unanswered { asked, failure })
    }
}
