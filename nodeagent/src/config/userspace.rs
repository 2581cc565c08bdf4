//! Flags of the userspace backend.

use std::path::PathBuf;
use std::time::Duration;

use kplane_dataplane::backend::{Description, Kind, UserspaceSettings};
use kplane_desired_state::admission::Proxying;
use kplane_model::{ProxyEndpoints, ProxyNamespaces};

use super::value::{duration, interval};

/// Flags of the userspace backend.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "The userspace proxy")]
pub(super) struct UserspaceFlags {
    /// File in which backend userspace-loopback lists where Services can be reached, in the format of /etc/hosts
    #[arg(long, value_name = "FILE")]
    hosts_file: Option<PathBuf>,

    /// Threads of the userspace backends [default: one for each processor]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=1024))]
    proxy_threads: Option<u16>,

    /// Time without a datagram after which the userspace backends end a UDP flow [default: the field udpIdleTimeout of
    /// kube-proxy's file, or 30s]
    #[arg(long, value_name = "DURATION", value_parser = interval)]
    udp_idle_timeout: Option<Duration>,

    /// Endpoints to which the proxy may connect for Services that ask for it: pods (no address of this node), any, or the
    /// ranges of all Pods, separated by commas. With --standalone, pods must also be in the pod ranges of Nodes.
    #[arg(long, value_name = "ENDPOINTS", default_value = "pods")]
    userspace_endpoints: ProxyEndpoints,

    /// Keep the client's address in connections of backend userspace, and of Services that ask for the proxy, to
    /// endpoints on this node
    #[arg(long)]
    userspace_transparent: bool,

    /// Folder of the socket over which an agent hands the open connections of the userspace proxy to the agent that
    /// replaces it; both must name the same folder. Empty = none [default: that of --cache-dir]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<String>,

    /// Time for which an agent that is stopped (SIGTERM) goes on with the open connections of the userspace proxy, or
    /// until another agent takes them over. Rules do not follow changes meanwhile. A second signal ends it at once.
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration)]
    drain_timeout: Duration,
}

impl UserspaceFlags {
    /// Returns what Services may ask of the proxy, unless `--userspace-services` says otherwise.
    pub(super) fn proxying(&self, kind: Option<Kind>) -> Proxying {
        let backend = kind.map(Kind::describe);
        Proxying {
            services: if backend.is_some_and(|backend| backend.is_proxy) {
                ProxyNamespaces::All
            } else {
                ProxyNamespaces::None
            },
            endpoints: if backend.is_some_and(Description::serves_without_rights) {
                ProxyEndpoints::Any
            } else {
                self.userspace_endpoints.clone()
            },
        }
    }

    /// Returns the settings, changed as these flags say; `cache_dir` is the folder of the cache file.
    pub(super) fn settings(
        &self,
        mut settings: UserspaceSettings,
        cache_dir: Option<PathBuf>,
    ) -> UserspaceSettings {
        settings.hosts_file.clone_from(&self.hosts_file);
        settings.threads = self.proxy_threads.map(usize::from);
        settings.udp_idle = self.udp_idle_timeout.or(settings.udp_idle);
        settings.transparent = self.userspace_transparent;
        settings.endpoints = self.userspace_endpoints.clone();
        settings.run_dir = match self.run_dir.as_deref() {
            None => cache_dir,
            Some("") => None,
            Some(folder) => Some(folder.into()),
        };
        settings.drain = self.drain_timeout;
        settings
    }
}
