//! Lists and watches of Services.
//!
//! A page is computed in the index's task, and only as much of it as fits into an answer. A watch gets the names of
//! Services that may have changed (`hub/changed_services.rs`), and then asks for these.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kplane_agents::hub::{Hub, IndexHandle, Missed};
use kplane_agents::peers::Collected;
use kplane_desired_state::index::Selection;
use kplane_model::{Family, KeyParts, Protocol, ServiceKey, ServiceName};
use kplane_proto::v1 as pb;
use prost::Message as _;
use tonic::Status;

use super::broken::worst_of;
use super::request::{WATCH_PAUSE, cost};
use super::{Outbox, views};
use crate::findings::Broken;

/// Size in bytes up to which ServicePorts with findings are added to an answer: a little more than the index's pages have.
const WITH_FINDINGS: usize = 7 << 19;
/// Maximum time between two messages of a watch.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Returns the cost of a page: that of the whole list with the first one, and that of a question with each other one.
pub(super) fn list_cost(index: &IndexHandle, request: &pb::ListServicesRequest) -> u32 {
    if request.page_token.is_empty() && request.name.is_empty() {
        cost(index.summary().borrow().totals.services)
    } else {
        1
    }
}

/// Returns one page of Services. With what other replicas know of nodes, each Service has its worst finding.
pub(super) async fn list(
    hub: &Hub,
    others: Option<&Collected>,
    request: pb::ListServicesRequest,
) -> Result<pb::ListServicesResponse, Status> {
    let after = match request.page_token.as_str() {
        "" => None,
        token => Some(read_token(token).ok_or_else(|| {
            Status::invalid_argument(
                "page_token is none of this control plane: begin again without one",
            )
        })?),
    };
    let mut selection = Selection {
        namespace: request.namespace,
        name: request.name,
        node: request.node,
        among: None,
        after,
        most: usize::try_from(request.page_size).unwrap_or(usize::MAX),
    };
    let mut worst = BTreeMap::new();
    if let Some(others) = others
        && request.bad
    {
        let wanted = selection.clone();
        let names = hub.index().look(move |index| index.names(&wanted)).await?;
        worst = worst_of(hub, others, names).await?;
        selection.among = Some(worst.keys().cloned().collect());
    }
    let mut page = hub.index().look(move |index| index.ports(&selection)).await?;
    if let Some(others) = others
        && !request.bad
    {
        let mut names: Vec<_> =
            page.ports.iter().map(|view| view.port.key.service.clone()).collect();
        names.dedup();
        worst = worst_of(hub, others, names).await?;
    }
    let (mut services, mut bytes) = (Vec::new(), 0);
    for view in &page.ports {
        let finding = worst.get(&view.port.key.service).map(Broken::in_brief);
        let service = pb::ServiceView {
            finding,
            ..views::service(hub.store(), view)
        };
        bytes += service.encoded_len();
        if bytes > WITH_FINDINGS && !services.is_empty() {
            page.more = true;
            break;
        }
        services.push(service);
    }
    page.ports.truncate(services.len());
    let last = if page.more { page.ports.last() } else { None };
    Ok(pb::ListServicesResponse {
        services,
        next_page_token: last.map(|view| token(&view.port.key)).unwrap_or_default(),
    })
}

/// Returns the token of the page behind a ServicePort.
fn token(key: &ServiceKey) -> String {
    let KeyParts {
        service,
        port_name,
        protocol,
        family,
    } = &**key;
    let family = family.pick("4", "6");
    // None of the names contains a slash.
    format!(
        "{}/{}/{port_name}/{protocol}/{family}",
        service.namespace, service.name
    )
}

fn read_token(token: &str) -> Option<ServiceKey> {
    let mut parts = token.split('/');
    let mut next = || parts.next();
    let service = ServiceName::new(next()?, next()?);
    let key = ServiceKey::from(KeyParts {
        service,
        port_name: next()?.into(),
        protocol: next()?.parse::<Protocol>().ok()?,
        family: match next()? {
            "4" => Family::V4,
            "6" => Family::V6,
            _ => return None,
        },
    });
    parts.next().is_none().then_some(key)
}

/// Sends a snapshot, then every change, until the client disconnects or the control plane ends.
pub(super) async fn watch(
    hub: Arc<Hub>,
    request: pb::WatchServicesRequest,
    outbox: Outbox<pb::ServiceChanges>,
) {
    let wanted = Selection {
        namespace: request.namespace,
        name: request.name,
        node: request.node,
        ..Selection::default()
    };
    let mut changes = hub.notices().changed_services.follow();
    // No names = a snapshot begins.
    let mut names = None;
    loop {
        if !send(&hub, &wanted, names.take(), &outbox).await {
            return;
        }
        tokio::time::sleep(WATCH_PAUSE).await;
        names = tokio::select! {
            biased;
            () = hub.shutdown().cancelled() => return,
            () = outbox.closed() => return,
            next = changes.next() => match next {
                Ok(changed_services) => {
                    let changed_services = changed_services.into_iter().filter(|name| wanted.wants(name));
                    Some(changed_services.collect())
                }
                Err(Missed::Some) => {
                    changes = hub.notices().changed_services.follow();
                    None
                }
                Err(Missed::All) => return,
            },
            () = tokio::time::sleep(HEARTBEAT) => Some(BTreeSet::new()),
        };
    }
}

/// Sends the present state of these Services, or of all; returns false when the client has gone.
async fn send(
    hub: &Hub,
    wanted: &Selection,
    names: Option<BTreeSet<ServiceName>>,
    outbox: &Outbox<pb::ServiceChanges>,
) -> bool {
    let replaced = names.iter().flatten().map(|name| pb::ServiceId {
        namespace: name.namespace.to_string(),
        name: name.name.to_string(),
    });
    let mut message = pb::ServiceChanges {
        snapshot: names.is_none(),
        replaced: replaced.collect(),
        ..pb::ServiceChanges::default()
    };
    let mut selection = Selection {
        among: names,
        ..wanted.clone()
    };
    loop {
        let wanted = selection.clone();
        let page = match hub.index().look(move |index| index.ports(&wanted)).await {
            Ok(page) => page,
            Err(error) => {
                // The client may have gone as well.
                drop(outbox.send(Err(error.into())).await);
                return false;
            }
        };
        let services = page.ports.iter().map(|view| views::service(hub.store(), view));
        message.services = services.collect();
        selection.after = page.ports.last().map(|view| view.port.key.clone());
        if !page.more {
            let head = *hub.store().head().borrow();
            // Before the source has been read, a snapshot lacks what is there.
            message.complete = head.synced;
            message.revision = if head.synced { head.revision } else { 0 };
        }
        if outbox.send(Ok(std::mem::take(&mut message))).await.is_err() {
            return false;
        }
        if !page.more {
            return true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_name_any_port_and_nothing_else() {
        for (port_name, protocol, family) in [
            ("", Protocol::Tcp, Family::V4),
            ("http", Protocol::Udp, Family::V6),
            ("dns", Protocol::Sctp, Family::V4),
        ] {
            let key = ServiceKey::from(KeyParts {
                service: ServiceName::new("shop", "web"),
                port_name: port_name.into(),
                protocol,
                family,
            });
            assert_eq!(read_token(&token(&key)), Some(key));
        }
        for wrong in [
            "",
            "shop",
            "shop/web",
            "shop/web//TCP/5",
            "shop/web//X/4",
            "a/b/c/TCP/4/e",
        ] {
            assert_eq!(read_token(wrong), None, "{wrong}");
        }
    }
}
