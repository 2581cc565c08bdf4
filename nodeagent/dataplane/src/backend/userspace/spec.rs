//! A plan as the proxy's ServicePort. Pure.

use std::time::Duration;

use kplane_model::TrafficPolicy;
use kplane_userproxy::{Endpoints, Options, Pool, PortSpec, RouteSpec};

use crate::plan::{Frontend, ServicePlan};

/// Returns the ServicePort of a plan. Each of the two lists of endpoints belongs to a policy, so that all frontends with
/// the same policy share one.
pub(super) fn spec(plan: &ServicePlan) -> PortSpec {
    let mut endpoints = Endpoints {
        serving: plan.serving.clone(),
        here: plan.local.iter().copied().collect(),
        ..Endpoints::default()
    };
    for frontend in &plan.frontends {
        let list = match frontend.policy {
            TrafficPolicy::Cluster => &mut endpoints.cluster,
            TrafficPolicy::Local => &mut endpoints.local,
        };
        list.clone_from(&frontend.endpoints);
    }
    // Policy Cluster for clients inside of the cluster (A16).
    if let Some(inside) = plan.frontends.iter().find_map(|frontend| frontend.inside.as_ref()) {
        endpoints.cluster.clone_from(inside);
    }
    let asked = plan.proxied;
    let default = Options::default();
    PortSpec {
        key: plan.key.clone(),
        endpoints,
        routes: plan.frontends.iter().map(route).collect(),
        options: Options {
            affinity: plan.affinity_timeout_s.map(|seconds| Duration::from_secs(seconds.into())),
            retry: asked.map_or(default.retry, |asked| asked.retry),
        },
        is_listed: asked.is_some(),
    }
}

fn route(frontend: &Frontend) -> RouteSpec {
    let outside = match frontend.policy {
        TrafficPolicy::Cluster => Pool::Cluster,
        TrafficPolicy::Local => Pool::Local,
    };
    RouteSpec {
        at: frontend.at,
        outside,
        inside: match frontend.inside {
            Some(_) => Pool::Cluster,
            None => outside,
        },
        sources: frontend.source_ranges.clone(),
    }
}
