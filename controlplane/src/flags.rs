//! Flags of the program `kp-controlplane`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::{ArgAction, ArgGroup, Parser, ValueEnum};
use kplane_agents::certs;
use kplane_agents::connection_limits::Limits;
use kplane_agents::peers::PeerFlags;
use kplane_agents::suspects;
use kplane_desired_state::admission::{
    Admission, AllowedExternalIps, Enforce, Proxying, Reserved, ReservedPlace, own_addresses,
};
use kplane_desired_state::convert::ExternalIps;
use kplane_desired_state::index::{CliffGuard, Guarded};
use kplane_desired_state::kubernetes::Access;
use kplane_desired_state::source::kubernetes;
use kplane_model::{Cidr, ProxyEndpoints, ProxyNamespaces};
use kplane_util::dial::{AGENT_PORT, parse_mark};

use crate::app::{self, Origin, Protection, StateFlags, TlsFlags};

/// kplane's control plane: reads Services once and streams every node's desired state.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(group = ArgGroup::new("source").required(true).multiple(true)
    .args(["manifests", "kubeconfig", "in_cluster", "check"]))]
pub struct Args {
    /// A task other than serving.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Folder or file of Kubernetes YAML or JSON, or - for standard input: Services,
    /// EndpointSlices, Nodes, ServiceCIDRs. Changes are picked up at once.
    #[arg(
        long,
        value_name = "PATH",
        help_heading = SOURCE,
        conflicts_with_all = ["kubeconfig", "in_cluster", "check"]
    )]
    manifests: Option<PathBuf>,

    /// The Kubernetes API server that a kubeconfig file names, by its current context.
    #[arg(
        long,
        value_name = "FILE",
        help_heading = SOURCE,
        conflicts_with_all = ["in_cluster", "check"]
    )]
    kubeconfig: Option<PathBuf>,

    /// The Kubernetes API server of the cluster in whose pod this runs.
    #[arg(
        long,
        help_heading = SOURCE,
        conflicts_with = "check"
    )]
    in_cluster: bool,

    /// Address of the API server, instead of the kubeconfig's, or of the ClusterIP that a pod gets from its
    /// environment: kplane itself serves that ClusterIP, so it does not work after a reboot.
    #[arg(long, value_name = "URL", env = "KPLANE_API_SERVER", hide_env = true, help_heading = API)]
    #[arg(conflicts_with_all = ["manifests", "check"])]
    master: Option<String>,

    /// Check a folder or file of manifests, print its problems, and exit: with 0 if it has none, with 1 if
    /// something in it would not be served.
    #[arg(long, value_name = "PATH", help_heading = "Instead of serving")]
    pub check: Option<PathBuf>,

    /// Address on which the control plane serves node agents [default: 0.0.0.0:7465; without TLS 127.0.0.1:7465]
    #[arg(long, value_name = "ADDR", help_heading = PORTS)]
    agent_listen: Option<SocketAddr>,

    /// Address on which the control plane serves kpctl and other tools.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7466", help_heading = PORTS)]
    status_listen: SocketAddr,

    /// Address of /livez, /readyz and /metrics; these show no objects.
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:7467", help_heading = PORTS)]
    http_listen: SocketAddr,

    /// Serve /livez, /readyz and /metrics inside TLS, with the certificate of the other ports.
    #[arg(long, help_heading = PORTS)]
    http_tls: bool,

    #[command(flatten)]
    tls: TlsFlags,

    #[command(flatten)]
    peers: PeerFlags,

    /// Node on which this replica runs, such as $(NODE_NAME). Agents prefer replicas in the zone of their own Node.
    #[arg(long, value_name = "NODE", help_heading = "Other replicas")]
    on_node: Option<String>,

    /// Name that people gave the cluster, such as prod-eu: the page has it on each sheet and in the title of each window.
    #[arg(long, value_name = "NAME", value_parser = parse_cluster_name)]
    cluster_name: Option<String>,

    /// Maximum number of connections of agents. Lowered if the limit of open files does not allow as many.
    #[arg(long, value_name = "N", default_value_t = Limits::AGENTS.connections, help_heading = LIMITS)]
    max_connections: usize,

    /// Maximum number of connections of agents from one IPv4 address, or from one IPv6 /64. Agents behind NAT
    /// share an address.
    #[arg(long, value_name = "N", default_value_t = Limits::AGENTS.per_address, help_heading = LIMITS)]
    max_connections_per_address: usize,

    /// Maximum number of TLS handshakes a second with agents from one IPv4 address, or from one IPv6 /64. Further ones
    /// are closed at once, and agents try again.
    #[arg(long, value_name = "N", default_value_t = Limits::AGENTS.handshakes_per_second, help_heading = LIMITS)]
    max_handshakes_per_second: u32,

    /// Maximum number of snapshots of the desired state that the control plane begins a second. Further agents that need
    /// one are asked to come back later. Agents that still hold what they must hold need none.
    #[arg(long, value_name = "N", default_value_t = Limits::AGENTS.snapshots_per_second, help_heading = LIMITS)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    max_snapshots_per_second: u32,

    /// Longest time in which agents leave, in seconds, after SIGTERM or SIGINT. They leave in waves, to another replica
    /// if there is one. A second signal ends the control plane at once.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, help_heading = PROCESS)]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=600))]
    pub drain: u64,

    /// Whether Services may have externalIPs; like AllowServiceExternalIPs of kube-proxy. On addresses of nodes, Services
    /// get no port below 1024, nor ports of etcd and other programs that nodes usually have. A list instead of `true` names
    /// those that they may have: 80,443 on all nodes, 192.0.2.1:53 on one.
    #[arg(long, value_name = "BOOL|[ADDR:]PORTS", default_value = "true", help_heading = ADMISSION)]
    allow_external_ips: AllowedExternalIps,

    /// Ranges that may contain externalIPs, separated by commas; other externalIPs are refused [default: all].
    #[arg(long, value_name = "CIDR", value_delimiter = ',', help_heading = ADMISSION)]
    external_ip_cidr: Vec<Cidr>,

    /// Further ports that no Service may use, separated by commas: 22 or 2379-2380 on the addresses of nodes
    /// and as node ports, 192.0.2.1:6443 on one address. The ports above, those of agents (10249, 10256), of
    /// kubelet (10248, 10250) and of the API server are always reserved, and on addresses of nodes those that
    /// `--allow-external-ips` names.
    #[arg(long, value_name = "[ADDR:]PORTS", value_delimiter = ',', help_heading = ADMISSION)]
    reserved_ports: Vec<ReservedPlace>,

    /// Maximum number of elements that the Services of one namespace may need on every node: for each Service
    /// its ports x addresses x endpoints. Younger Services that do not fit are refused; 0 = no limit. A single
    /// Service never gets more than 262144.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = ADMISSION)]
    namespace_elements: usize,

    /// Namespaces whose Services may ask for the agents' userspace proxy by annotations: none, all, or their names,
    /// separated by commas. The proxy connects to endpoints with the node's own rights on the network.
    #[arg(long, value_name = "NAMESPACES", default_value = "none", help_heading = ADMISSION)]
    userspace_services: ProxyNamespaces,

    /// Endpoints to which the proxy may connect for these Services: pods (in the pod ranges of Nodes), any, or the ranges
    /// of all Pods, separated by commas.
    #[arg(long, value_name = "ENDPOINTS", default_value = "pods", help_heading = ADMISSION)]
    userspace_endpoints: ProxyEndpoints,

    /// Have nodes enforce NetworkPolicies (on, also without a value), or none (off). Without this flag, nodes that enforce
    /// some keep those that they have. With on, each agent must know them: the control plane serves no older ones then. It
    /// needs to list and watch networkpolicies, namespaces and pods.
    #[arg(long, value_name = "ENFORCE", value_enum, num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "on", help_heading = ADMISSION)]
    network_policy: Option<Enforce>,

    /// Watch Pods, too, as --network-policy on does. An endpoint counts as terminating as soon as its Pod is being deleted; its
    /// EndpointSlice says so a little later, and often too late: the Pod refuses connections by then.
    #[arg(long, help_heading = API)]
    watch_pods: bool,

    /// Packet mark of the control plane's own connections to the API server. Rules of an agent on the same node
    /// do not apply to this mark. Must be the agent's --own-mark; 0 = none.
    #[arg(long, value_name = "MARK", default_value = "0x50", value_parser = parse_mark, help_heading = API)]
    own_mark: u32,

    /// Deletions that the control plane holds back when one step deletes too many Services. It holds them until
    /// the objects are back, a second list of the API server confirms the step, or you run `kpctl approve`.
    #[arg(long, value_enum, default_value = "absence", help_heading = CLIFF_GUARD)]
    cliff_guard: Guarded,

    /// Share of the Services that a step may delete, or leave without any endpoint, before it is held back.
    #[arg(long, value_name = "PERCENT", default_value_t = 30, help_heading = CLIFF_GUARD)]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=100))]
    cliff_guard_share: u8,

    /// Number of Services below which a step is never held back.
    #[arg(long, value_name = "SERVICES", default_value_t = 10, help_heading = CLIFF_GUARD)]
    cliff_guard_minimum: usize,

    /// Whether the control plane writes Kubernetes events: about Services that cannot be served, nodes without
    /// an agent, and agents that fail. Needs the rights create and patch for events.events.k8s.io.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set, help_heading = API)]
    events: bool,

    /// Take the taint kplane.io/not-ready:NoSchedule from a Node when its agent's data path works, and put it back when
    /// it does not. kubelet or a cluster autoscaler puts the taint on new Nodes; agents need --canary-service. Needs the
    /// rights get and patch for nodes.
    #[arg(long, help_heading = API)]
    startup_taint: bool,

    /// What to do about a Node whose agent is silent and that neighbours do not reach either: observe says what act would
    /// do, act gives its endpoints new connections only where no other endpoint is ready. Agents then say twice in three
    /// seconds that they are alive.
    #[arg(long, value_enum, default_value = "observe", value_name = "MODE", help_heading = DEAD_NODES)]
    dead_node: suspects::Mode,

    /// What to do about established connections to endpoints on a Node that has been suspected for 10 s, with --dead-node
    /// act: end lets clients know with their next packet, keep leaves them to their own timeouts.
    #[arg(long, value_enum, default_value = "end", value_name = "WHAT", help_heading = DEAD_NODES)]
    dead_connections: suspects::Connections,

    #[command(flatten)]
    state: StateFlags,

    /// Format of log lines.
    #[arg(long, value_enum, default_value_t = LogFormat::Text, help_heading = PROCESS)]
    pub log_format: LogFormat,
}

/// The tasks of this program other than serving.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Make certificates for a cluster without an authority of its own
    #[command(subcommand)]
    Certs(certs::Command),
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LogFormat {
    /// Human-readable.
    Text,
    /// One JSON object a line.
    Json,
}

impl Args {
    /// Returns the configuration of the control plane that serves.
    pub fn config(&self) -> app::Config {
        app::Config {
            source_id: None,
            only_node: None,
            source: self.origin(),
            agent_listen: Some(self.agent_listen()),
            status_listen: Some(self.status_listen),
            http_listen: Some(self.http_listen),
            http_tls: self.http_tls,
            protection: self.tls.protection(self.in_cluster),
            identity: self.tls.identity(),
            agent_limits: self.agent_limits(),
            admission: self.admission(),
            cliff_guard: self.cliff_guard(),
            events: self.events,
            startup_taint: self.startup_taint,
            dead_node: self.dead_node,
            dead_connections: self.dead_connections,
            peers: self.peers.clone().config(self.own_mark),
            own_node: self.on_node.as_deref().map(Into::into),
            cluster_name: self.cluster_name.clone(),
            state: Some(self.state.state(self.tls.certificates_in.clone())),
        }
    }

    /// Returns whether agents on other machines cannot connect, because there are no certificates and no address was
    /// given.
    pub fn is_local_by_default(&self) -> bool {
        self.agent_listen.is_none() && self.agent_listen().ip().is_loopback()
    }

    /// Returns the origin of the objects; clap ensures that there is exactly one.
    fn origin(&self) -> Origin {
        if let Some(path) = &self.manifests {
            return Origin::Manifests(path.clone());
        }
        Origin::Kubernetes(kubernetes::Config {
            access: self.access(),
            own_mark: self.own_mark,
            network_policies: self.network_policy == Some(Enforce::On),
            watch_pods: self.watch_pods,
        })
    }

    /// Returns the access to the API server.
    fn access(&self) -> Access {
        // An empty environment variable counts as unset.
        let master = self.master.clone().filter(|master| !master.is_empty());
        match self.kubeconfig.clone() {
            Some(file) => Access::Kubeconfig { file, master },
            None => Access::InCluster { master },
        }
    }

    /// Returns the address for agents. Plain text stays on this machine unless the operator says otherwise.
    fn agent_listen(&self) -> SocketAddr {
        let default = match self.tls.protection(self.in_cluster) {
            Protection::PlainText { exposed: false } => Ipv4Addr::LOCALHOST,
            _ => Ipv4Addr::UNSPECIFIED,
        };
        let default = SocketAddr::from((default, AGENT_PORT));
        self.agent_listen.unwrap_or(default)
    }

    fn agent_limits(&self) -> Limits {
        Limits {
            connections: self.max_connections,
            per_address: self.max_connections_per_address,
            handshakes_per_second: self.max_handshakes_per_second,
            snapshots_per_second: self.max_snapshots_per_second,
            ..Limits::AGENTS
        }
    }

    /// Returns what the control plane lets Services claim.
    pub fn admission(&self) -> Admission {
        let listeners = [self.agent_listen(), self.status_listen, self.http_listen];
        let reserved = Reserved::new(&listeners, &own_addresses());
        let allowed = &self.allow_external_ips;
        Admission {
            external_ips: ExternalIps::new(allowed.allowed, self.external_ip_cidr.clone()),
            reserved: reserved.with_listed(&self.reserved_ports).except(&allowed.on_nodes),
            namespace_elements: self.namespace_elements,
            proxying: Proxying {
                services: self.userspace_services.clone(),
                endpoints: self.userspace_endpoints.clone(),
            },
            network_policies: self.network_policy,
            watch_pods: self.watch_pods,
        }
    }

    fn cliff_guard(&self) -> CliffGuard {
        CliffGuard {
            deletions: self.cliff_guard,
            share: self.cliff_guard_share,
            minimum: self.cliff_guard_minimum,
        }
    }
}

// Headings of `--help`. Each flag names its own: the heading of a flattened struct goes on behind that struct.
/// Largest number of characters of a cluster's name: that of a label's value.
const MAX_CLUSTER_NAME: usize = 63;

const SOURCE: &str = "Where objects come from (one of these)";
const API: &str = "The Kubernetes API";
const PORTS: &str = "Ports";
const LIMITS: &str = "Limits on clients";
const ADMISSION: &str = "What Services may have";
const CLIFF_GUARD: &str = "Deletions of many Services at once";
const DEAD_NODES: &str = "Dead nodes";
const PROCESS: &str = "The process";

const EXAMPLES: &str = "\
Examples:
  Serve a folder of YAML:
    kp-controlplane --manifests deploy/demo
  Serve a cluster:
    kp-controlplane --kubeconfig /etc/kplane/kubeconfig
  Serve the current objects of a cluster:
    kubectl get svc,endpointslices,nodes,servicecidrs -A -o yaml | kp-controlplane --manifests -
  Check a folder before it goes live:
    kp-controlplane --check deploy/demo
  Serve agents and kpctl with TLS:
    kp-controlplane certs init certs --host kplane.example --host 192.0.2.10
    kp-controlplane certs node certs node-1 node-2
    kp-controlplane certs user certs alice --admin
    kp-controlplane --manifests deploy/demo --tls-cert-file certs/server.crt \
      --tls-private-key-file certs/server.key --client-ca-file certs/ca.crt

Environment:
  RUST_LOG           what is logged, such as debug or
                     kplane_agents=debug,kplane_desired_state=debug (default: info)
  KPLANE_API_SERVER  as --master";

/// Returns a name of a cluster that fits into a title.
fn parse_cluster_name(text: &str) -> Result<String, String> {
    let is_short = text.chars().count() <= MAX_CLUSTER_NAME;
    if is_short && !text.trim().is_empty() {
        Ok(text.to_owned())
    } else {
        Err(format!("a name has 1 to {MAX_CLUSTER_NAME} characters"))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_flag_stands_under_a_heading() {
        let command = Args::command();
        let without = command
            .get_arguments()
            .filter(|arg| !arg.is_hide_set())
            .filter(|arg| arg.get_help_heading().is_none());
        assert_eq!(
            Vec::from_iter(without.map(clap::Arg::get_id)),
            Vec::<&clap::Id>::new()
        );
    }

    /// Ports of programs that run on nodes beside a control plane, as docs/security.md lists them.
    const OTHERS: [u16; 4] = [7443, 7444, 7445, 7447];

    #[test]
    fn the_default_ports_belong_to_no_other_program() {
        let args = Args::try_parse_from(["kp-controlplane", "--manifests", "."]).unwrap();
        let all = [args.agent_listen(), args.status_listen, args.http_listen]
            .map(|address| address.port());
        assert_eq!(all, [7465, 7466, 7467]);
        assert!(all.iter().all(|port| !OTHERS.contains(port)));
    }

    #[test]
    fn an_address_of_the_api_server_counts_in_a_pod_too() {
        let server = "https://192.0.2.1:6443";
        let args = |source: &[&str]| {
            let words = ["kp-controlplane", "--master", server];
            Args::try_parse_from(words.iter().chain(source))
        };
        let access = |source| match args(source).unwrap().origin() {
            Origin::Kubernetes(config) => config.access,
            other => panic!("{other:?}"),
        };
        let master = Some(server.to_owned());
        let file = "config".into();
        assert_eq!(
            access(&["--kubeconfig", "config"]),
            Access::Kubeconfig {
                file,
                master: master.clone()
            }
        );
        assert_eq!(access(&["--in-cluster"]), Access::InCluster { master });
        let refused = args(&["--manifests", "folder"]).unwrap_err().to_string();
        assert!(refused.contains("--master"), "{refused}");
    }
}
