//! Names of tables and chains: exactly kube-proxy's, so that other tools find them (C1, C2, C11), and those
//! of kplane's dispatch tree.

use std::fmt;

use kplane_model::{EndpointAddr, Protocol, ServiceKey};
use ring::digest::{SHA256, digest};

use super::text::Address;

/// Longest name of a chain in bytes: `XT_EXTENSION_MAXNAMELEN` (linux/netfilter/x_tables.h) without the
/// terminating zero.
const MAX_CHAIN: usize = 28;
/// Characters of a hash in a chain's name.
const HASH_CHARS: usize = 16;

/// A table of iptables in which kplane has chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TableName {
    /// Accepts, rejects and drops.
    Filter,
    /// Translates addresses.
    Nat,
    /// Holds only a canary chain (C11).
    Mangle,
}

impl TableName {
    /// All tables, in the order in which they are written.
    pub const ALL: [Self; 3] = [Self::Filter, Self::Nat, Self::Mangle];

    /// Returns the name as iptables writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Nat => "nat",
            Self::Mangle => "mangle",
        }
    }

    /// Returns the table with this name, if kplane has chains in it.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|table| table.as_str() == name)
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A chain that always exists, and from which kplane jumps to its chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BuiltIn {
    /// Packets that arrive, before routing.
    Prerouting,
    /// Packets for the node itself.
    Input,
    /// Packets that pass through the node.
    Forward,
    /// Packets from the node itself.
    Output,
    /// Packets that leave, after routing.
    Postrouting,
}

impl BuiltIn {
    /// All built-in chains.
    pub const ALL: [Self; 5] = [
        Self::Prerouting,
        Self::Input,
        Self::Forward,
        Self::Output,
        Self::Postrouting,
    ];

    /// Returns the name as iptables writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prerouting => "PREROUTING",
            Self::Input => "INPUT",
            Self::Forward => "FORWARD",
            Self::Output => "OUTPUT",
            Self::Postrouting => "POSTROUTING",
        }
    }

    /// Returns the built-in chain with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|chain| chain.as_str() == name)
    }
}

impl fmt::Display for BuiltIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The purpose of a chain of one ServicePort (C2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ServiceChain {
    /// Spreads connections over the cluster's endpoints.
    Cluster,
    /// Spreads connections over the node's own endpoints.
    Local,
    /// Handles packets to external destinations: masquerading and short cuts, then one of the chains above.
    External,
    /// Lets pass the sources that may use a load balancer's address.
    Firewall,
}

impl ServiceChain {
    fn prefix(self) -> &'static str {
        match self {
            Self::Cluster => "KUBE-SVC-",
            Self::Local => "KUBE-SVL-",
            Self::External => "KUBE-EXT-",
            Self::Firewall => "KUBE-FW-",
        }
    }
}

const ENDPOINT: &str = "KUBE-SEP-";
/// Prefix of the chains of dispatch trees. It begins as kube-proxy's chains do, so that kube-proxy empties
/// and deletes these chains in table nat when the node goes back to it (C13). Otherwise, a kplane chain that
/// jumps to a kube-proxy chain would keep kube-proxy from deleting that one, and each of kube-proxy's
/// restores would fail. No hash contains a `-`.
pub(super) const DISPATCH: &str = "KUBE-SVC-D-";

/// Chains with a fixed name.
const WELL_KNOWN: [&str; 9] = [
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-FIREWALL",
    "KUBE-FORWARD",
    "KUBE-MARK-MASQ",
    "KUBE-NODEPORTS",
    "KUBE-POSTROUTING",
    "KUBE-PROXY-CANARY",
    "KUBE-PROXY-FIREWALL",
    "KUBE-SERVICES",
];

/// The name of one of kplane's chains: only upper-case letters, digits and `-`, at most 28.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChainName {
    /// The text, padded with zeros.
    text: [u8; MAX_CHAIN],
}

impl ChainName {
    /// Services by address (filter and nat).
    pub const SERVICES: Self = Self::well_known("KUBE-SERVICES");
    /// Services' external addresses and node ports without endpoints (filter).
    pub const EXTERNAL_SERVICES: Self = Self::well_known("KUBE-EXTERNAL-SERVICES");
    /// Node ports (nat), and ports of health checks (filter).
    pub const NODEPORTS: Self = Self::well_known("KUBE-NODEPORTS");
    /// Masquerades marked packets (nat).
    pub const POSTROUTING: Self = Self::well_known("KUBE-POSTROUTING");
    /// Marks for masquerading (nat).
    pub const MARK_MASQ: Self = Self::well_known("KUBE-MARK-MASQ");
    /// Lets packets of Services pass through the node (filter).
    pub const FORWARD: Self = Self::well_known("KUBE-FORWARD");
    /// Drops packets that a load balancer's firewall did not let pass (filter).
    pub const PROXY_FIREWALL: Self = Self::well_known("KUBE-PROXY-FIREWALL");
    /// Shared with kubelet: drops packets from outside to the loopback network (filter, C8).
    pub const FIREWALL: Self = Self::well_known("KUBE-FIREWALL");
    /// Canary, missing if another program flushed the table (all tables, C11).
    pub const CANARY: Self = Self::well_known("KUBE-PROXY-CANARY");
    /// Marks packets for masquerading that are not from a pod (nat). It is kplane's, not kube-proxy's, and
    /// exists only where pods come from several ranges, which one rule cannot exclude.
    pub const MARK_NOT_POD: Self = Self::well_known("KUBE-SVC-D-MARK-NOT-POD");

    /// Load balancers' addresses of IPVS mode (nat, D4).
    pub const LOAD_BALANCER: Self = Self::well_known("KUBE-LOAD-BALANCER");
    /// Node ports (nat), and ports of health checks (filter), of IPVS mode (D4).
    pub const NODE_PORT: Self = Self::well_known("KUBE-NODE-PORT");
    /// Sources that a load balancer lets pass, of IPVS mode (filter, D4).
    pub const SOURCE_RANGES: Self = Self::well_known("KUBE-SOURCE-RANGES-FIREWALL");
    /// Keeps other ports of Services' addresses closed, in IPVS mode (filter, D4).
    pub const IPVS_FILTER: Self = Self::well_known("KUBE-IPVS-FILTER");
    /// Refuses packets of the node to load balancers that do not let the node pass, in IPVS mode (filter,
    /// D4).
    pub const IPVS_OUT_FILTER: Self = Self::well_known("KUBE-IPVS-OUT-FILTER");

    /// All chains of IPVS mode (D4), and one of kplane's.
    const OF_IPVS: [Self; 10] = [
        Self::SERVICES,
        Self::POSTROUTING,
        Self::MARK_MASQ,
        Self::FORWARD,
        Self::PROXY_FIREWALL,
        Self::LOAD_BALANCER,
        Self::NODE_PORT,
        Self::SOURCE_RANGES,
        Self::IPVS_FILTER,
        Self::IPVS_OUT_FILTER,
    ];

    /// # Panics
    /// If a constant of this file is too long: at compile time.
    const fn well_known(name: &str) -> Self {
        let bytes = name.as_bytes();
        let mut text = [0; MAX_CHAIN];
        let mut i = 0;
        while i < bytes.len() {
            text[i] = bytes[i];
            i += 1;
        }
        Self { text }
    }

    /// Returns the name of a chain of a ServicePort. The hash is that of kube-proxy's text:
    /// `namespace/name:port` (without `:port` if the port has no name) and the protocol.
    pub fn service(kind: ServiceChain, key: &ServiceKey) -> Self {
        Self::join(kind.prefix(), &hash(service_text(key).as_bytes()))
    }

    /// Returns the name of the chain of one endpoint of a ServicePort.
    pub fn endpoint(key: &ServiceKey, endpoint: EndpointAddr) -> Self {
        let text = format!("{}{}", service_text(key), Address::port(endpoint));
        Self::join(ENDPOINT, &hash(text.as_bytes()))
    }

    /// Returns the name of a chain of a dispatch tree. `text` is hashed if it is too long for a name.
    pub(super) fn dispatch(list: char, text: &str) -> Self {
        let prefix = format!("{DISPATCH}{list}");
        if prefix.len() + text.len() <= MAX_CHAIN {
            Self::join(&prefix, text.as_bytes())
        } else {
            Self::join(&prefix, &hash(text.as_bytes()))
        }
    }

    fn join(prefix: &str, rest: &[u8]) -> Self {
        let mut text = [0; MAX_CHAIN];
        for (to, from) in text.iter_mut().zip(prefix.as_bytes().iter().chain(rest)) {
            *to = *from;
        }
        Self { text }
    }

    /// Parses the name of a chain of kplane or kube-proxy; returns `None` for other chains. `KUBE-FIREWALL`
    /// counts as kplane's, although kubelet has it too.
    pub fn parse(name: &str) -> Option<Self> {
        let base32 = |b: u8| b.is_ascii_uppercase() || (b'2'..=b'7').contains(&b);
        let is_hash = |text: &str| text.len() == HASH_CHARS && text.bytes().all(base32);
        let hashed = ["KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", ENDPOINT];
        let is_hashed = |prefix: &&str| name.strip_prefix(*prefix).is_some_and(is_hash);
        let plain = |b: u8| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'-';
        let dispatch = |rest: &str| !rest.is_empty() && rest.bytes().all(plain);
        let ours = WELL_KNOWN.contains(&name)
            || hashed.iter().any(is_hashed)
            || name.strip_prefix(DISPATCH).is_some_and(dispatch);
        (ours && name.len() <= MAX_CHAIN).then(|| Self::join(name, b""))
    }

    /// Parses the name of a chain of IPVS mode, of kube-proxy or kplane; returns `None` for all others.
    pub fn parse_ipvs(name: &str) -> Option<Self> {
        Self::OF_IPVS
            .iter()
            .chain([&Self::MARK_NOT_POD])
            .find(|chain| chain.as_str() == name)
            .copied()
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        let len = self.text.iter().position(|b| *b == 0);
        // The constructors accept only ASCII.
        std::str::from_utf8(&self.text[..len.unwrap_or(MAX_CHAIN)]).unwrap_or_default()
    }

    /// Returns whether the chain spreads connections over the endpoints of a ServicePort.
    pub(super) fn is_of_a_service(&self) -> bool {
        let name = self.as_str();
        let spreads = ["KUBE-SVC-", "KUBE-SVL-"];
        spreads.iter().any(|prefix| name.starts_with(prefix)) && !name.starts_with(DISPATCH)
    }

    /// Returns the key for a constant order of chains. A few chains are in the order of their names. Many are
    /// in the order of the ends of their hashes: `iptables-nft-save` 1.8.9 takes 12 s to list 30,000 chains
    /// created in the order of their names, and 1 s if they were created in another order.
    pub(super) fn place_among(&self, count: usize) -> [u8; MAX_CHAIN] {
        /// Number of chains up to which the order does not affect the speed.
        const FEW: usize = 300;
        let mut place = self.text;
        if count > FEW {
            let len = place.iter().position(|b| *b == 0).unwrap_or(MAX_CHAIN);
            place[..len].reverse();
        }
        place
    }

    /// Returns the position of a chain in the way of a packet. A chain jumps only to chains of a lower rank,
    /// or to dispatch chains below it.
    pub(super) fn rank(&self) -> u8 {
        let name = self.as_str();
        let prefixes = [ENDPOINT, "KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-"];
        let known = prefixes.iter().position(|prefix| name.starts_with(prefix));
        match known {
            _ if *self == Self::MARK_MASQ => 0,
            _ if *self == Self::MARK_NOT_POD => 1,
            _ if name.starts_with(DISPATCH) => 7,
            // The result is 2..=6, because the position is at most 4.
            Some(position) => 2 + u8::try_from(position).unwrap_or(0),
            None if *self == Self::NODEPORTS => 8,
            None => 9,
        }
    }
}

impl fmt::Display for ChainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for ChainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Returns kube-proxy's name of a ServicePort, and the protocol: the first part of the text that kube-proxy
/// hashes.
fn service_text(key: &ServiceKey) -> String {
    let colon = if key.port_name.is_empty() { "" } else { ":" };
    let (service, port, protocol) = (&key.service, &key.port_name, lower(key.protocol));
    format!("{service}{colon}{port}{protocol}")
}

/// Returns the protocol as iptables writes it.
pub(super) fn lower(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Sctp => "sctp",
    }
}

/// Returns the first 16 characters of SHA-256 in base32 (RFC 4648, section 6).
fn hash(bytes: &[u8]) -> [u8; HASH_CHARS] {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let digest = digest(&SHA256, bytes);
    let mut chars = [0; HASH_CHARS];
    // 5 bytes are 8 characters.
    let bytes = digest.as_ref().chunks_exact(5);
    for (chars, bytes) in chars.chunks_exact_mut(8).zip(bytes) {
        let bits = bytes.iter().fold(0_u64, |bits, b| bits << 8 | u64::from(*b));
        for (position, char) in chars.iter_mut().enumerate() {
            *char = ALPHABET[(bits >> (35 - 5 * position) & 31) as usize];
        }
    }
    chars
}
