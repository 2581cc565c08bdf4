//! The source of desired state, and its flags.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use kplane_desired_state::admission::{AllowedExternalIps, Enforce, Proxying, ReservedPlace};
use kplane_desired_state::convert::ExternalIps;
use kplane_desired_state::inside::{InProcess, Origin};
use kplane_desired_state::kubernetes::Access;
use kplane_desired_state::source::kubernetes;
use kplane_model::{Cidr, ProxyNamespaces};
use kplane_tls::{ClientFiles, is_this_machine};
use kplane_util::dial::AGENT_PORT;
use tonic::transport::{Endpoint, Uri};

use super::Problem;
use crate::desired::folder_id;

/// Default address at which a standalone agent serves its status.
const STATUS_ADDRESS: &str = "127.0.0.1:7466";

/// Heading of the flags without a control plane.
const STANDALONE: &str = "Without a control plane";

/// The source of desired state.
#[derive(Clone, Debug)]
pub enum Source {
    /// Replicas of a control plane.
    ControlPlane {
        /// Their addresses.
        endpoints: Vec<Endpoint>,
        /// A file with more addresses, which may change.
        list: Option<PathBuf>,
        /// Files for TLS; `None` = plain text.
        tls: Option<ClientFiles>,
        /// Name that the control planes' certificate must have, in place of the host of their address.
        server_name: Option<String>,
        /// File with the agent's token, if it has one.
        token: Option<PathBuf>,
    },
    /// A control plane that already runs in this process.
    InProcess(InProcess),
    /// A control plane that the agent itself starts.
    Standalone {
        /// The origin of the control plane's objects.
        origin: Origin,
        /// The address of its status API; `None` = none.
        status: Option<SocketAddr>,
        /// The external addresses that Services may have.
        external_ips: ExternalIps,
        /// Further places that no Service gets.
        reserved: Vec<ReservedPlace>,
        /// Places on nodes that Services may have although programs of nodes usually listen there.
        excepted: Vec<ReservedPlace>,
        /// The Services that may ask for the userspace proxy.
        proxying: Proxying,
        /// What the operator says of NetworkPolicies; `None` = nothing.
        network_policies: Option<Enforce>,
    },
}

impl Source {
    /// Returns whether this process reads the Kubernetes API.
    pub(super) fn reads_the_api(&self) -> bool {
        let origin = match self {
            Self::Standalone { origin, .. } => Some(origin),
            Self::ControlPlane { .. } | Self::InProcess(_) => None,
        };
        matches!(origin, Some(Origin::Kubernetes(_)))
    }

    /// Returns the identity of a folder of manifests. A control plane names its cluster when it answers.
    pub(crate) fn id(&self) -> Option<String> {
        match self {
            Self::Standalone {
                origin: Origin::Manifests(path),
                ..
            } => Some(folder_id(path)),
            Self::Standalone { .. } | Self::ControlPlane { .. } | Self::InProcess(_) => None,
        }
    }
}

/// The settings for the Kubernetes API from kube-proxy's flags and file.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ApiFlags<'a> {
    /// The kubeconfig; empty for none.
    pub(super) kubeconfig: &'a str,
    /// Whether it was given on the command line.
    pub(super) explicit: bool,
    /// The server's address; empty for none.
    pub(super) master: &'a str,
    /// The server's address from the environment; empty for none.
    pub(super) server: &'a str,
}

impl ApiFlags<'_> {
    /// Returns how to reach the API, by kube-proxy's rules. If neither setting is given, the agent uses
    /// the cluster of its pod. The address from the environment is used with the credentials of either.
    pub(super) fn access(self) -> Access {
        let given = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let (master, server) = (given(self.master), given(self.server));
        match (self.kubeconfig, master) {
            ("", None) => Access::InCluster { master: server },
            ("", Some(master)) => Access::Anonymous { master },
            (file, master) => Access::Kubeconfig {
                file: file.into(),
                master: master.or(server),
            },
        }
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "With a control plane")]
pub(super) struct SourceFlags {
    /// Addresses of the control plane's replicas, such as `https://kplane.example:7465`, separated by commas. A name
    /// stands for all its addresses. Each agent has its own order of the replicas: when one fails, the agent connects to
    /// the next.
    #[arg(long, value_name = "ADDR", value_delimiter = ',')]
    #[arg(env = "KPLANE_CONTROL_PLANE", hide_env = true)]
    control_plane: Vec<String>,

    /// File with addresses of replicas, ADDRESS or ADDRESS:PORT, separated by commas or white space: the key
    /// `addresses` of the ConfigMap kplane-replicas, which control planes in a cluster keep. The agent reads the file
    /// again whenever it looks for replicas.
    #[arg(long, value_name = "FILE", requires = "tls_server_name")]
    #[arg(env = "KPLANE_CONTROL_PLANE_FILE", hide_env = true)]
    control_plane_file: Option<PathBuf>,

    #[command(flatten)]
    identity: IdentityFlags,

    /// Run without a control plane, as kube-proxy does: read the Kubernetes API (--kubeconfig, or else the cluster
    /// in whose pod the agent runs), or --manifests.
    #[arg(long, help_heading = STANDALONE)]
    standalone: bool,

    /// Folder or file of Kubernetes YAML or JSON for --standalone. The agent applies changes at once.
    #[arg(long, value_name = "PATH", help_heading = STANDALONE)]
    manifests: Option<PathBuf>,

    /// Whether Services may have externalIPs, for --standalone [default: true]. On addresses of nodes, Services get no port
    /// below 1024, nor ports of etcd and other programs that nodes usually have. A list instead of `true` names those
    /// that they may have: 80,443 on all nodes, 192.0.2.1:53 on one.
    #[arg(long, value_name = "BOOL|[ADDR:]PORTS", help_heading = STANDALONE)]
    allow_external_ips: Option<AllowedExternalIps>,

    /// Ranges that may contain externalIPs, separated by commas, for --standalone [default: all].
    #[arg(long, value_name = "CIDR", value_delimiter = ',', help_heading = STANDALONE)]
    external_ip_cidr: Vec<String>,

    /// Further ports that no Service may use, for --standalone, separated by commas: 22 or 2379-2380 on the
    /// addresses of nodes and as node ports, 192.0.2.1:6443 on one address. The agent's own ports, those of
    /// kubelet (10248, 10250), of the control plane and of the API server are always reserved.
    #[arg(long, value_name = "[ADDR:]PORTS", value_delimiter = ',', help_heading = STANDALONE)]
    reserved_ports: Vec<String>,

    /// Namespaces whose Services may ask for the userspace proxy by annotations, for --standalone: none, all, or their
    /// names, separated by commas [default: all in the userspace backends, else none].
    #[arg(long, value_name = "NAMESPACES", help_heading = STANDALONE)]
    userspace_services: Option<ProxyNamespaces>,

    /// Enforce NetworkPolicies (on, also without a value), or none (off), for --standalone. Without this flag, the agent keeps
    /// those that it has.
    #[arg(long, value_name = "ENFORCE", value_enum, num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "on", help_heading = STANDALONE)]
    network_policy: Option<Enforce>,

    /// Address on which --standalone serves its status for kpctl; empty = none [default: 127.0.0.1:7466].
    #[arg(long, value_name = "ADDR", help_heading = STANDALONE)]
    status_bind_address: Option<String>,
}

/// Flags about TLS on the way to the control plane.
#[derive(Debug, Args)]
struct IdentityFlags {
    /// Authorities that issue the control plane's certificate (PEM). Required for an https:// address. This file and
    /// those below are read again when they change.
    #[arg(
        long,
        value_name = "FILE",
        env = "KPLANE_CERTIFICATE_AUTHORITY",
        hide_env = true
    )]
    certificate_authority: Option<PathBuf>,

    /// Name that the control plane's certificate must have, in place of the host in --control-plane. The certificates
    /// that a control plane in a cluster makes itself have kplane-controlplane.NAMESPACE.svc.
    #[arg(long, value_name = "NAME", requires = "certificate_authority")]
    tls_server_name: Option<String>,

    /// Certificate of this node, with the subject CN=system:node:NAME, O=system:nodes: one of
    /// `kp-controlplane certs node`, or kubelet's own.
    #[arg(long, value_name = "FILE", requires = "client_key")]
    client_certificate: Option<PathBuf>,

    /// Private key of --client-certificate; may be the same file.
    #[arg(long, value_name = "FILE", requires = "client_certificate")]
    client_key: Option<PathBuf>,

    /// File with a token of this agent, in place of a certificate: a projected ServiceAccount token with the audience
    /// "kplane", or one that --token-auth-file of the control plane lists. The file is read again when it changes.
    #[arg(
        long,
        value_name = "FILE",
        env = "KPLANE_TOKEN_FILE",
        hide_env = true,
        conflicts_with = "client_certificate"
    )]
    token_file: Option<PathBuf>,

    /// Connect in plain text to a control plane on another machine, which lets a machine on the way change what this
    /// node programs. With --standalone: allow a --status-bind-address that other machines reach.
    #[arg(long)]
    insecure: bool,
}

impl IdentityFlags {
    /// Returns the scheme of addresses that have none.
    fn scheme(&self) -> &'static str {
        match self.certificate_authority {
            Some(_) => "https",
            None => "http",
        }
    }

    /// Returns the files for TLS to these control planes; `None` = plain text.
    /// The replicas of a list always have TLS.
    fn check(
        &self,
        endpoints: &[Endpoint],
        with_list: bool,
    ) -> Result<Option<ClientFiles>, Problem> {
        let wrong = |reason: String| Err(Problem::general(reason));
        let is_secure = |endpoint: &&Endpoint| endpoint.uri().scheme_str() == Some("https");
        let secure = endpoints.iter().filter(is_secure).count();
        if secure > 0 && secure < endpoints.len() {
            return wrong(
                "--control-plane has both http:// and https:// addresses: use https:// for all"
                    .into(),
            );
        }
        let files = ClientFiles::of_options(
            self.certificate_authority.as_ref(),
            self.client_certificate.as_ref(),
            self.client_key.as_ref(),
        );
        let is_elsewhere =
            |endpoint: &&Endpoint| !is_this_machine(endpoint.uri().host().unwrap_or_default());
        let elsewhere = endpoints.iter().find(is_elsewhere);
        match (&files, secure > 0, elsewhere) {
            _ if with_list && secure == endpoints.len() => Ok(files),
            _ if self.token_file.is_some() && secure == 0 => {
                wrong("--token-file is for a --control-plane with https://: plain text would show it on the network".into())
            }
            (Some(_), false, _) => {
                wrong("--certificate-authority is for a --control-plane with https://".into())
            }
            (None, true, _) => wrong(
                "--control-plane https:// needs --certificate-authority FILE, and --client-certificate and \
                 --client-key, or --token-file, to prove which node this is"
                    .into(),
            ),
            (None, false, Some(endpoint)) if !self.insecure => wrong(format!(
                "--control-plane {} is plain text to another machine: use https:// with --certificate-authority, \
                 --client-certificate and --client-key, or allow it with --insecure",
                endpoint.uri()
            )),
            _ => Ok(files),
        }
    }

    /// Checks the address of the status API of `--standalone`, which has no TLS.
    fn check_status(&self, status: Option<SocketAddr>) -> Result<Option<SocketAddr>, Problem> {
        match status.filter(|status| !status.ip().is_loopback() && !self.insecure) {
            None => Ok(status),
            Some(exposed) => Err(Problem::new(
                "--status-bind-address",
                exposed.to_string(),
                "serves other machines in plain text: use a loopback address, or allow it with --insecure",
            )),
        }
    }
}

impl SourceFlags {
    /// Returns the source that the flags name.
    pub(super) fn check(
        &self,
        api: ApiFlags<'_>,
        own_mark: u32,
        proxying: Proxying,
    ) -> Result<Source, Problem> {
        let wrong = |reason| Err(Problem::general(reason));
        match (self.standalone, &self.manifests) {
            (false, Some(_)) => wrong("--manifests is for --standalone: give both, or neither"),
            (true, _) if self.has_control_plane() => wrong(
                "--standalone is a control plane itself: leave --control-plane out, and --control-plane-file",
            ),
            (true, Some(_)) if api.explicit => {
                wrong("--manifests and --kubeconfig are two sources: leave one of them out")
            }
            (true, manifests) => {
                let origin = match manifests {
                    Some(manifests) => {
                        readable(manifests)?;
                        Origin::Manifests(manifests.clone())
                    }
                    None => Origin::Kubernetes(kubernetes::Config {
                        access: api.access(),
                        own_mark,
                        network_policies: self.network_policy == Some(Enforce::On),
                        watch_pods: false,
                    }),
                };
                let status = self.status_bind_address.as_deref().unwrap_or(STATUS_ADDRESS);
                Ok(Source::Standalone {
                    origin,
                    status: self
                        .identity
                        .check_status(address("--status-bind-address", status)?)?,
                    external_ips: self.external_ips()?,
                    reserved: self.reserved()?,
                    excepted: self.excepted(),
                    proxying: self.proxying(proxying),
                    network_policies: self.network_policy,
                })
            }
            (false, None) if self.status_bind_address.is_some() => {
                wrong("--status-bind-address is for --standalone: the control plane has the status")
            }
            (false, None) if self.has_admission() => wrong(
                "--allow-external-ips, --external-ip-cidr, --reserved-ports, --userspace-services and \
                     --network-policy are for --standalone: give them to the control plane",
            ),
            (false, None) if !self.has_control_plane() => wrong(
                "no source of desired state: give --control-plane http://HOST:7465, or --standalone \
                 with --kubeconfig FILE or --manifests DIR",
            ),
            (false, None) => {
                let scheme = self.identity.scheme();
                let endpoints: Vec<Endpoint> = self
                    .control_plane
                    .iter()
                    .map(|text| endpoint(text, scheme))
                    .collect::<Result<_, _>>()?;
                let tls = self.identity.check(&endpoints, self.control_plane_file.is_some())?;
                let token = self.identity.token_file.clone();
                let server_name = self.identity.tls_server_name.clone();
                Ok(Source::ControlPlane {
                    endpoints,
                    list: self.control_plane_file.clone(),
                    tls,
                    server_name,
                    token,
                })
            }
        }
    }

    /// Returns whether the flags name replicas of a control plane.
    fn has_control_plane(&self) -> bool {
        !self.control_plane.is_empty() || self.control_plane_file.is_some()
    }

    /// Returns whether the flags limit what Services may have.
    fn has_admission(&self) -> bool {
        self.allow_external_ips.is_some()
            || !self.external_ip_cidr.is_empty()
            || !self.reserved_ports.is_empty()
            || self.userspace_services.is_some()
            || self.network_policy.is_some()
    }

    /// Returns what Services may ask of the userspace proxy; `default` counts without a flag.
    fn proxying(&self, default: Proxying) -> Proxying {
        let services = self.userspace_services.clone();
        Proxying {
            services: services.unwrap_or(default.services),
            ..default
        }
    }

    /// Returns the external addresses that Services may have (A5).
    fn external_ips(&self) -> Result<ExternalIps, Problem> {
        let ranges =
            self.external_ip_cidr.iter().map(|text| cidr(text)).collect::<Result<_, _>>()?;
        let allowed = self.allow_external_ips.as_ref();
        let allowed = allowed.is_none_or(|allowed| allowed.allowed);
        Ok(ExternalIps::new(allowed, ranges))
    }

    /// Returns the places on nodes that Services may have.
    fn excepted(&self) -> Vec<ReservedPlace> {
        let allowed = self.allow_external_ips.as_ref();
        allowed.map_or(Vec::new(), |allowed| allowed.on_nodes.clone())
    }

    /// Returns the further places that no Service gets.
    fn reserved(&self) -> Result<Vec<ReservedPlace>, Problem> {
        self.reserved_ports.iter().map(place).collect()
    }
}

fn place(text: &String) -> Result<ReservedPlace, Problem> {
    let parsed = text.parse::<ReservedPlace>();
    parsed.map_err(|error| Problem::new("--reserved-ports", text, error.to_string()))
}

fn cidr(text: &str) -> Result<Cidr, Problem> {
    let reason = "not an address range such as 192.0.2.0/24 or 2001:db8::/32";
    let parsed = text.parse();
    parsed.map_err(|_| Problem::new("--external-ip-cidr", text, reason))
}

/// Checks that the manifests exist; `-` is standard input.
fn readable(manifests: &Path) -> Result<(), Problem> {
    match std::fs::metadata(manifests) {
        Err(error) if manifests != Path::new("-") => {
            let text = manifests.to_string_lossy();
            Err(Problem::new("--manifests", text, error.to_string()))
        }
        _ => Ok(()),
    }
}

fn address(flag: &str, text: &str) -> Result<Option<SocketAddr>, Problem> {
    if text.is_empty() {
        return Ok(None);
    }
    let reason = "must be an address and port such as 127.0.0.1:7466 or [::1]:7466";
    text.parse().map(Some).map_err(|_| Problem::new(flag, text, reason))
}

/// Parses the address of a control plane; `scheme` is for an address without one.
fn endpoint(text: &str, scheme: &str) -> Result<Endpoint, Problem> {
    let wrong = |reason: &str| Problem::new("--control-plane", text, reason);
    let example = "must be an address such as https://kplane.example:7465";
    let url = if text.contains("://") {
        text.to_owned()
    } else {
        format!("{scheme}://{text}")
    };
    let uri: Uri = url.parse().map_err(|_| wrong(example))?;
    match (uri.scheme_str(), uri.host(), uri.path()) {
        (Some(scheme @ ("http" | "https")), Some(host), "" | "/") if !host.is_empty() => {
            let port = uri.port_u16().unwrap_or(AGENT_PORT);
            let whole = format!("{scheme}://{host}:{port}");
            Endpoint::from_shared(whole).map_err(|_| wrong(example))
        }
        _ => Err(wrong(example)),
    }
}
