//! Health check node ports (A22-A25): load balancers ask which nodes have endpoints of a Service of
//! type LoadBalancer with external policy Local.
//!
//! ```text
//! engine: desired state, once the kernel holds it -> Publisher -> mailbox -> Servers: listeners
//!                                        report <- failures <-----------------'
//! ```
//!
//! The engine decides the answers, in work that follows what changed; it never waits. The
//! [`Servers`] task owns the listeners, one for each address and Service, and takes the latest
//! state from the mailbox. Invariants:
//! * A server reports what the kernel holds: a count changes after the family was programmed (A25).
//! * Only Services with a health check node port cost anything.

mod body;
mod count;
mod publish;
mod servers;
mod sockets;

#[cfg(test)]
mod tests;

use parking_lot::Mutex;
pub use publish::Publisher;
pub use servers::Servers;

pub(crate) use count::{Target, all_targets, target};

use std::collections::BTreeMap;
use std::sync::Arc;

use kplane_dataplane::plan::NodePlan;
use kplane_model::{Family, ServiceName};
use tokio::sync::{Notify, watch};

use crate::healthz::Health;
use crate::metrics::Counters;
use crate::report::Failure;
use sockets::Addresses;

/// The key of one server: a Service in a family.
pub(crate) type ServerKey = (Family, ServiceName);

/// Changes on their way from the engine to the servers. The mailbox keeps only the latest change of
/// each server, so it never holds more changes than there are servers.
#[derive(Debug, Default)]
struct Mailbox {
    changes: Mutex<BTreeMap<ServerKey, Option<Target>>>,
    /// The addresses to listen on.
    addresses: Mutex<Addresses>,
    wake: Notify,
}

impl Mailbox {
    fn put(&self, changes: impl IntoIterator<Item = (ServerKey, Option<Target>)>) {
        let mut waiting = self.changes.lock();
        waiting.extend(changes);
    }

    /// Chooses the addresses of a family; returns whether that is news.
    fn choose(&self, family: Family, node: &NodePlan) -> bool {
        let mut addresses = self.addresses.lock();
        addresses.choose(family, node)
    }

    fn addresses(&self) -> Addresses {
        let addresses = self.addresses.lock();
        addresses.clone()
    }

    fn take(&self) -> BTreeMap<ServerKey, Option<Target>> {
        let mut waiting = self.changes.lock();
        std::mem::take(&mut *waiting)
    }

    fn is_empty(&self) -> bool {
        let waiting = self.changes.lock();
        waiting.is_empty()
    }
}

/// Creates both ends. The publisher goes to the engine; the rest becomes [`Servers`] once there is
/// a [`Health`].
pub fn channel() -> (Publisher, Unconnected) {
    let mailbox = Arc::new(Mailbox::default());
    let (report, failures) = watch::channel(Vec::new());
    let publisher = Publisher::new(mailbox.clone(), failures);
    (publisher, Unconnected { mailbox, report })
}

/// Servers that do not know yet whether the proxy is healthy.
#[derive(Debug)]
pub struct Unconnected {
    mailbox: Arc<Mailbox>,
    report: watch::Sender<Vec<Failure>>,
}

impl Unconnected {
    /// Returns the servers. They open nothing before they run.
    pub fn connect(self, health: Health, counters: Arc<Counters>) -> Servers {
        Servers::new(self, health, counters)
    }
}
