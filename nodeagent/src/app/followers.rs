//! The tasks beside the engine that its followers need.

use std::sync::Arc;

use kplane_dataplane::beginnings::Beginnings;
use tokio::sync::watch;

use super::{Tasks, spawn_errand};
use crate::avoided::Seen;
use crate::canary;
use crate::config::Config;
use crate::engine::Followers;
use crate::host_checks;
use crate::metrics::Counters;
use crate::prestop::{self, Farewell};
use crate::service_connections::ServiceConnections;

/// Starts to connect to the canary, if there is one.
fn follow_canary(config: &Config, tasks: &mut Tasks) -> Option<canary::Canary> {
    let (follower, prober) = canary::channel(config.canary.clone()?);
    spawn_errand(tasks, prober.run());
    Some(follower)
}

/// Starts to count connections, if that is wanted and possible. One stream of reports is enough for both options.
fn count_connections(config: &Config, tasks: &mut Tasks) -> Option<Arc<ServiceConnections>> {
    let option = match (config.flows, config.count_connections) {
        (true, _) => "--flows",
        (false, true) => "--count-connections",
        (false, false) => return None,
    };
    match Beginnings::open(config.flows) {
        Ok(reports) => {
            let connections = Arc::new(if config.flows {
                ServiceConnections::with_edges()
            } else {
                ServiceConnections::default()
            });
            spawn_errand(tasks, Arc::clone(&connections).follow(reports));
            Some(connections)
        }
        Err(error) => {
            tracing::warn!(
                %error,
                "{option} has no effect: the kernel does not report connections; it needs the module nf_conntrack_netlink"
            );
            None
        }
    }
}

/// Starts the tasks that tell the followers about the node, and the counter of connections. Returns also where to tell
/// them what the userspace proxy shows, since a proxy starts later.
pub(super) fn add_tasks(
    followers: Followers,
    config: &Config,
    tasks: &mut Tasks,
) -> (
    Followers,
    Option<Arc<ServiceConnections>>,
    watch::Sender<Seen>,
) {
    let proxy = watch::Sender::default();
    let followers = followers
        .with_proxy(proxy.subscribe())
        .with_canary(follow_canary(config, tasks));
    let connections = count_connections(config, tasks);
    let followers = followers.with_connections(connections.clone());
    (look_around(followers, config, tasks), connections, proxy)
}

/// Starts to look for what stands in the way of packets, if packets go through this node.
fn look_around(followers: Followers, config: &Config, tasks: &mut Tasks) -> Followers {
    if !config.backend.describe().programs_kernel {
        return followers;
    }
    let localhost = config.backend_settings.localhost_nodeports;
    let (seen, task) = host_checks::watch(config.backend, localhost, config.conntrack.clone());
    spawn_errand(tasks, task);
    followers.with_host_checks(seen)
}

/// Starts to answer preStop hooks, if that is wanted. Returns also their questions to the control plane, and their end.
pub(super) fn answer_hooks(
    followers: Followers,
    config: &Config,
    counters: &Counters,
    tasks: &mut Tasks,
) -> (Followers, Option<prestop::Questions>, Option<Farewell>) {
    let settings = config.prestop.clone();
    let settings = if config.backend.describe().programs_kernel { settings } else { None };
    let Some(settings) = settings else {
        return (followers, None, None);
    };
    let counters = Arc::clone(&counters.prestop);
    let (follower, hooks, end, questions) = prestop::channel(settings, counters);
    spawn_errand(tasks, hooks.run());
    let followers = followers.with_prestop(Some(follower));
    (followers, Some(questions), Some(end))
}
