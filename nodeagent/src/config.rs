//! The configuration: flags, kube-proxy's file, and the checked settings that follow from them.
//!
//! Every invalid value is a [`Problem`], and all problems are reported at once.

mod absence;
mod flags;
pub mod kube_proxy;
mod load;
mod pre_stop;
mod source;
mod unset_mode;
mod userspace;
mod value;

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kplane_desired_state::inside;
use kplane_model::{NodeName, ServiceName};

use self::kube_proxy::{LogSettings, Note};
use crate::cleanup;
use crate::desired::CliffGuard;
use crate::prestop;
use crate::sysctl;
use kplane_dataplane::backend;
use kplane_dataplane::plan::NodeSettings;
use kplane_kube_proxy_config::KubeProxyConfiguration;

pub use flags::Flags;
pub use kplane_kube_proxy_config::{ConfigError, Problem};
pub use load::{Loaded, Loader};
pub use source::Source;

/// A valid command line.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The task to carry out.
    pub task: Task,
    /// The settings of the log.
    pub log: LogSettings,
    /// The notes to log first.
    pub notes: Vec<Note>,
}

/// The task that the command line asks for.
#[derive(Clone, Debug)]
pub enum Task {
    /// Run an agent.
    Run(Box<Config>),
    /// Make the settings that need privileges, and exit (I5).
    InitOnly {
        /// Settings of connection tracking.
        conntrack: sysctl::ConntrackSettings,
        /// Settings of mode ipvs, if that is the node's mode (D6, D8).
        ipvs: Option<backend::ipvs::IpvsSettings>,
        /// Whether node ports are served on loopback addresses, in mode iptables (C8).
        localhost: bool,
        /// The folder of the file that remembers earlier values; `None` = none.
        cache_dir: Option<PathBuf>,
    },
    /// Remove what an agent left (I4).
    Cleanup(cleanup::Cleanup),
    /// Print the notes about the configuration, and change nothing.
    CheckConfig,
    /// Check whether this machine can run the agent, and print the findings as JSON.
    Preflight {
        /// The mode that the configuration asks for.
        backend: backend::Kind,
        /// Its settings.
        settings: backend::Settings,
        /// Settings of connection tracking.
        conntrack: sysctl::ConntrackSettings,
        /// The ports on which a kube-proxy may listen.
        ports: kplane_dataplane::leftovers::Ports,
    },
    /// Write the configuration with all defaults.
    WriteConfig {
        /// The file to write.
        path: PathBuf,
        /// The configuration to write.
        config: Box<KubeProxyConfiguration>,
    },
}

/// The checked configuration of a running agent.
#[derive(Clone, Debug)]
pub struct Config {
    /// The name of the node.
    pub node_name: NodeName,
    /// The source of desired state.
    pub source: Source,
    /// Starts the control plane of [`Source::Standalone`]; `None` = the program has none.
    pub inside: Option<inside::Start>,
    /// The backend that programs the kernel.
    pub backend: backend::Kind,
    /// Whether nobody chose the backend: there is a file of kube-proxy, and it names no mode.
    pub mode_unset: bool,
    /// Settings of the backend.
    pub backend_settings: backend::Settings,
    /// Settings that shape the plans.
    pub node_settings: NodeSettings,
    /// The address that answers health checks; `None` = none.
    pub healthz: Option<SocketAddr>,
    /// The address that serves metrics; `None` = none.
    pub metrics: Option<SocketAddr>,
    /// Whether a port that is taken ends the program; otherwise the agent keeps trying to open it
    /// (G6).
    pub bind_address_hard_fail: bool,
    /// The Service that leads to this agent on this node; `None` = the data path is not probed.
    pub canary: Option<ServiceName>,
    /// The answers to preStop hooks of the node's Pods; `None` = none.
    pub prestop: Option<prestop::HookSettings>,
    /// Whether connections are counted by Service.
    pub count_connections: bool,
    /// Whether the agent remembers who connections are from and to.
    pub flows: bool,
    /// The limit on how much may go at once because a snapshot does not name it.
    pub cliff_guard: CliffGuard,
    /// The folder of the cache file; `None` = no cache file.
    pub cache_dir: Option<PathBuf>,
    /// The value for `/proc/self/oom_score_adj`, -1000..=1000.
    pub oom_score_adj: i32,
    /// The longest time of a failure before the node counts as unhealthy (G2: twice as long).
    pub sync_period: Duration,
    /// Settings of connection tracking, applied at the start (F6).
    pub conntrack: sysctl::ConntrackSettings,
    /// All of kube-proxy's configuration, with defaults.
    pub kube_proxy: Arc<KubeProxyConfiguration>,
    /// The file that the configuration came from. The agent reads it again when it changes (I3).
    pub file: Option<Loader>,
}
