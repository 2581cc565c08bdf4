//! A snapshot of the cluster, as far as a migration is concerned with it.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use kplane_proto::v1 as pb;

use super::affinity;
use super::pods::PodState;
use super::record::{ANNOTATION, Record};
use super::{KPLANE, LABEL, RETURNING};

/// Backends that use kube-proxy's names in the kernel.
const SHARE_NAMES: [&str; 2] = ["iptables", "ipvs"];

/// The objects that a snapshot is made of.
#[derive(Clone, Debug, Default)]
pub(crate) struct Objects {
    /// kube-proxy's DaemonSet.
    pub(crate) kube_proxy: Option<DaemonSet>,
    /// kube-proxy's mode, if its configuration was found.
    pub(crate) mode: Option<String>,
    /// Whether kube-proxy's DaemonSet was saved before it was deleted.
    pub(crate) saved: bool,
    /// The agents' DaemonSet.
    pub(crate) agents: Option<DaemonSet>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) kube_proxy_pods: Vec<Pod>,
    pub(crate) agent_pods: Vec<Pod>,
    pub(crate) cleanup_pods: Vec<Pod>,
    /// What the control plane knows, or why it did not answer.
    pub(crate) fleet: Option<Result<pb::Fleet, String>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) kube_proxy: Option<KubeProxy>,
    pub(crate) mode: Option<String>,
    pub(crate) saved: bool,
    pub(crate) agents: Option<Agents>,
    /// Why nothing is known from the control plane.
    pub(crate) plane_error: Option<String>,
    /// Sorted by name.
    pub(crate) nodes: Vec<NodeSnapshot>,
}

/// kube-proxy's DaemonSet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KubeProxy {
    /// Whether no pod of it runs on nodes of kplane.
    pub(crate) keeps_off: bool,
    /// The migration; `None` if none has begun.
    pub(crate) record: Option<Record>,
}

/// The agents' DaemonSet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Agents {
    /// Whether agents run on nodes of kplane only.
    pub(crate) limited: bool,
    /// The Helm release, if there is one.
    pub(crate) release: Option<String>,
}

/// The value of a node's label.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mark {
    #[default]
    None,
    Kplane,
    Returning,
    /// A value that is not kplane's.
    Other(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeSnapshot {
    pub(crate) name: String,
    pub(crate) mark: Mark,
    /// Whether kubelet reports that the node works.
    pub(crate) ready: bool,
    pub(crate) linux: bool,
    pub(crate) kube_proxy: PodState,
    pub(crate) agent: PodState,
    /// The pod that removes kplane's rules.
    pub(crate) cleanup: PodState,
    /// What the control plane knows of the agent.
    pub(crate) served: Option<Served>,
}

/// The state of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) state: pb::NodeState,
    /// Whether the agent has read all families back from the kernel since it started, and found them equal.
    pub(crate) verified: bool,
    pub(crate) error: String,
    pub(crate) backend: String,
}

impl Served {
    /// Returns whether the backend uses kube-proxy's names in the kernel.
    pub(crate) fn shares_names(&self) -> bool {
        shares_names(&self.backend)
    }
}

/// Returns whether a backend, or a mode, uses kube-proxy's names in the kernel.
pub(crate) fn shares_names(backend: &str) -> bool {
    SHARE_NAMES.contains(&backend)
}

impl From<&pb::NodeStatus> for Served {
    fn from(node: &pb::NodeStatus) -> Self {
        let families = node.report.iter().flat_map(|report| &report.families);
        let verified: Vec<bool> = families
            .map(|f| f.programmed && f.verified_at_ms > 0 && !f.verification_overdue)
            .collect();
        Self {
            state: node.state(),
            verified: !verified.is_empty() && verified.iter().all(|verified| *verified),
            error: node.last_error.clone(),
            backend: node.backend.clone(),
        }
    }
}

impl From<&Objects> for Snapshot {
    fn from(objects: &Objects) -> Self {
        let pods = [
            (&objects.kube_proxy, &objects.kube_proxy_pods),
            (&objects.agents, &objects.agent_pods),
        ];
        let [kube_proxy, agents] = pods.map(|(set, pods)| by_node(pods, uid(set.as_ref())));
        let cleanups = by_node(&objects.cleanup_pods, None);
        let (fleet, plane_error) = match &objects.fleet {
            Some(Ok(fleet)) => (fleet.nodes.as_slice(), None),
            Some(Err(error)) => (&[][..], Some(error.clone())),
            None => (&[][..], None),
        };
        let served: BTreeMap<&str, &pb::NodeStatus> =
            fleet.iter().map(|node| (node.name.as_str(), node)).collect();
        let of = |pods: &BTreeMap<String, PodState>, name: &str| {
            pods.get(name).cloned().unwrap_or_default()
        };
        let mut nodes: Vec<NodeSnapshot> = objects
            .nodes
            .iter()
            .map(|node| {
                let name = node.metadata.name.clone().unwrap_or_default();
                NodeSnapshot {
                    mark: mark(node),
                    ready: is_ready(node),
                    linux: is_linux(node),
                    kube_proxy: of(&kube_proxy, &name),
                    agent: of(&agents, &name),
                    cleanup: of(&cleanups, &name),
                    served: served.get(name.as_str()).map(|node| Served::from(*node)),
                    name,
                }
            })
            .collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        Self {
            kube_proxy: objects.kube_proxy.as_ref().map(KubeProxy::from),
            mode: objects.mode.clone(),
            saved: objects.saved,
            agents: objects.agents.as_ref().map(Agents::from),
            plane_error,
            nodes,
        }
    }
}

impl From<&DaemonSet> for KubeProxy {
    fn from(set: &DaemonSet) -> Self {
        let annotations = set.metadata.annotations.as_ref();
        Self {
            keeps_off: affinity::keeps_off(selector(set)),
            record: annotations.and_then(|all| all.get(ANNOTATION)).map(|text| Record::parse(text)),
        }
    }
}

impl From<&DaemonSet> for Agents {
    fn from(set: &DaemonSet) -> Self {
        let annotations = set.metadata.annotations.as_ref();
        Self {
            limited: affinity::is_limited(selector(set)),
            release: annotations.and_then(|all| all.get("meta.helm.sh/release-name")).cloned(),
        }
    }
}

fn selector(set: &DaemonSet) -> Option<&k8s_openapi::api::core::v1::NodeSelector> {
    let template = set.spec.template.spec.as_ref()?;
    affinity::required(template.affinity.as_ref())
}

fn uid(set: Option<&DaemonSet>) -> Option<&str> {
    set?.metadata.uid.as_deref()
}

/// Returns the state of the pods on each node. With an owner, others' pods do not count.
fn by_node(pods: &[Pod], owner: Option<&str>) -> BTreeMap<String, PodState> {
    let mut states = BTreeMap::new();
    let owned = |pod: &&Pod| {
        owner.is_none_or(|owner| {
            pod.metadata
                .owner_references
                .iter()
                .flatten()
                .into_iter()
                .any(|of| of.uid == owner)
        })
    };
    for pod in pods.iter().filter(owned) {
        let Some(node) = node_of(pod) else {
            continue;
        };
        let state: &mut PodState = states.entry(node).or_default();
        *state = std::mem::take(state).or(PodState::of(pod));
    }
    states
}

/// Returns the node of a pod of a DaemonSet, also before the scheduler has bound the pod.
fn node_of(pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    if let Some(node) = &spec.node_name {
        return Some(node.clone());
    }
    let terms = &affinity::required(spec.affinity.as_ref())?.node_selector_terms;
    let mut fields = terms.iter().filter_map(|term| term.match_fields.as_ref());
    let name = fields.find_map(|fields| fields.iter().find(|field| field.key == "metadata.name"));
    name?.values.as_ref()?.first().cloned()
}

fn mark(node: &Node) -> Mark {
    let labels = node.metadata.labels.as_ref();
    match labels.and_then(|labels| labels.get(LABEL)).map(String::as_str) {
        None => Mark::None,
        Some(KPLANE) => Mark::Kplane,
        Some(RETURNING) => Mark::Returning,
        Some(other) => Mark::Other(other.to_owned()),
    }
}

fn is_ready(node: &Node) -> bool {
    node.status
        .iter()
        .flat_map(|status| &status.conditions)
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Returns whether the node runs Pods of DaemonSets for Linux. A node of virtual-kubelet or of AWS Fargate is no machine,
/// and has no rules that anybody programs.
fn is_linux(node: &Node) -> bool {
    let label = |name: &str| node.metadata.labels.as_ref()?.get(name).map(String::as_str);
    let is_virtual = label("type") == Some("virtual-kubelet")
        || label("eks.amazonaws.com/compute-type") == Some("fargate");
    label("kubernetes.io/os").is_none_or(|os| os == "linux") && !is_virtual
}

impl Snapshot {
    pub(crate) fn node(&self, name: &str) -> Option<&NodeSnapshot> {
        self.nodes.iter().find(|node| node.name == name)
    }

    /// Returns the migration.
    pub(crate) fn record(&self) -> Option<&Record> {
        self.kube_proxy.as_ref()?.record.as_ref()
    }
}
