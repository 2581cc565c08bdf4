//! Flags, and the configuration that they mean once they are checked.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::{ArgAction, Parser, ValueEnum};
use kp_controlplane::convert::ExternalIps;
use kplane_model::{Cidr, Family, NodeName};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::backend;
use crate::plan::NodeSettings;

/// Port of a control plane when an address names none.
const CONTROL_PLANE_PORT: u16 = 7443;

/// Where a standalone agent serves its status.
const STATUS_ADDRESS: &str = "127.0.0.1:7444";

/// Longest name of a node: a DNS subdomain.
const MAX_NODE_NAME: usize = 253;

const EXAMPLES: &str = "\
Examples:
  Serve this node as a control plane says:
    kp-nodeagent --control-plane http://kplane.example:7443
  Serve this node from a folder of YAML, without any cluster:
    kp-nodeagent --standalone --manifests deploy/demo
  Remove everything that kplane put into the kernel, and what kube-proxy left there:
    kp-nodeagent --cleanup

The rules stay in the kernel when the agent stops; --cleanup removes them.

Environment:
  RUST_LOG  what is logged, such as debug or kp_nodeagent=debug (default: info)";

/// kplane's node agent: puts desired state into the kernel and reports what it holds.
#[derive(Debug, Parser)]
#[command(name = "kp-nodeagent", version, after_help = EXAMPLES)]
pub struct Flags {
    /// The node's name, as in its Node object [default: the host's name].
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<String>,

    /// A control plane, such as `http://kplane.example:7443`. Give it several times for replicas:
    /// when one fails the next is asked.
    #[arg(long, value_name = "ADDR")]
    control_plane: Vec<String>,

    /// Be the control plane of this node as well: reads --manifests, needs nothing else.
    #[arg(long)]
    standalone: bool,

    /// Folder or file of Kubernetes YAML or JSON for --standalone. Changes are picked up at once.
    #[arg(long, value_name = "PATH")]
    manifests: Option<PathBuf>,

    /// Whether Services may have externalIPs at all, for --standalone [default: true].
    #[arg(long, value_name = "BOOL")]
    allow_external_ips: Option<bool>,

    /// Ranges in which externalIPs must be, separated by commas, for --standalone [default: all].
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    external_ip_cidr: Vec<String>,

    /// What puts the rules into the kernel.
    #[arg(long, value_enum, default_value = "nftables")]
    backend: backend::Kind,

    /// Address ranges of the cluster's pods, separated by commas: tells pods from other clients.
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    cluster_cidr: Vec<String>,

    /// Masquerade all traffic to ClusterIPs.
    #[arg(long)]
    masquerade_all: bool,

    /// Bit of the packet mark that asks for masquerading.
    #[arg(long, value_name = "0-31", default_value = "14")]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=31))]
    masquerade_bit: u8,

    /// Own addresses that serve node ports: ranges separated by commas, `primary` for the node's
    /// address, or `all`.
    #[arg(
        long,
        value_name = "CIDR",
        value_delimiter = ',',
        default_value = "primary"
    )]
    nodeport_addresses: Vec<String>,

    /// Where /healthz and /livez are served; empty = nowhere.
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:10256")]
    healthz_bind_address: String,

    /// Where --standalone serves its status for kpctl; empty = nowhere [default: 127.0.0.1:7444].
    #[arg(long, value_name = "ADDR")]
    status_bind_address: Option<String>,

    /// Remove everything of ours and everything that kube-proxy left from the kernel, and exit.
    /// Safe to repeat.
    #[arg(long)]
    cleanup: bool,

    /// How log lines look.
    #[arg(long, value_enum, default_value = "text")]
    pub log_format: LogFormat,

    /// Log more; twice for even more.
    #[arg(short, action = ArgAction::Count)]
    pub verbose: u8,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What the program is asked to do.
#[derive(Clone, Debug)]
pub enum Task {
    /// Be an agent.
    Run(Box<Config>),
    /// Remove what an agent left.
    Cleanup(backend::Kind, backend::Settings),
}

/// A running agent's configuration, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// The node.
    pub node_name: NodeName,
    /// Where desired state comes from.
    pub source: Source,
    /// What puts it into the kernel.
    pub backend: backend::Kind,
    /// Settings of the backend.
    pub backend_settings: backend::Settings,
    /// Settings that shape the plans.
    pub node_settings: NodeSettings,
    /// Where health checks are answered; `None` = nowhere.
    pub healthz: Option<SocketAddr>,
}

/// Where desired state comes from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Replicas of a control plane.
    ControlPlane(Vec<Endpoint>),
    /// A control plane that runs in this process already.
    InProcess(Channel),
    /// A control plane of the agent's own.
    Standalone {
        /// Folder or file of manifests.
        manifests: PathBuf,
        /// Where its status API is served; `None` = nowhere.
        status: Option<SocketAddr>,
        /// Which external addresses Services may have.
        external_ips: ExternalIps,
    },
}

/// Flags that make no sense. One line, with what to do about it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The value of one flag.
    #[error("--{flag} {value}: {reason}")]
    Value {
        /// Without dashes.
        flag: &'static str,
        /// As given.
        value: String,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// Flags that do not go together.
    #[error("{0}")]
    Combination(&'static str),
    /// Neither named nor to be found.
    #[error("the host's name cannot be read ({0}): give --node-name")]
    HostName(String),
}

impl ConfigError {
    fn value(flag: &'static str, value: &str, reason: impl Into<String>) -> Self {
        Self::Value {
            flag,
            value: format!("{value:?}"),
            reason: reason.into(),
        }
    }
}

impl Flags {
    /// What the flags mean.
    ///
    /// # Errors
    /// [`ConfigError`] for the first flag that makes no sense.
    pub fn check(self) -> Result<Task, ConfigError> {
        let backend_settings = backend::Settings {
            masquerade_bit: self.masquerade_bit,
        };
        if self.cleanup {
            return Ok(Task::Cleanup(self.backend, backend_settings));
        }
        let node_settings = NodeSettings {
            cluster_cidrs: cidrs("cluster-cidr", &self.cluster_cidr)?,
            masquerade_all: self.masquerade_all,
            nodeport_addresses: nodeport_addresses(&self.nodeport_addresses)?,
        };
        let healthz = address("healthz-bind-address", &self.healthz_bind_address)?;
        let config = Config {
            source: self.source()?,
            node_name: node_name(self.node_name)?,
            backend: self.backend,
            backend_settings,
            node_settings,
            healthz,
        };
        Ok(Task::Run(Box::new(config)))
    }

    fn source(&self) -> Result<Source, ConfigError> {
        let wrong = |reason| Err(ConfigError::Combination(reason));
        match (self.standalone, &self.manifests) {
            (false, Some(_)) => wrong("--manifests is for --standalone: give both, or neither"),
            (true, None) => wrong("--standalone needs --manifests with a folder of YAML"),
            (true, Some(_)) if !self.control_plane.is_empty() => {
                wrong("--standalone is a control plane itself: leave --control-plane out")
            }
            (true, Some(manifests)) => {
                readable(manifests)?;
                let status = self
                    .status_bind_address
                    .as_deref()
                    .unwrap_or(STATUS_ADDRESS);
                Ok(Source::Standalone {
                    manifests: manifests.clone(),
                    status: address("status-bind-address", status)?,
                    external_ips: ExternalIps::new(
                        self.allow_external_ips.unwrap_or(true),
                        cidrs("external-ip-cidr", &self.external_ip_cidr)?,
                    ),
                })
            }
            (false, None) if self.status_bind_address.is_some() => {
                wrong("--status-bind-address is for --standalone: the control plane has the status")
            }
            (false, None)
                if self.allow_external_ips.is_some() || !self.external_ip_cidr.is_empty() =>
            {
                wrong(
                    "--allow-external-ips and --external-ip-cidr are for --standalone: give them \
                     to the control plane",
                )
            }
            (false, None) if self.control_plane.is_empty() => wrong(
                "no source of desired state: give --control-plane http://HOST:7443, or \
                 --standalone --manifests DIR",
            ),
            (false, None) => {
                let endpoints = self.control_plane.iter().map(|text| endpoint(text));
                Ok(Source::ControlPlane(endpoints.collect::<Result<_, _>>()?))
            }
        }
    }
}

/// A folder that is not there is a wrong configuration; `-` is standard input.
fn readable(manifests: &Path) -> Result<(), ConfigError> {
    match std::fs::metadata(manifests) {
        Err(error) if manifests != Path::new("-") => {
            let text = manifests.to_string_lossy();
            Err(ConfigError::value("manifests", &text, error.to_string()))
        }
        _ => Ok(()),
    }
}

fn address(flag: &'static str, text: &str) -> Result<Option<SocketAddr>, ConfigError> {
    if text.is_empty() {
        return Ok(None);
    }
    let parsed = text.parse().map(Some);
    parsed.map_err(|_| {
        ConfigError::value(
            flag,
            text,
            "not an address and port such as 0.0.0.0:10256 or [::]:10256",
        )
    })
}

fn cidrs(flag: &'static str, texts: &[String]) -> Result<Vec<Cidr>, ConfigError> {
    let texts = texts.iter().filter(|text| !text.is_empty());
    texts
        .map(|text| {
            let parsed: Result<Cidr, _> = text.parse();
            parsed.map_err(|_| {
                ConfigError::value(
                    flag,
                    text,
                    "not an address range such as 10.0.0.0/8 or fd00::/8",
                )
            })
        })
        .collect()
}

/// Empty means the node's own address (A21).
fn nodeport_addresses(texts: &[String]) -> Result<Vec<Cidr>, ConfigError> {
    let flag = "nodeport-addresses";
    match texts {
        [word] if word == "primary" => Ok(Vec::new()),
        [word] if word == "all" => Ok(Family::ALL.map(Cidr::everything).to_vec()),
        _ => match texts
            .iter()
            .find(|text| *text == "primary" || *text == "all")
        {
            Some(word) => Err(ConfigError::value(
                flag,
                word,
                "stands alone, without ranges",
            )),
            None => cidrs(flag, texts),
        },
    }
}

fn endpoint(text: &str) -> Result<Endpoint, ConfigError> {
    let wrong = |reason: &str| ConfigError::value("control-plane", text, reason);
    let example = "not an address such as http://kplane.example:7443";
    let url = if text.contains("://") {
        text.to_owned()
    } else {
        format!("http://{text}")
    };
    let uri: Uri = url.parse().map_err(|_| wrong(example))?;
    match (uri.scheme_str(), uri.host(), uri.path()) {
        (Some("https"), _, _) => Err(wrong("TLS is not supported yet: use http://")),
        (Some("http"), Some(host), "" | "/") if !host.is_empty() => {
            let port = uri.port_u16().unwrap_or(CONTROL_PLANE_PORT);
            Endpoint::from_shared(format!("http://{host}:{port}")).map_err(|_| wrong(example))
        }
        _ => Err(wrong(example)),
    }
}

/// As kube-proxy does it: white space around a name is trimmed, upper case is lowered.
fn node_name(given: Option<String>) -> Result<NodeName, ConfigError> {
    let name = match given {
        Some(name) => name,
        None => std::fs::read_to_string("/proc/sys/kernel/hostname")
            .map_err(|error| ConfigError::HostName(error.to_string()))?,
    };
    let name = name.trim().to_ascii_lowercase();
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    if name.is_empty() || name.len() > MAX_NODE_NAME || !name.bytes().all(allowed) {
        let reason = "not a node's name: letters, digits, '-' and '.', at most 253 of them";
        return Err(ConfigError::value("node-name", &name, reason));
    }
    Ok(name.into())
}

#[cfg(test)]
mod tests;
