//! Names of tables and chains: kube-proxy's own, letter by letter, so that other tools find them
//! (C1, C2, C11), and those of our dispatch tree.

use std::fmt;

use kplane_model::{EndpointAddr, Protocol, ServiceKey};
use ring::digest::{SHA256, digest};

use super::text::Address;

/// Longest name of a chain in bytes: `XT_EXTENSION_MAXNAMELEN` (linux/netfilter/x_tables.h) less
/// the zero at its end.
const MAX_CHAIN: usize = 28;
/// Characters of a hash in a chain's name.
const HASH_CHARS: usize = 16;

/// A table of iptables in which we have chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TableName {
    /// Accepts, rejects and drops.
    Filter,
    /// Translates addresses.
    Nat,
    /// Holds a canary chain only (C11).
    Mangle,
}

impl TableName {
    /// All tables, in the order in which they are written.
    pub const ALL: [Self; 3] = [Self::Filter, Self::Nat, Self::Mangle];

    /// The name as iptables writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Nat => "nat",
            Self::Mangle => "mangle",
        }
    }

    /// The table with this name, if we have chains in it.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|table| table.as_str() == name)
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A chain that is always there and from which we jump to ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BuiltIn {
    /// Packets that come in, before routing.
    Prerouting,
    /// Packets for the node itself.
    Input,
    /// Packets on their way through.
    Forward,
    /// Packets from the node itself.
    Output,
    /// Packets that go out, after routing.
    Postrouting,
}

impl BuiltIn {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Prerouting,
        Self::Input,
        Self::Forward,
        Self::Output,
        Self::Postrouting,
    ];

    /// The name as iptables writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prerouting => "PREROUTING",
            Self::Input => "INPUT",
            Self::Forward => "FORWARD",
            Self::Output => "OUTPUT",
            Self::Postrouting => "POSTROUTING",
        }
    }

    /// The built-in chain with this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|chain| chain.as_str() == name)
    }
}

impl fmt::Display for BuiltIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What the chains of one ServicePort are for (C2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ServiceChain {
    /// Spreads over the cluster's endpoints.
    Cluster,
    /// Spreads over the node's own endpoints.
    Local,
    /// Packets to external destinations: masquerading and short cuts, then one of the above.
    External,
    /// Lets through the sources that may use a load balancer's address.
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
/// Begins as a chain of kube-proxy's does, so that kube-proxy empties and deletes these in table nat when
/// the node goes back to it (C13): a chain of ours that jumps to one of its would keep it from deleting
/// that one, and then each of its restores fails. No hash has a `-` in it.
const DISPATCH: &str = "KUBE-SVC-D-";

/// Chains with a name of their own.
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

/// The name of a chain of ours: upper-case letters, digits and `-` only, at most 28.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChainName {
    /// Padded with zeros.
    text: [u8; MAX_CHAIN],
}

impl ChainName {
    /// Services by address (filter and nat).
    pub const SERVICES: Self = Self::well_known("KUBE-SERVICES");
    /// Services' external addresses and node ports without endpoints (filter).
    pub const EXTERNAL_SERVICES: Self = Self::well_known("KUBE-EXTERNAL-SERVICES");
    /// Node ports (nat), and ports of health checks (filter).
    pub const NODEPORTS: Self = Self::well_known("KUBE-NODEPORTS");
    /// Masquerades what is marked (nat).
    pub const POSTROUTING: Self = Self::well_known("KUBE-POSTROUTING");
    /// Marks for masquerading (nat).
    pub const MARK_MASQ: Self = Self::well_known("KUBE-MARK-MASQ");
    /// Lets our traffic through the node (filter).
    pub const FORWARD: Self = Self::well_known("KUBE-FORWARD");
    /// Drops what a load balancer's firewall did not let through (filter).
    pub const PROXY_FIREWALL: Self = Self::well_known("KUBE-PROXY-FIREWALL");
    /// Shared with kubelet: drops packets from outside to the loopback network (filter, C8).
    pub const FIREWALL: Self = Self::well_known("KUBE-FIREWALL");
    /// Gone when somebody flushed the table (all tables, C11).
    pub const CANARY: Self = Self::well_known("KUBE-PROXY-CANARY");
    /// Marks for masquerading what is not from a pod (nat); ours, not kube-proxy's. Exists only
    /// where pods come from several ranges, which one rule cannot exclude.
    pub const MARK_NOT_POD: Self = Self::well_known("KUBE-SVC-D-MARK-NOT-POD");

    /// Load balancers' addresses of IPVS mode (nat, D4).
    pub const LOAD_BALANCER: Self = Self::well_known("KUBE-LOAD-BALANCER");
    /// Node ports (nat), and ports of health checks (filter), of IPVS mode (D4).
    pub const NODE_PORT: Self = Self::well_known("KUBE-NODE-PORT");
    /// Sources that a load balancer lets through, of IPVS mode (filter, D4).
    pub const SOURCE_RANGES: Self = Self::well_known("KUBE-SOURCE-RANGES-FIREWALL");
    /// Keeps other ports of Services' addresses closed, in IPVS mode (filter, D4).
    pub const IPVS_FILTER: Self = Self::well_known("KUBE-IPVS-FILTER");
    /// Keeps the node from load balancers that do not let it through, in IPVS mode (filter, D4).
    pub const IPVS_OUT_FILTER: Self = Self::well_known("KUBE-IPVS-OUT-FILTER");

    /// All chains of IPVS mode (D4), and one of ours.
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
    /// When a constant of this file is too long: at compile time.
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

    /// A chain of a ServicePort. The hash is of what kube-proxy hashes:
    /// `namespace/name:port` (without `:port` if it has no name) and the protocol.
    #[must_use]
    pub fn service(kind: ServiceChain, key: &ServiceKey) -> Self {
        Self::join(kind.prefix(), &hash(service_text(key).as_bytes()))
    }

    /// The chain of one endpoint of a ServicePort.
    #[must_use]
    pub fn endpoint(key: &ServiceKey, endpoint: EndpointAddr) -> Self {
        let text = format!("{}{}", service_text(key), Address::port(endpoint));
        Self::join(ENDPOINT, &hash(text.as_bytes()))
    }

    /// A chain of a dispatch tree; `text` is hashed if it is too long for a name.
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

    /// The name of one of our chains, kube-proxy's included; `None` for those of others.
    /// `KUBE-FIREWALL` is ours here although kubelet has it too.
    #[must_use]
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

    /// The name of a chain of IPVS mode, kube-proxy's or ours; `None` for all others.
    #[must_use]
    pub fn parse_ipvs(name: &str) -> Option<Self> {
        let mut ours = Self::OF_IPVS.iter().chain([&Self::MARK_NOT_POD]);
        ours.find(|chain| chain.as_str() == name).copied()
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let len = self.text.iter().position(|b| *b == 0);
        // Constructors let only ASCII in.
        std::str::from_utf8(&self.text[..len.unwrap_or(MAX_CHAIN)]).unwrap_or_default()
    }

    /// Whether it spreads over the endpoints of a ServicePort.
    pub(super) fn is_of_a_service(&self) -> bool {
        let name = self.as_str();
        let spreads = ["KUBE-SVC-", "KUBE-SVL-"];
        spreads.iter().any(|prefix| name.starts_with(prefix)) && !name.starts_with(DISPATCH)
    }

    /// For an order of chains that is always the same: that of their names. Many come by the ends
    /// of their hashes instead: 30,000 chains that were made in the order of their names take
    /// `iptables-nft-save` 1.8.9 12 s to list, and 1 s if made in another.
    pub(super) fn place_among(&self, count: usize) -> [u8; MAX_CHAIN] {
        /// The order of so many does not matter.
        const FEW: usize = 300;
        let mut place = self.text;
        if count > FEW {
            let len = place.iter().position(|b| *b == 0).unwrap_or(MAX_CHAIN);
            place[..len].reverse();
        }
        place
    }

    /// Where a chain stands in the way of a packet: a chain jumps only to chains of a lower rank,
    /// or to dispatch chains below it.
    #[must_use]
    pub(super) fn rank(&self) -> u8 {
        let name = self.as_str();
        let prefixes = [ENDPOINT, "KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-"];
        let known = prefixes.iter().position(|prefix| name.starts_with(prefix));
        match known {
            _ if *self == Self::MARK_MASQ => 0,
            _ if *self == Self::MARK_NOT_POD => 1,
            _ if name.starts_with(DISPATCH) => 7,
            // 2..=6; at most 6 fits.
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

/// What kube-proxy calls a ServicePort, and its protocol: the first part of what it hashes.
fn service_text(key: &ServiceKey) -> String {
    let colon = if key.port_name.is_empty() { "" } else { ":" };
    let (service, port, protocol) = (&key.service, &key.port_name, lower(key.protocol));
    format!("{service}{colon}{port}{protocol}")
}

/// The protocol as iptables writes it.
pub(super) fn lower(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Sctp => "sctp",
    }
}

/// The first 16 characters of SHA-256 in base32 (RFC 4648, section 6).
fn hash(bytes: &[u8]) -> [u8; HASH_CHARS] {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let digest = digest(&SHA256, bytes);
    let mut chars = [0; HASH_CHARS];
    // 5 bytes are 8 characters.
    let bytes = digest.as_ref().chunks_exact(5);
    for (chars, bytes) in chars.chunks_exact_mut(8).zip(bytes) {
        let bits = bytes
            .iter()
            .fold(0_u64, |bits, b| bits << 8 | u64::from(*b));
        for (position, char) in chars.iter_mut().enumerate() {
            *char = ALPHABET[(bits >> (35 - 5 * position) & 31) as usize];
        }
    }
    chars
}
