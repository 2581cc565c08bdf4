//! Addresses and names as `iptables-save` prints them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use kplane_model::{Cidr, EndpointAddr, ServiceKey};

/// An address as the C library prints it, on which iptables relies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address(pub(super) IpAddr);

impl Address {
    /// An address and port: `10.0.0.1:80`, `[fd00::1]:80`.
    pub(super) fn port(endpoint: EndpointAddr) -> impl fmt::Display {
        struct Port(EndpointAddr);
        impl fmt::Display for Port {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let EndpointAddr { ip, port } = self.0;
                match ip {
                    IpAddr::V4(_) => write!(f, "{}:{port}", Address(ip)),
                    IpAddr::V6(_) => write!(f, "[{}]:{port}", Address(ip)),
                }
            }
        }
        Port(endpoint)
    }

    /// A range of addresses: `10.0.0.0/8`.
    pub(super) fn range(cidr: Cidr) -> impl fmt::Display {
        struct Range(Cidr);
        impl fmt::Display for Range {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}/{}", Address(self.0.first()), self.0.prefix_len())
            }
        }
        Range(cidr)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V6(ip) if has_v4_tail(ip) => {
                let [.., a, b, c, d] = ip.octets();
                write!(f, "::{}", Ipv4Addr::new(a, b, c, d))
            }
            ip => ip.fmt(f),
        }
    }
}

/// `::a.b.c.d`, which Rust prints in hexadecimal: six zero groups, and the longest run of them is
/// no longer than that.
fn has_v4_tail(ip: Ipv6Addr) -> bool {
    let groups = ip.segments();
    groups[..6].iter().all(|group| *group == 0) && groups[6] != 0
}

/// What a ServicePort is called in comments: `namespace/name:port`. Made of lower-case letters,
/// digits, `-` and `.` besides, and no longer than Kubernetes lets names be: it cannot be anything
/// but part of a comment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::backend) struct Label(Arc<str>);

impl Label {
    /// Longest part in bytes: a DNS label. With it the longest comment has 248 bytes, and the
    /// kernel takes 255 (`XT_MAX_COMMENT_LEN`, linux/netfilter/xt_comment.h).
    const MAX_PART: usize = 63;

    /// `None` if one of the names is not as Kubernetes makes them.
    #[must_use]
    pub(super) fn new(key: &ServiceKey) -> Option<Self> {
        let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b);
        let fits = |part: &str| part.len() <= Self::MAX_PART && part.bytes().all(allowed);
        let (namespace, name) = (&key.service.namespace, &key.service.name);
        if namespace.is_empty() || name.is_empty() {
            return None;
        }
        if ![namespace, name, &key.port_name]
            .into_iter()
            .all(|part| fits(part))
        {
            return None;
        }
        let colon = if key.port_name.is_empty() { "" } else { ":" };
        Some(Self(
            format!("{namespace}/{name}{colon}{}", key.port_name).into(),
        ))
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
