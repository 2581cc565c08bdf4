//! Rules of NetworkPolicies in words.

use std::fmt::Display;

use kplane_model::{Block, Direction, PolicyPort, Tier, TierAction};
use kplane_policy::{PeerSpec, Requirement, Rule, Selector, TierRule};

/// Longest text of a rule, in bytes.
const TEXT: usize = 4 << 10;

/// Returns a rule, such as `from Pods app=web, and 10.0.0.0/8, to ports TCP 80, UDP 53-60`.
pub(super) fn rule(rule: &Rule, direction: Direction) -> String {
    let peers = match &rule.peers {
        None => "everybody".to_owned(),
        Some(peers) if peers.is_empty() => "no peer".to_owned(),
        Some(peers) => joined(peers.iter().map(peer), ", and "),
    };
    let ports = match &rule.ports {
        None => "all ports".to_owned(),
        Some(ports) if ports.is_empty() => "no port".to_owned(),
        Some(ports) => format!("ports {}", joined(ports.iter().map(port), ", ")),
    };
    let mut text = match direction {
        Direction::Ingress => format!("from {peers}, to {ports}"),
        Direction::Egress => format!("to {peers}, on {ports}"),
    };
    if text.len() > TEXT {
        text.truncate(text.floor_char_boundary(TEXT));
        text.push_str(" ..");
    }
    text
}

/// Returns a rule of a ClusterNetworkPolicy, such as `Deny: to 10.0.0.0/8, on all ports`.
pub(super) fn tier_rule(of: &TierRule, direction: Direction) -> String {
    let action = match of.action {
        TierAction::Accept => "Accept",
        TierAction::Deny => "Deny",
        TierAction::Pass => "Pass",
    };
    format!("{action}: {}", rule(&of.rule, direction))
}

/// Returns the name of a tier.
pub(super) fn tier(tier: Tier) -> &'static str {
    match tier {
        Tier::Admin => "Admin",
        Tier::Baseline => "Baseline",
    }
}

/// Returns the name of the list of rules in a policy's spec.
pub(super) fn field(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "ingress",
        Direction::Egress => "egress",
    }
}

/// Returns a peer, such as `Pods app=web in namespaces team=a`.
pub(super) fn peer(peer: &PeerSpec) -> String {
    let (namespaces, pods) = match peer {
        PeerSpec::Block(block) => return range(block),
        PeerSpec::Nodes(nodes) => {
            return match selector(nodes).as_str() {
                "" => "all nodes".to_owned(),
                nodes => format!("nodes {nodes}"),
            };
        }
        PeerSpec::Pods { namespaces, pods } => (namespaces, pods),
    };
    let pods = pods.as_ref().map(selector).unwrap_or_default();
    let place = match namespaces.as_ref().map(selector).as_deref() {
        None => " of the namespace".to_owned(),
        Some("") => " of all namespaces".to_owned(),
        Some(namespaces) => format!(" in namespaces {namespaces}"),
    };
    match (pods.as_str(), namespaces) {
        ("", _) => format!("all Pods{place}"),
        (pods, None) => format!("Pods {pods}"),
        (pods, Some(_)) => format!("Pods {pods}{place}"),
    }
}

fn range(block: &Block) -> String {
    if block.except.is_empty() {
        block.range.to_string()
    } else {
        format!("{} except {}", block.range, joined(&block.except, " and "))
    }
}

/// Returns a selector as kubectl takes it; empty if it selects everything.
pub(super) fn selector(selector: &Selector) -> String {
    let requirement = |of: &Requirement| match of {
        Requirement::In(key, values) => match values.as_slice() {
            [value] => format!("{key}={value}"),
            values => format!("{key} in ({})", joined(values, ",")),
        },
        Requirement::NotIn(key, values) => match values.as_slice() {
            [value] => format!("{key}!={value}"),
            values => format!("{key} notin ({})", joined(values, ",")),
        },
        Requirement::Exists(key) => key.to_string(),
        Requirement::DoesNotExist(key) => format!("!{key}"),
    };
    joined(selector.0.iter().map(requirement), ",")
}

fn port(port: &PolicyPort) -> String {
    match port {
        PolicyPort::All(protocol) => format!("all {protocol}"),
        PolicyPort::Range(protocol, first, last) if first == last => format!("{protocol} {first}"),
        PolicyPort::Range(protocol, first, last) => format!("{protocol} {first}-{last}"),
        PolicyPort::Named(protocol, name) => format!("{protocol} {name}"),
    }
}

/// Returns the first names, and the number of the rest.
pub(super) fn some(names: &[impl Display], most: usize) -> String {
    let first = joined(names.iter().take(most), ", ");
    match names.len().saturating_sub(most) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

fn joined(items: impl IntoIterator<Item = impl Display>, by: &str) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(by)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kplane_model::Protocol;

    use super::*;

    fn is(key: &str, values: &[&str]) -> Selector {
        let values = values.iter().map(|value| Arc::from(*value));
        Selector(vec![Requirement::In(key.into(), values.collect())])
    }

    fn pods(namespaces: Option<Selector>, pods: Option<Selector>) -> PeerSpec {
        PeerSpec::Pods { namespaces, pods }
    }

    #[test]
    fn rules_read_like_sentences() {
        let all = Some(Selector::default);
        let block = Block {
            range: "10.0.0.0/8".parse().unwrap(),
            except: ["10.1.0.0/16", "10.2.0.0/16"].map(|of| of.parse().unwrap()).to_vec(),
        };
        for (peers, ports, ingress, egress) in [
            (
                None,
                None,
                "from everybody, to all ports",
                "to everybody, on all ports",
            ),
            (
                Some(vec![]),
                Some(vec![]),
                "from no peer, to no port",
                "to no peer, on no port",
            ),
            (
                Some(vec![
                    pods(Some(is("team", &["a"])), Some(is("app", &["web"]))),
                    PeerSpec::Block(block),
                ]),
                Some(vec![
                    PolicyPort::Range(Protocol::Tcp, 80, 80),
                    PolicyPort::Range(Protocol::Udp, 53, 60),
                    PolicyPort::Named(Protocol::Tcp, "web".into()),
                    PolicyPort::All(Protocol::Sctp),
                ]),
                "from Pods app=web in namespaces team=a, and 10.0.0.0/8 except 10.1.0.0/16 and 10.2.0.0/16, to ports TCP \
                 80, UDP 53-60, TCP web, all SCTP",
                "to Pods app=web in namespaces team=a, and 10.0.0.0/8 except 10.1.0.0/16 and 10.2.0.0/16, on ports TCP \
                 80, UDP 53-60, TCP web, all SCTP",
            ),
            (
                Some(vec![
                    pods(None, all.map(|all| all())),
                    pods(None, Some(is("app", &["a", "b"]))),
                    pods(all.map(|all| all()), None),
                    pods(Some(is("team", &["a"])), None),
                ]),
                None,
                "from all Pods of the namespace, and Pods app in (a,b), and all Pods of all namespaces, and all Pods in \
                 namespaces team=a, to all ports",
                "to all Pods of the namespace, and Pods app in (a,b), and all Pods of all namespaces, and all Pods in \
                 namespaces team=a, on all ports",
            ),
        ] {
            let of = Rule { peers, ports };
            assert_eq!(rule(&of, Direction::Ingress), ingress);
            assert_eq!(rule(&of, Direction::Egress), egress);
        }
        let many = (0..9_000).map(|port| PolicyPort::Range(Protocol::Tcp, port, port));
        let long = Rule {
            peers: None,
            ports: Some(many.collect()),
        };
        assert_eq!(rule(&long, Direction::Ingress).len(), TEXT + 3);
    }

    #[test]
    fn selectors_are_those_of_kubectl() {
        let of = Selector(vec![
            Requirement::In("app".into(), vec!["web".into()]),
            Requirement::NotIn("tier".into(), vec!["a".into()]),
            Requirement::NotIn("tier".into(), vec!["b".into(), "c".into()]),
            Requirement::Exists("x".into()),
            Requirement::DoesNotExist("y".into()),
        ]);
        assert_eq!(selector(&of), "app=web,tier!=a,tier notin (b,c),x,!y");
        assert_eq!(some(&["a", "b", "c"], 2), "a, b and 1 more");
    }
}
