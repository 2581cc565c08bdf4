//! What the kernel does with packets to one destination: the way through the chains, followed in a listing.
//!
//! Conditions about the sender and about chance may hold or not, so both ways are followed. Conditions about the
//! destination decide.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;

use kplane_model::{Cidr, EndpointAddr};

use super::name::{ChainName, DISPATCH, TableName, lower};
use super::readback::words;
use super::tool::{Tool, ToolError, plain_name};
use crate::backend::kernel::{KernelState, MAX_ENDPOINTS, PacketTarget};
use crate::process::RunError;

/// Maximum number of jumps on one way; kplane's longest has 25.
const DEPTH: usize = 64;

/// The reason why the rules cannot be read.
#[derive(Debug, thiserror::Error)]
pub(in crate::backend) enum LookUpError {
    /// There is no iptables.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// The listing failed.
    #[error("list the rules")]
    List(#[from] RunError),
}

/// Reads what the kernel has for a destination.
///
/// # Errors
/// [`LookUpError`].
pub(in crate::backend) fn look_up(target: PacketTarget) -> Result<KernelState, LookUpError> {
    let family = target.family();
    let tool = Tool::of_node_listed(family);
    let (tool, listing) = tool.ok_or(ToolError::Missing(plain_name(family)))?;
    let listing = listing.map_or_else(|| tool.list(), Ok)?;
    Ok(follow(&listing, target))
}

/// Follows a packet to a destination through the chains of a listing.
fn follow(listing: &str, target: PacketTarget) -> KernelState {
    let mut way = PacketPath {
        chains: chains(listing),
        target,
        frontends: Vec::new(),
        endpoints: BTreeSet::new(),
        inside: None,
        refuses: false,
        drops: false,
        guarded: false,
    };
    let (nat, filter) = (TableName::Nat.as_str(), TableName::Filter.as_str());
    // Packets must come to the lists at all.
    for (table, from, to) in [
        (nat, "PREROUTING", ChainName::SERVICES),
        (filter, "FORWARD", ChainName::SERVICES),
        (filter, "FORWARD", ChainName::EXTERNAL_SERVICES),
        (filter, "FORWARD", ChainName::PROXY_FIREWALL),
    ] {
        let mut rules = way.rules(table, from).into_iter();
        if rules.any(|rule| ParsedRule::parse(rule).to == to.as_str()) {
            let part = PathStage {
                table,
                guards: to == ChainName::PROXY_FIREWALL,
                inside: false,
            };
            way.chain(to.as_str(), part, DEPTH);
        }
    }
    way.state()
}

/// The rules of each chain, by table and name.
type RulesByChain<'a> = HashMap<(&'a str, &'a str), Vec<&'a str>>;

fn chains(listing: &str) -> RulesByChain<'_> {
    let mut chains = RulesByChain::new();
    let mut table = "";
    for line in listing.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name;
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let (chain, rule) = rule.split_once(' ').unwrap_or((rule, ""));
            chains.entry((table, chain)).or_default().push(rule);
        }
    }
    chains
}

/// A part of a packet's way.
#[derive(Clone, Copy)]
struct PathStage<'a> {
    table: &'a str,
    /// Rules that drop here leave senders out, and not the destination.
    guards: bool,
    /// Only senders inside of the cluster come here.
    inside: bool,
}

/// A packet's way, and what was found on it.
struct PacketPath<'a> {
    chains: RulesByChain<'a>,
    target: PacketTarget,
    frontends: Vec<String>,
    endpoints: BTreeSet<EndpointAddr>,
    inside: Option<BTreeSet<EndpointAddr>>,
    refuses: bool,
    drops: bool,
    guarded: bool,
}

impl<'a> PacketPath<'a> {
    fn rules(&self, table: &str, chain: &str) -> Vec<&'a str> {
        let rules = self.chains.get(&(table, chain));
        rules.cloned().unwrap_or_default()
    }

    /// Follows the packet through a chain.
    fn chain(&mut self, name: &str, part: PathStage<'a>, depth: usize) {
        if depth == 0 {
            return;
        }
        for rule in self.rules(part.table, name) {
            let rule = ParsedRule::parse(rule);
            if !rule.matches(self.target) {
                continue;
            }
            match rule.to {
                "DNAT" => self.endpoint(rule.endpoint, part.inside),
                "REJECT" => self.refuses = true,
                "DROP" if part.guards => self.guarded = true,
                "DROP" => self.drops = true,
                to if ChainName::parse(to).is_some() => {
                    let apart = rule.asks_sender
                        && name.starts_with("KUBE-EXT-")
                        && to.starts_with("KUBE-SVC-");
                    if apart {
                        self.inside.get_or_insert_default();
                    }
                    self.place(part.table, to);
                    let inside = part.inside || apart;
                    self.chain(to, PathStage { inside, ..part }, depth - 1);
                }
                _ => {}
            }
        }
    }

    fn place(&mut self, table: &str, chain: &str) {
        // Trees lead to many destinations, and each endpoint is listed anyway.
        let passing = [DISPATCH, "KUBE-SEP-", "KUBE-MARK-"];
        let place = format!("{table} {chain}");
        let named = !passing.iter().any(|passing| chain.starts_with(passing));
        if named && !self.frontends.contains(&place) {
            self.frontends.push(place);
        }
    }

    fn endpoint(&mut self, endpoint: Option<EndpointAddr>, inside: bool) {
        let list = if inside { self.inside.get_or_insert_default() } else { &mut self.endpoints };
        list.extend(endpoint);
    }

    fn state(self) -> KernelState {
        let more = self.endpoints.len().saturating_sub(MAX_ENDPOINTS);
        let cut = |all: BTreeSet<EndpointAddr>| all.into_iter().take(MAX_ENDPOINTS).collect();
        KernelState {
            frontends: self.frontends,
            endpoints: cut(self.endpoints),
            inside: self.inside.map(cut),
            refuses: self.refuses,
            drops: self.drops,
            guarded: self.guarded,
            more,
        }
    }
}

/// What matters of a rule.
#[derive(Debug, Default)]
struct ParsedRule<'a> {
    to: &'a str,
    protocol: Option<&'a str>,
    /// The range of destination addresses, and whether the rule is for all others.
    destination: Option<(&'a str, bool)>,
    /// The destination port, or the first and the last one.
    ports: Option<&'a str>,
    /// The destination is one of the node's addresses.
    of_node: bool,
    /// There is a condition about the sender.
    asks_sender: bool,
    /// The new destination.
    endpoint: Option<EndpointAddr>,
}

impl<'a> ParsedRule<'a> {
    /// Parses a rule without the name of its chain.
    fn parse(rule: &'a str) -> Self {
        let mut parsed = Self::default();
        let mut words = words(rule);
        let mut negated = false;
        while let Some(word) = words.next() {
            let mut value = || words.next().unwrap_or_default();
            match word {
                "!" => {
                    negated = true;
                    continue;
                }
                "-j" | "-g" => parsed.to = value(),
                "-p" => parsed.protocol = Some(value()),
                "-d" => parsed.destination = Some((value(), negated)),
                "--dport" => parsed.ports = Some(value()),
                "--dst-type" => parsed.of_node = value() == "LOCAL",
                "-s" | "-i" | "--src-type" => {
                    value();
                    parsed.asks_sender = true;
                }
                "--comment" => {
                    value();
                }
                "--to-destination" => {
                    let to: Option<SocketAddr> = value().parse().ok();
                    parsed.endpoint = to.map(EndpointAddr::from);
                }
                _ => {}
            }
            negated = false;
        }
        parsed
    }

    /// Returns whether packets to a destination may match.
    fn matches(&self, target: PacketTarget) -> bool {
        let (protocol, port) = match target {
            PacketTarget::Address { at, protocol } => (protocol, at.port()),
            PacketTarget::NodePort { protocol, port, .. } => (protocol, port),
        };
        let address = match (target, self.destination) {
            (_, None) => true,
            // Rules that lead to the list of node ports say on which addresses they are served.
            (PacketTarget::NodePort { .. }, Some(_)) => self.to == ChainName::NODEPORTS.as_str(),
            (PacketTarget::Address { at, .. }, Some((range, negated))) => {
                let range = range.parse::<Cidr>();
                range.is_ok_and(|range| range.contains(at.ip()) != negated)
            }
        };
        let is_node_port = matches!(target, PacketTarget::NodePort { .. });
        address
            && (is_node_port || !self.of_node)
            && self.protocol.is_none_or(|wanted| wanted == lower(protocol))
            && self.ports.is_none_or(|ports| has(ports, port))
    }
}

/// Returns whether `80` or `80:90` contains a port.
fn has(ports: &str, port: u16) -> bool {
    let (first, last) = ports.split_once(':').unwrap_or((ports, ports));
    match (first.parse::<u16>(), last.parse::<u16>()) {
        (Ok(first), Ok(last)) => (first..=last).contains(&port),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::{Family, Protocol};

    use super::*;

    /// A Service with a guarded load balancer and policy Local, one without endpoints, and another program's rules.
    const TEXT: &str = "*nat\n\
        :KUBE-SERVICES - [0:0]\n\
        -A PREROUTING -m comment --comment \"-j KUBE-X\" -j KUBE-SERVICES\n\
        -A KUBE-SERVICES -d 10.96.0.0/16 -p tcp -m tcp --dport 80:95 -j KUBE-SVC-D-S0\n\
        -A KUBE-SERVICES -d 203.0.113.1/32 -p tcp -m tcp --dport 80 -j KUBE-FW-AAAAAAAAAAAAAAAA\n\
        -A KUBE-SERVICES ! -d 127.0.0.1/32 -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n\
        -A KUBE-SVC-D-S0 -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-AAAAAAAAAAAAAAAA\n\
        -A KUBE-NODEPORTS -d 127.0.0.0/8 -p tcp -m tcp --dport 30080 -j KUBE-EXT-AAAAAAAAAAAAAAAA\n\
        -A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-EXT-AAAAAAAAAAAAAAAA\n\
        -A KUBE-FW-AAAAAAAAAAAAAAAA -s 192.0.2.0/24 -j KUBE-EXT-AAAAAAAAAAAAAAAA\n\
        -A KUBE-EXT-AAAAAAAAAAAAAAAA -s 10.0.0.0/8 -j KUBE-SVC-AAAAAAAAAAAAAAAA\n\
        -A KUBE-EXT-AAAAAAAAAAAAAAAA -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ\n\
        -A KUBE-EXT-AAAAAAAAAAAAAAAA -j KUBE-SVL-AAAAAAAAAAAAAAAA\n\
        -A KUBE-SVC-AAAAAAAAAAAAAAAA -m statistic --mode random --probability 0.5 -j KUBE-SEP-AAAAAAAAAAAAAAAA\n\
        -A KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-SEP-BBBBBBBBBBBBBBBB\n\
        -A KUBE-SVL-AAAAAAAAAAAAAAAA -j KUBE-SEP-BBBBBBBBBBBBBBBB\n\
        -A KUBE-SEP-AAAAAAAAAAAAAAAA -s 10.0.0.1/32 -j KUBE-MARK-MASQ\n\
        -A KUBE-SEP-AAAAAAAAAAAAAAAA -p tcp -m tcp -j DNAT --to-destination 10.0.0.1:8080\n\
        -A KUBE-SEP-BBBBBBBBBBBBBBBB -p tcp -m tcp -j DNAT --to-destination 10.0.0.2:8080\n\
        COMMIT\n\
        *filter\n\
        -A FORWARD -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL\n\
        -A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES\n\
        -A FORWARD -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES\n\
        -A FORWARD -d 10.96.0.1/32 -j DROP\n\
        -A KUBE-PROXY-FIREWALL -d 203.0.113.1/32 -p tcp -m tcp --dport 80 -j DROP\n\
        -A KUBE-SERVICES -d 10.96.0.2/32 -p udp -m udp --dport 53 -j REJECT --reject-with icmp-port-unreachable\n\
        -A KUBE-EXTERNAL-SERVICES -p tcp -m addrtype --dst-type LOCAL -m tcp --dport 30081 -j DROP\n\
        COMMIT\n";

    fn at(text: &str, protocol: Protocol) -> KernelState {
        let at = text.parse().unwrap();
        follow(TEXT, PacketTarget::Address { at, protocol })
    }

    fn node_port(port: u16) -> KernelState {
        let (family, protocol) = (Family::V4, Protocol::Tcp);
        follow(
            TEXT,
            PacketTarget::NodePort {
                family,
                protocol,
                port,
            },
        )
    }

    fn texts(all: &[EndpointAddr]) -> Vec<String> {
        all.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_packet_is_followed_to_its_endpoints() {
        let state = at("10.96.0.1:80", Protocol::Tcp);
        assert_eq!(texts(&state.endpoints), ["10.0.0.1:8080", "10.0.0.2:8080"]);
        assert_eq!(state.inside, None);
        assert!(!state.refuses && !state.drops && !state.guarded);
        let service = "nat KUBE-SVC-AAAAAAAAAAAAAAAA";
        assert_eq!(state.frontends, [service]);
        for (at_other, protocol) in [
            ("10.96.0.1:81", Protocol::Tcp),
            ("10.96.0.1:80", Protocol::Udp),
        ] {
            assert!(at(at_other, protocol).endpoints.is_empty());
        }
    }

    #[test]
    fn a_local_policy_has_endpoints_of_its_own_for_senders_inside() {
        for state in [at("203.0.113.1:80", Protocol::Tcp), node_port(30080)] {
            assert_eq!(texts(&state.endpoints), ["10.0.0.2:8080"]);
            let inside = state.inside.unwrap();
            assert_eq!(texts(&inside), ["10.0.0.1:8080", "10.0.0.2:8080"]);
            assert!(!state.drops);
        }
        assert!(at("203.0.113.1:80", Protocol::Tcp).guarded);
        assert!(!node_port(30080).guarded);
    }

    #[test]
    fn what_has_no_endpoint_is_refused_or_dropped() {
        assert!(at("10.96.0.2:53", Protocol::Udp).refuses);
        assert!(node_port(30081).drops);
        let nothing = node_port(30082);
        assert_eq!(nothing.endpoints, []);
        assert!(!nothing.refuses && !nothing.drops);
    }

    #[test]
    fn without_the_jump_of_a_built_in_chain_there_is_nothing() {
        let text = TEXT.replace("-A PREROUTING", "-A OUTPUT");
        let at = "10.96.0.1:80".parse().unwrap();
        let protocol = Protocol::Tcp;
        assert!(follow(&text, PacketTarget::Address { at, protocol }).endpoints.is_empty());
    }

    #[test]
    fn chains_in_a_ring_end() {
        let text = "*nat\n-A PREROUTING -j KUBE-SERVICES\n-A KUBE-SERVICES -j KUBE-SERVICES\n";
        let at = "10.96.0.1:80".parse().unwrap();
        let protocol = Protocol::Tcp;
        assert_eq!(
            follow(text, PacketTarget::Address { at, protocol }).endpoints,
            []
        );
    }
}
