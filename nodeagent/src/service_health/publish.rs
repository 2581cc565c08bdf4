//! The engine's end: sends changes to the servers, and receives failures to open ports.

use std::collections::BTreeMap;
use std::sync::Arc;

use kplane_dataplane::plan::NodePlan;
use kplane_model::{Family, ServiceKey, ServiceName};
use tokio::sync::watch;

use super::{Mailbox, ServerKey, Target, all_targets, target};
use crate::desired::{Desired, Dirty};
use crate::report::Failure;

/// The publisher, owned by the engine. It keeps what it last published, and publishes only real
/// changes.
#[derive(Debug)]
pub struct Publisher {
    published: BTreeMap<ServerKey, Target>,
    pub(super) mailbox: Arc<Mailbox>,
    failures: watch::Receiver<Vec<Failure>>,
}

impl Publisher {
    pub(super) fn new(mailbox: Arc<Mailbox>, failures: watch::Receiver<Vec<Failure>>) -> Self {
        Self {
            published: BTreeMap::new(),
            mailbox,
            failures,
        }
    }

    /// Publishes after a family was programmed (A25). If `everything`, all of the family is
    /// compared, and not only what was touched. A Service keeps its earlier answer if `failed`
    /// names a part that the kernel refused. Servers listen where the `node` serves node ports (A23).
    pub(crate) fn programmed(
        &mut self,
        family: Family,
        node: &NodePlan,
        desired: &Desired,
        dirty: Option<&Dirty>,
        failed: impl Fn(&ServiceName) -> bool,
    ) {
        let changes = match dirty {
            Some(dirty) => self.some(family, desired, dirty),
            None => self.all(family, desired),
        };
        let changes: Vec<_> = changes
            .into_iter()
            .filter(|((_, service), new)| new.is_none() || !failed(service))
            .collect();
        if !changes.is_empty() {
            for (key, new) in &changes {
                match new {
                    Some(new) => self.published.insert(key.clone(), new.clone()),
                    None => self.published.remove(key),
                };
            }
            self.mailbox.put(changes);
        }
        let moved = self.mailbox.choose(family, node) && !self.published.is_empty();
        if moved || self.has_failures() || !self.mailbox.is_empty() {
            // Ports that were taken are tried again at every sync (A25).
            self.mailbox.wake.notify_one();
        }
    }

    fn some(
        &self,
        family: Family,
        desired: &Desired,
        dirty: &Dirty,
    ) -> Vec<(ServerKey, Option<Target>)> {
        let ours = dirty.services.iter().filter(|key| key.family == family);
        let mut changes: Vec<(ServerKey, Option<Target>)> = Vec::new();
        for key in ours {
            let server = (family, key.service.clone());
            // Keys are sorted, so ports of one Service are adjacent.
            if changes.last().is_some_and(|(last, _)| *last == server) {
                continue;
            }
            let old = self.published.get(&server);
            if old.is_none() && !has_server(desired, key) {
                continue;
            }
            let new = target(desired, &key.service, family);
            if new.as_ref() != old {
                changes.push((server, new));
            }
        }
        changes
    }

    fn all(&self, family: Family, desired: &Desired) -> Vec<(ServerKey, Option<Target>)> {
        let targets = all_targets(desired, family);
        let ours = self.published.keys().filter(|(of, _)| *of == family);
        let gone = ours.filter(|(_, service)| !targets.contains_key(service));
        let mut changes: Vec<_> = gone.map(|key| (key.clone(), None)).collect();
        for (service, target) in targets {
            let server = (family, service);
            if self.published.get(&server) != Some(&target) {
                changes.push((server, Some(target)));
            }
        }
        changes
    }

    /// Returns the servers that cannot listen.
    pub(crate) fn failures(&self) -> Vec<Failure> {
        self.failures.borrow().clone()
    }

    fn has_failures(&self) -> bool {
        !self.failures.borrow().is_empty()
    }

    /// Waits until the failures change; for ever when there are no servers.
    pub(crate) async fn failures_changed(&mut self) {
        if self.failures.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Returns whether a ServicePort has a health check node port.
fn has_server(desired: &Desired, key: &ServiceKey) -> bool {
    let view = desired.service(key);
    view.is_some_and(|(program, _)| program.port.health_check_node_port.is_some())
}
