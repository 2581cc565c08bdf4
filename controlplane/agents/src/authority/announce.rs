//! Addresses of all replicas for agents that cannot resolve a name of the cluster: the ConfigMap kplane-replicas.
//!
//! Kubelet mounts the ConfigMap into the agents' pods and keeps the file up to date, so agents need neither a DNS
//! server in the cluster nor any right at the API server. The addresses are those of the headless Service
//! kplane-controlplane, whichever replica writes them.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kplane_desired_state::kubernetes::{Api, Asked, Unanswered};
use kplane_util::dial::{AGENT_PORT, MAX_ADDRESSES};
use kube::api::ListParams;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use super::config_map::publish;
use super::{PATIENCE, SERVICE};

/// Name of the ConfigMap.
const CONFIG_MAP: &str = "kplane-replicas";
/// Key of its data.
const KEY: &str = "addresses";
/// Name of the Service's port for agents.
const PORT_NAME: &str = "agents";
/// Interval at which the Service's endpoints are read.
const LOOK: Duration = Duration::from_secs(5);

/// A writer of the addresses. All replicas write the same.
#[derive(Debug)]
pub(super) struct AddressWriter {
    pub(super) api: Arc<Api>,
    pub(super) namespace: String,
    /// The addresses for this replica's own questions to the others, and for its agents.
    pub(super) places: watch::Sender<BTreeSet<SocketAddr>>,
}

impl AddressWriter {
    /// Keeps the ConfigMap up to date. Never returns.
    pub(super) async fn keep(self) {
        let mut said = String::new();
        loop {
            match self.look().await {
                Ok(()) => said.clear(),
                Err(error) => {
                    let text = error.to_string();
                    if said != text {
                        warn!(
                            "cannot tell agents the addresses of all replicas (ConfigMap {}/{CONFIG_MAP}): {text}",
                            self.namespace
                        );
                        said = text;
                    }
                }
            }
            sleep(LOOK).await;
        }
    }

    /// Writes the addresses if the ConfigMap has others. Without any address, nothing changes: a list that leads nowhere
    /// helps no agent.
    async fn look(&self) -> Result<(), Unanswered> {
        let places = addresses(&self.slices().await?);
        let listed = text(&places);
        if listed.is_empty() {
            return Ok(());
        }
        self.places.send_replace(places);
        // If another replica wrote, this one looks again soon, because the other may have seen an older state.
        let entry = (KEY, listed.as_str());
        if publish(&self.api, &self.namespace, CONFIG_MAP, entry).await? {
            let addresses = listed.trim_end().replace('\n', " ");
            info!(addresses, "announced the replicas to agents");
        }
        Ok(())
    }

    async fn slices(&self) -> Result<Vec<EndpointSlice>, Unanswered> {
        let slices: kube::Api<EndpointSlice> =
            kube::Api::namespaced(self.api.client(), &self.namespace);
        let selector = format!("kubernetes.io/service-name={SERVICE}");
        // The API server answers from its memory.
        let params = ListParams::default().labels(&selector).match_any();
        let asked = Asked::new("list", "endpointslices", "discovery.k8s.io");
        let request = slices.list(&params);
        Ok(self.api.ask(asked, PATIENCE, request).await?.items)
    }
}

/// Returns the places of all replicas that are not about to end, in order.
fn addresses(slices: &[EndpointSlice]) -> BTreeSet<SocketAddr> {
    let mut places = BTreeSet::new();
    for slice in slices {
        let mut ports = slice.ports.iter().flatten();
        let port = ports.find(|port| port.name.as_deref() == Some(PORT_NAME));
        let port = port.and_then(|port| u16::try_from(port.port?).ok());
        for endpoint in slice.endpoints.iter().flatten() {
            let conditions = endpoint.conditions.as_ref();
            if conditions.is_some_and(|conditions| conditions.terminating == Some(true)) {
                continue;
            }
            let ips =
                endpoint.addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok());
            places.extend(ips.map(|ip| SocketAddr::new(ip, port.unwrap_or(AGENT_PORT))));
        }
    }
    places
}

/// Returns the file's content: a line for each place.
fn text(places: &BTreeSet<SocketAddr>) -> String {
    places.iter().take(MAX_ADDRESSES).map(|place| format!("{place}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_names_replicas_that_stay() {
        let slice = |family: &str, port: &str, endpoints: &str| -> EndpointSlice {
            let text = format!(
                r#"{{"metadata":{{"name":"s"}},"addressType":"{family}","ports":{port},"endpoints":{endpoints}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        let slices = [
            slice(
                "IPv6",
                r#"[{"name":"status","port":7466},{"name":"agents","port":17443}]"#,
                r#"[{"addresses":["2001:db8::1"],"conditions":{"ready":true}}]"#,
            ),
            slice(
                "IPv4",
                r#"[{"name":"status","port":7466}]"#,
                r#"[{"addresses":["192.0.2.2"],"conditions":{"ready":true}},
                    {"addresses":["192.0.2.1"]},
                    {"addresses":["192.0.2.3"],"conditions":{"ready":false,"terminating":true}}]"#,
            ),
        ];
        let expected = "192.0.2.1:7465\n192.0.2.2:7465\n[2001:db8::1]:17443\n";
        assert_eq!(text(&addresses(&slices)), expected);
        assert_eq!(text(&addresses(&[])), "");
    }
}
