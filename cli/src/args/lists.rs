//! The arguments of `kpctl get` and `kpctl describe`.

mod proxied;

use clap::{Args, Subcommand};
use kplane_model::{PolicyName, ServiceName};

pub(crate) use self::proxied::ProxiedArgs;
use super::WatchArgs;
use super::drops::DropsArgs;
use super::flows::FlowsArgs;
use super::graph::GraphArgs;
use super::kinds::KindArgs;
use super::names::{node_name, policy_name, service_name};
use crate::jsonpath::Path;
use kplane_view::nodes::NodeStateView;

/// The kinds of objects to list.
#[derive(Debug, Subcommand)]
pub(crate) enum GetCommand {
    /// Services with addresses, ports and how many endpoints are ready
    #[command(
        visible_alias = "svc",
        alias = "service",
        after_help = "\
READY counts the endpoints of the port that has the fewest. A Service with two families has two
lines.

Examples:
  kpctl get services
  kpctl get service shop/web
  kpctl get svc -n shop -o wide
  kpctl get svc --sort-by ports[0].readyEndpoints    those without ready endpoints first
  kpctl get services --bad                           those with an error or a warning, errors first
  kpctl get svc --no-headers | wc -l
  kpctl get svc -o yaml"
    )]
    Services(ServicesArgs),
    /// Endpoints with their node and state
    #[command(
        visible_alias = "ep",
        alias = "endpoint",
        after_help = "\
States:
  Ready        gets new connections
  Draining     shutting down, still answers: used when no other endpoint is ready
  Terminating  shutting down, does not answer
  NotReady     not used
  Published    not ready or shutting down, and used: the Service has publishNotReadyAddresses

Examples:
  kpctl get endpoints
  kpctl get endpoints shop/web
  kpctl get ep -n shop -w
  kpctl get ep --node node-1    endpoints on this node
  kpctl get ep -o wide          with topology hints"
    )]
    Endpoints(ListArgs),
    /// Nodes with their agent's version, zone and addresses
    #[command(
        visible_alias = "no",
        alias = "node",
        after_help = "\
Examples:
  kpctl get nodes
  kpctl get node node-1
  kpctl get nodes --state Failing,Disconnected
  kpctl get nodes --sort-by revisions.lag
  kpctl get no -o wide          with pod CIDRs, peer address, round trip"
    )]
    Nodes(NodesArgs),
    /// NetworkPolicies with their directions and how many Pods each selects
    #[command(
        visible_alias = "netpol",
        alias = "policy",
        after_help = "\
TYPES are the directions for which a policy isolates its Pods, or has rules if it is a
ClusterNetworkPolicy: these have a tier and no namespace. The control plane must run with
--network-policy.

Examples:
  kpctl get policies
  kpctl get policies -n shop
  kpctl get netpol --sort-by pods -o wide
  kpctl get policies -o name"
    )]
    Policies(PoliciesArgs),
    /// Pods with connections that NetworkPolicies denied, or each packet as it is denied
    #[command(after_help = super::drops::HELP)]
    Drops(DropsArgs),
    /// Who is connected to a Service, on all nodes
    #[command(alias = "flow", after_help = super::flows::HELP)]
    Flows(FlowsArgs),
    /// Who talked to whom through Services in the last hour, and how many connections failed
    #[command(after_help = super::graph::HELP)]
    Graph(GraphArgs),
    /// Connections and endpoints of a Service in the userspace proxies, asked of the nodes
    #[command(after_help = proxied::HELP)]
    Proxied(ProxiedArgs),
    /// A kind that the API declares.
    #[command(flatten)]
    Declared(KindArgs),
}

/// Options of the list of Services.
#[derive(Args, Debug)]
pub(crate) struct ServicesArgs {
    #[command(flatten)]
    pub(crate) list: ListArgs,
    /// Only Services with an error or a warning, errors first; the column FINDING has its name
    #[arg(long, conflicts_with = "watch")]
    pub(crate) bad: bool,
}

/// Options of lists of namespaced objects.
#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// Only this Service: NAMESPACE/NAME, or NAME in the namespace of -n, else in `default`
    #[arg(value_name = "SERVICE", conflicts_with = "all_namespaces")]
    service: Option<String>,
    /// Only this namespace
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// All namespaces (the default)
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Only Services with an endpoint on this node, or the endpoints on it
    #[arg(long)]
    pub(crate) node: Option<String>,
    #[command(flatten)]
    pub(crate) rows: RowArgs,
    #[command(flatten)]
    pub(crate) watch: WatchArgs,
}

impl ListArgs {
    /// Returns the only Service to list, or the error in its name.
    pub(crate) fn name(&self) -> Result<Option<ServiceName>, clap::Error> {
        let namespace = self.namespace.as_deref();
        let service = self.service.as_deref();
        service.map(|service| service_name(service, namespace)).transpose()
    }
}

/// Options of the list of NetworkPolicies.
#[derive(Args, Debug)]
pub(crate) struct PoliciesArgs {
    /// Only this namespace
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// All namespaces (the default)
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    #[command(flatten)]
    pub(crate) rows: RowArgs,
}

/// Options of the list of nodes.
#[derive(Args, Debug)]
pub(crate) struct NodesArgs {
    /// Only this node
    #[arg(value_name = "NODE", value_parser = node_name)]
    pub(crate) node: Option<String>,
    /// Only nodes in these states, as in the column STATE
    #[arg(
        long = "state",
        value_enum,
        value_name = "STATE",
        value_delimiter = ','
    )]
    #[arg(ignore_case = true)]
    pub(crate) states: Vec<NodeStateView>,
    /// Only nodes in this zone
    #[arg(long)]
    pub(crate) zone: Option<String>,
    #[command(flatten)]
    pub(crate) rows: RowArgs,
    #[command(flatten)]
    pub(crate) watch: WatchArgs,
}

/// Options of the rows of a table.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct RowArgs {
    /// No line with the titles of columns
    #[arg(long)]
    pub(crate) no_headers: bool,
    /// Sort by this field of -o json, such as name or revisions.lag
    #[arg(long, value_name = "FIELD")]
    pub(crate) sort_by: Option<Path>,
}

/// The kinds of objects to describe.
#[derive(Debug, Subcommand)]
pub(crate) enum DescribeCommand {
    /// A Service: ports, policies, endpoints, and what every node holds of it
    #[command(
        visible_alias = "svc",
        alias = "services",
        after_help = "\
NODES counts the nodes for which the endpoint is chosen. CLUSTER and LOCAL count the endpoints that
are chosen for a node under each traffic policy; -o wide lists them.

Examples:
  kpctl describe service shop/web
  kpctl describe service shop/web --all    every node
  kpctl describe svc web -n shop
  kpctl describe svc kubernetes     in namespace default"
    )]
    Service(ServiceArgs),
    /// A NetworkPolicy: its rules in words, and the Pods that it selects
    #[command(
        visible_alias = "netpol",
        alias = "policies",
        after_help = "\
Rules are in the order of spec.ingress and spec.egress, and `kpctl why` names them so. The first
100 Pods are listed: 20 of them in a table, all with -o wide. Needs the right to get /kplane/policies.

Examples:
  kpctl describe policy shop/web
  kpctl describe policy deny-egress      a ClusterNetworkPolicy
  kpctl describe netpol web -n shop -o json | jq '.ingress'"
    )]
    Policy(PolicyArgs),
    /// A node: its agent, what it holds, what fails there, and what stands in the way of packets
    #[command(
        visible_alias = "no",
        alias = "nodes",
        after_help = "\
Findings are about the node itself: forwarding that is off, chains of other programs that drop
packets, a full connection tracking table, a range of Pods that the configuration does not have.

Examples:
  kpctl describe node node-1
  kpctl describe node node-1 -o json | jq '.node.findings'"
    )]
    Node {
        /// The node's name
        #[arg(value_parser = node_name)]
        node: String,
    },
}

/// Names a Service.
#[derive(Args, Debug)]
pub(crate) struct ServiceArgs {
    /// NAMESPACE/NAME, or NAME in the namespace of -n, else in `default`
    #[arg(value_name = "SERVICE")]
    pub(super) service: String,
    /// The namespace
    #[arg(short, long)]
    pub(super) namespace: Option<String>,
    /// List every node, also those that hold the Service and those with the same problem
    #[arg(long)]
    pub(crate) all: bool,
}

impl ServiceArgs {
    /// Returns the Service, or the error in its name.
    pub(crate) fn name(&self) -> Result<ServiceName, clap::Error> {
        service_name(&self.service, self.namespace.as_deref())
    }
}

/// Names a NetworkPolicy.
#[derive(Args, Debug)]
pub(crate) struct PolicyArgs {
    /// NAMESPACE/NAME, or NAME in the namespace of -n; else a ClusterNetworkPolicy, or NAME in `default`
    #[arg(value_name = "POLICY")]
    policy: String,
    /// The namespace
    #[arg(short, long)]
    namespace: Option<String>,
}

impl PolicyArgs {
    /// Returns the policy, or the error in its name.
    pub(crate) fn name(&self) -> Result<PolicyName, clap::Error> {
        policy_name(&self.policy, self.namespace.as_deref())
    }
}
