//! Bounds on the cost of one Service for this node, whatever the control plane sends (see `ServiceSize`).

use kplane_model::{
    Allowance, LocalEndpoints, MAX_SERVICE_ELEMENTS, MAX_SERVICE_PLACES, ServiceProgram,
};

/// Returns a ServicePort cut to the bounds of its Service, and the parts that were cut, human-readable.
pub fn cut(
    program: &ServiceProgram,
    local: Option<&LocalEndpoints>,
    allowed: Allowance,
) -> (ServiceProgram, Option<LocalEndpoints>, String) {
    let mut program = program.clone();
    let mut local = local.cloned();
    let port = &mut program.port;
    let addresses = port.load_balancer_ips.len() + port.external_ips.len();
    let endpoints = program.endpoints.len();
    port.load_balancer_ips.truncate(allowed.load_balancer_ips);
    port.external_ips.truncate(allowed.external_ips);
    program.endpoints.truncate(allowed.endpoints);
    program.serving_others.truncate(allowed.endpoints);
    program.dead.truncate(allowed.endpoints);
    if let Some(local) = &mut local {
        local.endpoints.truncate(allowed.endpoints);
    }
    let reason = format!(
        "its Service exceeds the limits of one Service ({MAX_SERVICE_PLACES} addresses with ports, \
         {MAX_SERVICE_ELEMENTS} elements): served at {} of {addresses} external addresses, with \
         {} of {endpoints} endpoints; split the Service",
        program.port.load_balancer_ips.len() + program.port.external_ips.len(),
        program.endpoints.len(),
    );
    (program, local, reason)
}
