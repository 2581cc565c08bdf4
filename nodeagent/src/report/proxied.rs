//! Answers to questions about the userspace proxy, in the wire format.

use kplane_dataplane::backend::Proxy;
use kplane_model::{ProxyEndpoint, ProxyFailure, ProxyPort, ServiceKey};
use kplane_proto::v1 as pb;

/// Maximum number of ServicePorts in a question.
const PORTS: usize = 32;
/// Maximum number of endpoints of a ServicePort in an answer.
const ENDPOINTS: usize = 256;

/// Returns what the proxy, if there is one, knows of the ServicePorts of a question.
pub(crate) fn answer(proxy: Option<&dyn Proxy>, question: pb::ProxiedQuestion) -> pb::ProxiedState {
    let Some(proxy) = proxy else {
        return pb::ProxiedState::default();
    };
    let keys = question
        .ports
        .into_iter()
        .take(PORTS)
        .filter_map(|key| ServiceKey::try_from(key).ok());
    let ports = keys.filter_map(|key| Some(port(&key, proxy.state(&key)?)));
    pb::ProxiedState {
        ports: ports.collect(),
    }
}

fn port(key: &ServiceKey, state: ProxyPort) -> pb::ProxiedPort {
    let counts = state.counts;
    let failed = ProxyFailure::ALL.iter().zip(counts.failed).filter(|(_, count)| *count > 0);
    let mut endpoints = state.endpoints;
    endpoints.sort_by_key(|endpoint| endpoint.avoided_for.is_none());
    let more = endpoints.len().saturating_sub(ENDPOINTS);
    pb::ProxiedPort {
        key: Some(key.into()),
        open: counts.open,
        opened: counts.opened,
        failed: failed
            .map(|(why, count)| pb::ProxiedFailure {
                reason: why.as_str().to_owned(),
                count,
            })
            .collect(),
        retries: counts.retries,
        bytes_to_endpoints: counts.to_endpoints,
        bytes_to_clients: counts.to_clients,
        connect_us: u64::try_from(counts.connect_time.as_micros()).unwrap_or(u64::MAX),
        endpoints: endpoints.iter().take(ENDPOINTS).map(endpoint).collect(),
        more_endpoints: more as u64,
    }
}

fn endpoint(state: &ProxyEndpoint) -> pb::ProxiedEndpoint {
    let avoided = state.avoided_for;
    pb::ProxiedEndpoint {
        address: state.addr.to_string(),
        open: state.open,
        avoided_ms: avoided.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
    }
}
