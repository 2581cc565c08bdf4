//! Second lists: decides when everything of a kind is listed again although nothing has failed.
//!
//! The very first list may be false like any other (etcd lost its data, a proxy filters), and there
//! is nothing to compare it with. Services and EndpointSlices are listed again if their first list
//! is empty, although every cluster has such objects. All kinds but ServiceCIDRs are also listed
//! again if an agent or the index keeps objects that a list lacks.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::{Closed, KindEvents, Reflector};
use crate::k8s::Kind;
use crate::source::Event;
use crate::source::kubernetes::memory::EMPTY_FOR;
use crate::source::kubernetes::transport::Transport;
use crate::trust::SERVICES;

/// Minimum time between a list and a second list that was requested.
pub(super) const PAUSE: Duration = Duration::from_secs(5);

/// The schedule of second lists.
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

    /// Records that a list begins; it answers all requests up to now.
    pub(super) fn begins(&mut self) {
        self.looks.mark_unchanged();
    }

    /// Records that a complete list was believed.
    pub(super) fn listed(&mut self, first: bool, empty: bool) {
        self.listed_at = Instant::now();
        self.empty = first && empty && SERVICES.contains(&self.kind);
    }

    /// Returns the reason why unknown objects may exist, if there is one.
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

    /// Waits until a second list is due; no agent keeps anything for want of a ServiceCIDR. Dropping the
    /// future loses nothing.
    pub(super) async fn due(&self) {
        let wanted = async {
            // The receiver is cloned, so that the request counts until a list begins.
            let mut looks = self.looks.clone();
            let none = self.kind == Kind::ServiceCidr;
            if none || looks.changed().await.is_err() {
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
    /// Handles another attempt to list a kind without which everything is served: there is none, as before.
    pub(super) async fn is_still_without(&mut self) -> Result<(), Closed> {
        self.second_look.listed(false, true);
        self.tell(vec![Event::Looked(self.kind)]).await
    }

    /// Passes on the reason why unknown objects may exist, if it has changed.
    pub(super) async fn tell_doubt(&mut self) -> Result<(), Closed> {
        let doubt = self.report.doubt().or_else(|| self.second_look.doubt());
        if doubt == self.doubt {
            return Ok(());
        }
        self.doubt.clone_from(&doubt);
        let sent = KindEvents {
            doubt: Some((self.kind, doubt)),
            ..KindEvents::now(Vec::new())
        };
        self.outbox.send(sent).await.map_err(|_| Closed)
    }
}
