//! Second looks: when everything of a kind is listed again although nothing has gone wrong.
//!
//! The first list of all may be a lie as well as any (an etcd that lost its data, a proxy that filters),
//! and there is nothing to compare it with. If it is empty, where no cluster is without anything, it is
//! looked at again; and if somebody keeps what it lacks: an agent, or the index.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::{Closed, Reflector, Told};
use crate::k8s::Kind;
use crate::source::kubernetes::memory::EMPTY_FOR;
use crate::source::kubernetes::transport::Transport;
use crate::trust::CONFIRMING;

/// Least time between a list and a second look that somebody wants.
pub(super) const PAUSE: Duration = Duration::from_secs(5);

/// When to look again.
#[derive(Debug)]
pub(super) struct SecondLook {
    kind: Kind,
    looks: watch::Receiver<u64>,
    listed_at: Instant,
    /// The first list was empty, and there was no other.
    empty: bool,
}

impl SecondLook {
    pub(super) fn new(kind: Kind, looks: watch::Receiver<u64>) -> Self {
        Self {
            kind,
            looks,
            listed_at: Instant::now(),
            empty: false,
        }
    }

    /// A list begins: it is for all who wanted one up to now.
    pub(super) fn begins(&mut self) {
        self.looks.mark_unchanged();
    }

    /// A complete list was believed.
    pub(super) fn listed(&mut self, first: bool, empty: bool) {
        self.listed_at = Instant::now();
        self.empty = first && empty && CONFIRMING.contains(&self.kind);
    }

    /// Why there may be objects that were never told, if there are any.
    pub(super) fn doubt(&self) -> Option<String> {
        self.empty.then(|| {
            format!(
                "the API server's first list of {}s was empty, and no cluster is without any; it is \
                 asked again after {} s",
                self.kind,
                EMPTY_FOR.as_secs()
            )
        })
    }

    /// Ends when it is time. Forgets nothing when it is dropped.
    pub(super) async fn due(&self) {
        let wanted = async {
            // A copy: the wish counts until a list begins.
            let mut looks = self.looks.clone();
            if !CONFIRMING.contains(&self.kind) || looks.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            sleep_until(self.listed_at + PAUSE).await;
        };
        tokio::select! {
            () = wanted => {}
            () = sleep_until(self.listed_at + EMPTY_FOR), if self.empty => {}
        }
    }
}

impl<T: Transport> Reflector<T> {
    /// Tells why there may be objects that were never told, if that has changed.
    pub(super) async fn tell_doubt(&mut self) -> Result<(), Closed> {
        let doubt = self.report.doubt().or_else(|| self.second_look.doubt());
        if doubt == self.doubt {
            return Ok(());
        }
        self.doubt.clone_from(&doubt);
        let told = Told {
            doubt: Some((self.kind, doubt)),
            ..Told::now(Vec::new())
        };
        self.outbox.send(told).await.map_err(|_| Closed)
    }
}
