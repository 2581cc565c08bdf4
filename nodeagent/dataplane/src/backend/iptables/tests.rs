//! Tests of the pure modules, and their helpers.

mod compare;
mod golden;
mod order;
mod properties;
mod sample;
mod sizes;
mod walk;

use std::time::SystemTime;

use kplane_desired_state::index::Index;
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::publish::{Publication, Published};
use kplane_desired_state::source::manifests::parse;
use kplane_desired_state::source::{Batch, Event};
use kplane_model::{Family, LocalEndpoints, NodeFacts, ServiceKey, ServiceProgram};

use super::restore::{Limits, parts};
use super::*;
use crate::backend::Change;
use crate::plan::{NodePlan, NodeSettings, ServicePlan, plan_service};

/// Plans by ServicePort.
type Plans = Vec<(ServiceKey, Option<ServicePlan>)>;

/// The node of all tests.
const NODE: &str = "n1";

/// Returns the plans for the node that the control plane makes of manifests.
fn plans(manifests: &str, family: Family) -> Plans {
    let publication = publication(manifests);
    let node = node(&publication);
    let plan = |(key, published): &(ServiceKey, Option<Published>)| {
        let published = published.as_ref()?;
        (key.family == family).then(|| (key.clone(), Some(plan(published, &node))))
    };
    publication.services.iter().filter_map(plan).collect()
}

fn publication(manifests: &str) -> Publication {
    let loaded = parse(manifests.as_bytes().to_vec());
    assert_eq!(loaded.issues, []);
    let mut events: Vec<Event> = Kind::ALL.into_iter().map(Event::Init).collect();
    let objects = loaded.objects.into_iter();
    events.extend(objects.map(|object| Event::InitApply(Box::new(object))));
    events.extend(Kind::ALL.into_iter().map(Event::InitDone));
    let batch = Batch {
        events,
        observed_at: SystemTime::UNIX_EPOCH,
    };
    let outcome = Index::default().apply(batch);
    outcome.publication.unwrap()
}

fn node(publication: &Publication) -> NodeFacts {
    let node = publication.nodes.iter().find(|node| &*node.name == NODE);
    node.cloned().unwrap_or_else(|| NodeFacts {
        name: NODE.into(),
        ..NodeFacts::default()
    })
}

fn plan(published: &Published, node: &NodeFacts) -> ServicePlan {
    let endpoints = published.variants.resolve(NODE, None);
    let program = ServiceProgram {
        endpoints: endpoints.to_vec(),
        has_any: published.variants.has_any,
        serving_others: published.variants.serving_others(endpoints, 1),
        dead: published.dead.clone(),
        port: published.port.clone(),
    };
    let local = published.local.get(NODE).map(|endpoints| LocalEndpoints {
        key: published.port.key.clone(),
        endpoints: endpoints.clone(),
    });
    plan_service(&program, local.as_ref(), node)
}

/// A node that serves node ports on all its addresses, as kube-proxy does in this mode.
fn node_plan(family: Family, settings: &NodeSettings) -> NodePlan {
    let everything = Family::ALL.map(Cidr::everything);
    let settings = NodeSettings {
        nodeport_addresses: everything.into(),
        ..settings.clone()
    };
    NodePlan::new(family, &NodeFacts::default(), &settings)
}

fn pods() -> NodeSettings {
    NodeSettings {
        cluster_cidrs: ["10.244.0.0/16", "fd24::/16"].map(|range| range.parse().unwrap()).into(),
        ..NodeSettings::default()
    }
}

fn change<'a>(
    family: Family,
    node: &'a NodePlan,
    services: &'a Plans,
    complete: bool,
) -> Change<'a> {
    Change {
        family,
        node,
        services,
        complete,
    }
}

/// A ruleset with its rules as text, as a kernel would hold it. StagedRules changes are executed.
struct HeldChain {
    ruleset: Ruleset,
    kernel: walk::Kernel,
}

impl HeldChain {
    fn new(settings: RuleSettings) -> Self {
        Self {
            ruleset: Ruleset::new(settings),
            kernel: walk::Kernel::default(),
        }
    }

    /// Executes a change, and checks that the kernel's rules are those of the ruleset.
    fn apply(&mut self, change: Change<'_>) -> StagedRules {
        self.apply_with(change, Limits::LEGACY)
    }

    fn apply_with(&mut self, change: Change<'_>, limits: Limits) -> StagedRules {
        let mut staged = self.ruleset.stage(change);
        for step in &staged.steps {
            for part in parts(step, limits) {
                self.kernel.restore(&part);
            }
        }
        let copy = StagedRules {
            steps: std::mem::take(&mut staged.steps),
            failures: staged.failures.clone(),
            after: ruleset::After::default(),
        };
        self.ruleset.accept(staged);
        assert_eq!(self.ruleset.difference(&self.kernel.found()), None);
        copy
    }
}
