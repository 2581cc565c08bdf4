//! What the agent does not know about the addresses on which it serves node ports (A21).

use kplane_dataplane::plan::{NodePorts, NodeSettings};
use kplane_model::{Family, NodeFacts, Reason, Severity};

use super::{Finding, finding};

/// Returns a finding for each family whose node ports are not served where the Node object or the configuration says.
pub fn findings(
    node: Option<&NodeFacts>,
    settings: &NodeSettings,
    served: [bool; 2],
) -> impl Iterator<Item = Finding> {
    Family::ALL
        .into_iter()
        .filter(move |family| served[*family as usize])
        .filter_map(move |family| of(family, node, settings))
}

/// Returns the finding for a family, whether or not it has Services.
pub(crate) fn of(
    family: Family,
    node: Option<&NodeFacts>,
    settings: &NodeSettings,
) -> Option<Finding> {
    let unknown = NodeFacts::default();
    let node = node.unwrap_or(&unknown);
    let why = if node.known {
        format!("the Node object names no {family} address")
    } else {
        "there is no Node object of the agent's name".to_owned()
    };
    let (severity, text) = match NodePorts::choose(family, node, settings) {
        NodePorts::Configured(_) | NodePorts::Own(_) => return None,
        NodePorts::LastKnown(ip) => (
            Severity::Warning,
            format!("{why}: node ports are served on the last known address {ip}"),
        ),
        // A node without addresses of a family is one of the other: nothing is lost that it could serve.
        NodePorts::Nowhere if !node.addresses.is_empty() => (
            Severity::Info,
            format!("{why}: it serves no node port on {family}"),
        ),
        NodePorts::Nowhere => (
            Severity::Error,
            format!("{why}, and none was known before: no node port is served on {family}"),
        ),
        NodePorts::Everywhere => (
            Severity::Info,
            format!(
                "the source names no Node, and the configuration no nodePortAddresses: node ports are served on all \
                 {family} addresses of the node"
            ),
        ),
    };
    let fix = if node.addresses.is_empty() && severity == Severity::Info {
        "set nodePortAddresses in the agent's configuration, or name the Node in the source"
    } else {
        "kubectl get node -o wide shows the addresses: the kubelet or the cloud's controller sets them. Or set \
              nodePortAddresses to ranges in the agents' configuration"
    };
    Some(finding(Reason::NodeAddressUnknown, severity, text, fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a21_what_is_not_known_of_an_address_is_found() {
        let found = |node: Option<&NodeFacts>, settings: &NodeSettings, served| {
            findings(node, settings, served)
                .map(|finding| (finding.severity, finding.text))
                .collect::<Vec<_>>()
        };
        let (silent, v4) = (NodeSettings::default(), [true, false]);
        let node = NodeFacts {
            known: true,
            addresses: vec!["192.0.2.1".parse().unwrap()],
            ..NodeFacts::default()
        };
        assert_eq!(found(Some(&node), &silent, v4), []);
        let [(severity, text)] = &found(Some(&node), &silent, [true, true])[..] else {
            panic!("one family lacks an address");
        };
        assert_eq!(*severity, Severity::Info, "the node is one of IPv4");
        assert!(
            text.starts_with("the Node object names no IPv6 address"),
            "{text}"
        );
        let bare = NodeFacts {
            addresses: Vec::new(),
            ..node.clone()
        };
        let (severity, text) = &found(Some(&bare), &silent, v4)[0];
        assert_eq!(*severity, Severity::Error);
        assert!(text.contains("no node port is served on IPv4"), "{text}");
        let (severity, text) = &found(None, &silent, v4)[0];
        assert_eq!(*severity, Severity::Info);
        assert!(text.starts_with("the source names no Node"), "{text}");
        let remembers = NodeSettings {
            last_known: [Some("192.0.2.9".parse().unwrap()), None],
            ..silent
        };
        let (severity, text) = &found(None, &remembers, v4)[0];
        assert_eq!(*severity, Severity::Warning);
        assert!(text.ends_with("last known address 192.0.2.9"), "{text}");
        let chosen = NodeSettings {
            nodeport_addresses: vec!["10.0.0.0/8".parse().unwrap()],
            ..remembers
        };
        assert_eq!(found(None, &chosen, [true, true]), []);
    }
}
