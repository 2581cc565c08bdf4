//! The warning about a kube-proxy file, or flags of kube-proxy, without a mode. kube-proxy before v1.40 takes iptables and serves node ports on
//! all addresses of the node. kplane takes nftables and serves node ports on the node's own address.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::Family;
use nix::ifaddrs::getifaddrs;

use super::kube_proxy::Note;
use super::load::Loaded;
use kplane_dataplane::backend;
use kplane_dataplane::leftovers;
use kplane_kube_proxy_config::listed;

/// The addresses and ports that kube-proxy serves, or would serve, on a node.
#[derive(Debug, Default)]
struct Served {
    /// Addresses of the node, without IPv6 link-local ones.
    addresses: BTreeSet<IpAddr>,
    /// Node ports in the iptables rules that kube-proxy left.
    ports: BTreeSet<u16>,
}

impl Served {
    /// Reads the state of this node.
    fn here() -> Self {
        let all = getifaddrs().into_iter().flatten();
        let of_node = all.filter(|one| one.interface_name != backend::ipvs::LINK);
        let ips = of_node.filter_map(|one| {
            let address = one.address?;
            address
                .as_sockaddr_in()
                .map(|at| IpAddr::from(at.ip()))
                .or_else(|| address.as_sockaddr_in6().map(|at| IpAddr::from(at.ip())))
        });
        let served = |ip: &IpAddr| match ip {
            IpAddr::V4(_) => true,
            IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
        };
        Self {
            addresses: ips.filter(served).collect(),
            ports: leftovers::node_ports(),
        }
    }
}

/// Returns a warning if the configuration means something else to kube-proxy. A command line without a file or flag of
/// kube-proxy, on a node without its rules, was never kube-proxy's.
pub(super) fn warning(
    loaded: &Loaded,
    backend: Option<backend::Kind>,
    of_kube_proxy: bool,
) -> Option<Note> {
    let served = is_unset(loaded, backend).then(Served::here)?;
    (of_kube_proxy || !served.ports.is_empty()).then(|| note(loaded, served))
}

/// Returns whether the configuration means something else to kube-proxy than to kplane.
fn is_unset(loaded: &Loaded, backend: Option<backend::Kind>) -> bool {
    loaded.config.mode.is_empty()
        && backend.is_none()
        && loaded.settings.node.nodeport_addresses.is_empty()
        && !loaded.settings.node.nodeport_primary
}

/// Returns a note that names what is no longer served.
fn note(loaded: &Loaded, mut served: Served) -> Note {
    let own = loaded.settings.node.node_ip;
    let localhost = loaded.config.iptables.localhost_node_ports;
    served
        .addresses
        .retain(|ip| Some(*ip) != own && (localhost || !ip.is_loopback()));
    let texts = |ips: &BTreeSet<IpAddr>| ips.iter().map(ToString::to_string).collect::<Vec<_>>();
    let except = match own.map(Family::of) {
        Some(_) => "",
        None => ", except for the InternalIP of the Node object",
    };
    let ports: Vec<String> = served.ports.iter().map(ToString::to_string).collect();
    let ports = match &*ports {
        [] => "every node port (30000-32767 unless the API server says otherwise)".to_owned(),
        ports => format!("node ports {}", listed(ports)),
    };
    Note::warning(format!(
        "mode is not set: kube-proxy before v1.40 would use iptables and serve node ports on all addresses of \
         the node; kplane uses nftables and serves them on the node's own address of each family. \
         No longer served: {ports} on {}{except}. To keep them: nodePortAddresses: \
         [\"0.0.0.0/0\", \"::/0\"], or mode: iptables for loopback too (by flags: --nodeport-addresses, --proxy-mode)",
        listed(&texts(&served.addresses))
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::kube_proxy::KubeProxyFlags;
    use crate::config::load::{Loader, from_flags};
    use kplane_kube_proxy_config::document;

    #[test]
    fn what_is_served_no_more_is_listed() {
        let loaded = from_flags(&KubeProxyFlags::default()).unwrap();
        assert!(is_unset(&loaded, None));
        assert!(!is_unset(&loaded, Some(backend::Kind::Iptables)));
        let served = || Served {
            addresses: ["192.0.2.7", "127.0.0.1", "fd00::7"].map(|ip| ip.parse().unwrap()).into(),
            ports: [30_080, 30_443].into(),
        };
        let Note { text, .. } = note(&loaded, served());
        let unserved = "No longer served: node ports 30080, 30443 on 127.0.0.1, 192.0.2.7, \
                        fd00::7, except for the InternalIP";
        assert!(text.contains(unserved), "{text}");
        let file = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
                    bindAddress: 192.0.2.7\niptables: {localhostNodePorts: false}\n";
        assert!(document(file).is_ok());
        let loader = Loader::new("config.conf".into(), KubeProxyFlags::default());
        let loaded = loader.parse(file).unwrap();
        let Note { text, .. } = note(
            &loaded,
            Served {
                ports: BTreeSet::new(),
                ..served()
            },
        );
        assert!(text.contains("every node port (30000-32767"), "{text}");
        assert!(text.contains(" on fd00::7. To keep"), "{text}");
        for other in [
            "mode: iptables\n",
            "nodePortAddresses: [10.0.0.0/8]\n",
            // To both it is the same.
            "nodePortAddresses: [primary]\n",
        ] {
            let loaded = loader.parse(&format!("{file}{other}")).unwrap();
            assert!(!is_unset(&loaded, None), "{other}");
        }
    }
}
