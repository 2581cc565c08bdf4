//! The configuration: flags, kube-proxy's file, and what they mean once they are checked.

mod absence;
mod flags;
pub mod kube_proxy;
mod load;
mod source;
mod unset_mode;

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kplane_model::NodeName;

use self::kube_proxy::{LogSettings, Note};
use crate::cleanup;
use crate::desired::CliffGuard;
use crate::sysctl;
use kplane_dataplane::backend;
use kplane_dataplane::plan::NodeSettings;
use kplane_kube_proxy_config::KubeProxyConfiguration;

pub use flags::Flags;
pub use kplane_kube_proxy_config::{ConfigError, Problem};
pub use load::{Loaded, Loader};
pub use source::Source;

/// A command line that makes sense.
#[derive(Clone, Debug)]
pub struct Checked {
    /// What to do.
    pub task: Task,
    /// How to log.
    pub log: LogSettings,
    /// What to log first.
    pub notes: Vec<Note>,
}

/// What the program is asked to do.
#[derive(Clone, Debug)]
pub enum Task {
    /// Be an agent.
    Run(Box<Config>),
    /// Set up what needs privileges, and nothing else (I5).
    InitOnly {
        /// Connection tracking.
        conntrack: sysctl::Settings,
        /// Mode ipvs, if that is the node's (D6, D8).
        ipvs: Option<backend::ipvs::Settings>,
    },
    /// Remove what an agent left (I4).
    Cleanup(cleanup::Task),
    /// Say what the configuration means, and change nothing: the notes are the answer.
    CheckConfig,
    /// Write the configuration with all defaults.
    WriteConfig {
        /// The file.
        path: PathBuf,
        /// What to write.
        config: Box<KubeProxyConfiguration>,
    },
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
    /// Where metrics are served; `None` = nowhere.
    pub metrics: Option<SocketAddr>,
    /// A port that is taken ends the program, instead of being tried again (G6).
    pub bind_address_hard_fail: bool,
    /// How much may go at once because a snapshot does not name it.
    pub cliff_guard: CliffGuard,
    /// Folder in which what is served is written down; `None` = nowhere.
    pub cache_dir: Option<PathBuf>,
    /// For `/proc/self/oom_score_adj`, -1000..=1000.
    pub oom_score_adj: i32,
    /// How long a failure may last before the node counts as unhealthy (G2: twice as long).
    pub sync_period: Duration,
    /// Connection tracking, set at the start (F6).
    pub conntrack: sysctl::Settings,
    /// All of kube-proxy's configuration, with defaults.
    pub kube_proxy: Arc<KubeProxyConfiguration>,
    /// The file that it came from, to read again when it changes (I3).
    pub file: Option<Loader>,
}
