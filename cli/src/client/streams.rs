//! Answers that go on: snapshots, and each change of them.

use std::collections::BTreeMap;

use kplane_proto::v1 as pb;
use tonic::Streaming;

use super::{Client, Error, Pages};

/// The messages of a watch.
pub(super) struct Messages<T> {
    stream: Streaming<T>,
    client: Client,
    started: bool,
}

impl<T> Messages<T> {
    pub(super) fn new(stream: Streaming<T>, client: &Client) -> Self {
        Self {
            stream,
            client: client.clone(),
            started: false,
        }
    }

    /// Returns the next message. The first one must come within the timeout; later ones may take any time. Nothing is
    /// lost when the future is dropped.
    async fn next(&mut self) -> Result<T, Error> {
        let message = if self.started {
            self.stream.message().await
        } else {
            let first = tokio::time::timeout(self.client.line.timeout, self.stream.message());
            first.await.map_err(|_| self.client.timed_out())?
        };
        self.started = true;
        match message {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(self.client.lost("the server ended the stream")),
            Err(status) => Err(self.client.refused(&status)),
        }
    }
}

/// A stream of snapshots of the fleet.
pub(crate) struct FleetStream {
    messages: Messages<pb::Fleet>,
    /// The pages of the next snapshot.
    pages: Pages,
}

impl FleetStream {
    pub(super) fn new(messages: Messages<pb::Fleet>) -> Self {
        Self {
            messages,
            pages: Pages::default(),
        }
    }

    /// Returns the next snapshot, in time as [`Messages::next`].
    pub(crate) async fn next(&mut self) -> Result<pb::Fleet, Error> {
        loop {
            let page = self.messages.next().await?;
            if let Some(fleet) = self.pages.add(page) {
                return fleet.map_err(|cause| self.messages.client.lost(cause));
            }
        }
    }
}

/// A stream of snapshots of Services.
pub(crate) struct ServiceStream {
    messages: Messages<pb::ServiceChanges>,
    ports: BTreeMap<PortKey, pb::ServiceView>,
    /// Something has changed since the last snapshot.
    changed: bool,
}

/// The order of ServicePorts: namespace, name, port, protocol, family.
type PortKey = (String, String, String, i32, i32);

impl ServiceStream {
    pub(super) fn new(messages: Messages<pb::ServiceChanges>) -> Self {
        Self {
            messages,
            ports: BTreeMap::new(),
            // An empty snapshot is news, too.
            changed: true,
        }
    }

    /// Returns the next snapshot that differs from the one before, in time as [`Messages::next`].
    pub(crate) async fn next(&mut self) -> Result<Vec<pb::ServiceView>, Error> {
        loop {
            let message = self.messages.next().await?;
            let complete = message.complete;
            self.changed |= take_changes(&mut self.ports, message);
            if complete && std::mem::take(&mut self.changed) {
                return Ok(self.ports.values().cloned().collect());
            }
        }
    }
}

/// Takes a message into a snapshot; returns whether it may have changed.
fn take_changes(ports: &mut BTreeMap<PortKey, pb::ServiceView>, news: pb::ServiceChanges) -> bool {
    let changed = news.snapshot || !news.replaced.is_empty() || !news.services.is_empty();
    if news.snapshot {
        ports.clear();
    }
    for pb::ServiceId { namespace, name } in news.replaced {
        let least = (namespace.clone(), name.clone(), String::new(), 0, 0);
        let of_it = ports.range(least..).map(|(key, _)| key);
        let gone: Vec<PortKey> = of_it
            .take_while(|key| (&key.0, &key.1) == (&namespace, &name))
            .cloned()
            .collect();
        for key in gone {
            ports.remove(&key);
        }
    }
    for port in news.services {
        let key = port.key.clone().unwrap_or_default();
        let (protocol, family) = (key.protocol, key.family);
        ports.insert(
            (key.namespace, key.name, key.port_name, protocol, family),
            port,
        );
    }
    changed
}

/// A stream about the convergence of one Service.
pub(crate) struct ConvergenceStream(Messages<pb::Convergence>);

impl ConvergenceStream {
    pub(super) fn new(messages: Messages<pb::Convergence>) -> Self {
        Self(messages)
    }

    /// Returns the next state, in time as [`Messages::next`].
    pub(crate) async fn next(&mut self) -> Result<pb::Convergence, Error> {
        self.0.next().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_services_make_pictures() {
        let port = |name: &str, port_name: &str, revision| pb::ServiceView {
            key: Some(pb::ServiceKey {
                namespace: "shop".to_owned(),
                name: name.to_owned(),
                port_name: port_name.to_owned(),
                ..Default::default()
            }),
            revision,
            ..Default::default()
        };
        let news = |replaced: &[&str], services: Vec<pb::ServiceView>| pb::ServiceChanges {
            replaced: replaced
                .iter()
                .map(|name| pb::ServiceId {
                    namespace: "shop".to_owned(),
                    name: (*name).to_owned(),
                })
                .collect(),
            services,
            ..Default::default()
        };
        let mut ports = BTreeMap::new();
        let mut take = |news| {
            let changed = take_changes(&mut ports, news);
            let all = ports.values().map(|port| {
                let key = port.key.as_ref().unwrap();
                format!("{}:{}@{}", key.name, key.port_name, port.revision)
            });
            (changed, all.collect::<Vec<_>>())
        };
        let all = vec![
            port("web", "a", 1),
            port("web", "b", 1),
            port("web2", "", 1),
        ];
        let first = pb::ServiceChanges {
            snapshot: true,
            ..news(&[], all)
        };
        assert_eq!(take(first.clone()).1, ["web:a@1", "web:b@1", "web2:@1"]);
        assert!(!take(news(&[], Vec::new())).0, "a message without news");
        let port_gone = news(&["web"], vec![port("web", "b", 2)]);
        assert_eq!(take(port_gone).1, ["web:b@2", "web2:@1"]);
        assert_eq!(take(news(&["web"], Vec::new())).1, ["web2:@1"]);
        // What is not there was never there, or begins anew.
        assert_eq!(take(news(&["api"], Vec::new())).1, ["web2:@1"]);
        assert_eq!(take(first).1, ["web:a@1", "web:b@1", "web2:@1"]);
    }
}
