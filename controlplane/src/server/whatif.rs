//! What would change if some objects were applied: what `kpctl whatif` shows. The index, the planner and the backends work
//! it out as for a real change, on copies.

use std::collections::BTreeMap;
use std::time::SystemTime;

use kplane_dataplane::backend::Kind;
use kplane_dataplane::plan::{NodePlan, NodeSettings, ServicePlan, plan_service};
use kplane_model::{Family, LocalEndpoints, NodeFacts, NodeName, ServiceKey, ServiceProgram};
use kplane_proto::v1 as pb;
use tokio::sync::Semaphore;
use tonic::Status;

use super::closing;
use super::issues::Issues;
use super::pages::Picture;
use crate::fleet::label;
use crate::hub::Hub;
use crate::index::{Index, WhatIf, WouldChange};
use crate::peers::{Collected, Peers};
use crate::publish::Published;
use crate::source::manifests::parse;

/// Largest manifests, in bytes.
const MANIFESTS: usize = 1 << 20;
/// Maximum number of ServicePorts in an answer.
const PORTS: usize = 1_000;
/// Maximum number of classes of nodes.
const CLASSES: usize = 32;
/// Maximum number of Services whose address is not chosen.
const UNASSIGNED: usize = 100;
/// Maximum number of ServicePorts that a backend would leave out.
const LEFT_OUT: usize = 16;
/// Longest text of a backend, in bytes.
const TEXT: usize = 300;

/// The right to make a copy of the index: one at a time, since it may take as much memory as the index.
static TURN: Semaphore = Semaphore::const_new(1);

/// Works out what objects would change.
pub(super) async fn what_if(
    hub: &Hub,
    peers: Option<&Peers>,
    request: pb::WhatIfRequest,
) -> Result<pb::WhatIfAnswer, Status> {
    if request.manifests.len() > MANIFESTS {
        return Err(Status::invalid_argument(format!(
            "the manifests have {} bytes, and {MANIFESTS} are the limit: ask for a part of them",
            request.manifests.len()
        )));
    }
    let busy = "another question about a change that might be is answered: try again in a second";
    let _turn = TURN
        .try_acquire()
        .map_err(|_| Status::resource_exhausted(busy))?;
    let index = hub.copy().await.map_err(closing)?;
    let index = index.ok_or_else(|| {
        Status::failed_precondition(
            "this control plane is a relay and does not read objects: ask the control plane that it relays",
        )
    })?;
    if !index.is_synced() {
        let text = "the source is not read completely yet: kpctl status says how far it is";
        return Err(Status::failed_precondition(text));
    }
    let others = match peers {
        Some(peers) => peers.nodes().await,
        None => std::sync::Arc::new(Collected::default()),
    };
    let fleet = Classes::of(hub, &others);
    // Texts from outside are parsed, and plans are made, where they hold up nobody.
    let work = move || answer(*index, request.manifests, fleet);
    let answered = tokio::task::spawn_blocking(work).await;
    answered.map_err(|_| Status::internal("the answer could not be worked out: see the log"))
}

fn answer(index: Index, manifests: Vec<u8>, fleet: Classes) -> pb::WhatIfAnswer {
    let loaded = parse(manifests);
    let objects = loaded.objects.len() as u64;
    let refused = Issues::bounded(&loaded.issues).listed;
    let result = index.what_if(loaded.objects, SystemTime::now());
    let ports = result.ports.iter().take(PORTS).map(port);
    pb::WhatIfAnswer {
        objects,
        ports: ports.collect(),
        more: result.ports.len().saturating_sub(PORTS) as u64,
        classes: fleet.costs(&result),
        refused,
        new_issues: Issues::bounded(&result.new_issues).listed,
        ended_issues: Issues::bounded(&result.ended_issues).listed,
        unassigned: result
            .unassigned
            .iter()
            .take(UNASSIGNED)
            .map(ToString::to_string)
            .collect(),
    }
}

fn port(change: &WouldChange) -> pb::WhatIfPort {
    let count = |published: &Option<Published>| {
        let published = published.as_ref();
        published.map_or(0, |published| published.variants.default.len() as u64)
    };
    let kind = match (&change.before, &change.after) {
        (None, _) => pb::WhatIfChange::New,
        (Some(_), Some(_)) => pb::WhatIfChange::Changed,
        (Some(_), None) => pb::WhatIfChange::Gone,
    };
    pb::WhatIfPort {
        key: Some((&change.key).into()),
        change: kind.into(),
        endpoints_before: count(&change.before),
        endpoints_after: count(&change.after),
    }
}

/// Nodes by backend and zone.
#[derive(Debug, Default)]
struct Classes {
    by_kind: BTreeMap<(String, String), Class>,
}

#[derive(Debug, Default)]
struct Class {
    nodes: Vec<NodeName>,
    /// The latest changes: operations and microseconds.
    syncs: Vec<(u64, u64)>,
}

impl Classes {
    fn of(hub: &Hub, others: &Collected) -> Self {
        let mut classes = Self::default();
        let picture = Picture::with(hub, others);
        for (name, node) in picture.nodes() {
            let status = picture.status(name, node);
            let class = (label(&status.backend, TEXT), label(&status.zone, TEXT));
            let class = classes.by_kind.entry(class).or_default();
            class.nodes.push(name.clone());
            let sync = status.report.and_then(|report| report.last_sync);
            let sync = sync.filter(|sync| sync.operations > 0 && sync.total_us > 0);
            class
                .syncs
                .extend(sync.map(|sync| (sync.operations, sync.total_us)));
        }
        classes
    }

    /// Returns the cost of each class, the largest classes first.
    fn costs(self, result: &WhatIf) -> Vec<pb::WhatIfClass> {
        let facts: BTreeMap<&str, &NodeFacts> = result
            .nodes
            .iter()
            .map(|node| (&*node.name, node))
            .collect();
        let mut classes: Vec<_> = self.by_kind.into_iter().collect();
        classes.sort_by_key(|(_, class)| std::cmp::Reverse(class.nodes.len()));
        let classes = classes.into_iter().take(CLASSES);
        classes
            .map(|((backend, zone), class)| class.cost(backend, zone, &facts, result))
            .collect()
    }
}

impl Class {
    fn cost(
        mut self,
        backend: String,
        zone: String,
        facts: &BTreeMap<&str, &NodeFacts>,
        result: &WhatIf,
    ) -> pb::WhatIfClass {
        let node = self.busiest(result);
        let unknown = NodeFacts::default();
        let facts = facts.get(&*node).copied().unwrap_or(&unknown);
        let mut class = pb::WhatIfClass {
            backend,
            zone,
            nodes: self.nodes.len() as u64,
            node: node.to_string(),
            ..pb::WhatIfClass::default()
        };
        let Some(kind) = Kind::named(&class.backend) else {
            class.error = "no agent is known that would apply the change".to_owned();
            return class;
        };
        for family in Family::ALL {
            let plan = NodePlan::new(family, facts, &NodeSettings::default());
            let (before, after) = plans(result, family, facts);
            if before.is_empty() && after.is_empty() {
                continue;
            }
            match kind.dry_run(family, &plan, &before, &after) {
                Ok(run) => {
                    class.operations += run.operations;
                    class.bytes += run.bytes;
                    let rules = run.rules.map(|rules| rules + class.rules.unwrap_or(0));
                    class.rules = rules.or(class.rules);
                    let room = LEFT_OUT.saturating_sub(class.left_out.len());
                    let left_out = run.refused.iter().take(room);
                    class
                        .left_out
                        .extend(left_out.map(|(key, reason)| pb::ObjectFailure {
                            key: Some(key.into()),
                            reason: label(reason, TEXT),
                            ..pb::ObjectFailure::default()
                        }));
                }
                Err(error) => class.error = label(&error, TEXT),
            }
        }
        class.estimate_us = self.estimate(class.operations);
        class
    }

    /// Returns the node with most of the endpoints concerned: where a policy is Local, it has most to do.
    fn busiest(&self, result: &WhatIf) -> NodeName {
        let endpoints = |node: &NodeName| -> usize {
            let published = result.ports.iter();
            let published = published.flat_map(|port| [&port.before, &port.after]);
            let local = published.flatten().filter_map(|of| of.local.get(node));
            local.map(Vec::len).sum()
        };
        let busiest = self.nodes.iter().rev().max_by_key(|node| endpoints(node));
        busiest.cloned().unwrap_or_else(|| "".into())
    }

    /// Returns how long the operations take, by the median of the latest changes.
    fn estimate(&mut self, operations: u64) -> u64 {
        self.syncs.sort_unstable_by_key(|(_, took)| *took);
        let median = self.syncs.get(self.syncs.len() / 2);
        match median {
            Some((of, took)) if operations > *of => took.saturating_mul(operations) / of,
            Some((_, took)) if operations > 0 => *took,
            _ => 0,
        }
    }
}

/// What a node holds of the ServicePorts that would change, and the change.
fn plans(result: &WhatIf, family: Family, node: &NodeFacts) -> (Vec<Planned>, Vec<Planned>) {
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for change in result.ports.iter().filter(|port| port.key.family == family) {
        let plan = |published: &Published| plan(published, node);
        if let Some(published) = &change.before {
            before.push((change.key.clone(), Some(plan(published))));
        }
        after.push((change.key.clone(), change.after.as_ref().map(plan)));
    }
    (before, after)
}

/// A ServicePort with its plan.
type Planned = (ServiceKey, Option<ServicePlan>);

fn plan(published: &Published, node: &NodeFacts) -> ServicePlan {
    let variants = &published.variants;
    let endpoints = variants.resolve(&node.name, node.zone.as_deref());
    let program = ServiceProgram {
        endpoints: endpoints.to_vec(),
        has_any: variants.has_any,
        serving_others: variants.serving_others(endpoints, 1),
        port: published.port.clone(),
    };
    let local = published.local.get(&node.name);
    let local = local.map(|endpoints| LocalEndpoints {
        key: published.port.key.clone(),
        endpoints: endpoints.clone(),
    });
    plan_service(&program, local.as_ref(), node)
}
