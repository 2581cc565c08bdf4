//! Addresses and names as `iptables-save` prints them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use kplane_model::{Cidr, EndpointAddr, ServiceKey};

/// An address as the C library prints it, which iptables uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address(pub(super) IpAddr);

impl Address {
    /// Formats an address and port: `10.0.0.1:80`, `[fd00::1]:80`.
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

    /// Formats a range of addresses: `10.0.0.0/8`.
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

/// Returns whether the C library prints the address as `::a.b.c.d`, which Rust prints in hexadecimal: six
/// zero groups, and no longer run of them.
fn has_v4_tail(ip: Ipv6Addr) -> bool {
    let groups = ip.segments();
    groups[..6].iter().all(|group| *group == 0) && groups[6] != 0
}

/// Name of a ServicePort in comments: `namespace/name:port`. Apart from the separators, it consists only of
/// lower-case letters, digits, `-` and `.`, and it is not longer than Kubernetes allows. So the name can
/// never be anything but a part of a comment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::backend) struct Label(Arc<str>);

impl Label {
    /// Longest part in bytes: a DNS label. So the longest comment has 248 bytes, and the kernel accepts 255
    /// (`XT_MAX_COMMENT_LEN`, linux/netfilter/xt_comment.h).
    const MAX_PART: usize = 63;

    /// Returns the label; `None` if Kubernetes would not accept one of the names.
    pub(super) fn new(key: &ServiceKey) -> Option<Self> {
        let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b);
        let fits = |part: &str| part.len() <= Self::MAX_PART && part.bytes().all(allowed);
        let (namespace, name) = (&key.service.namespace, &key.service.name);
        if namespace.is_empty() || name.is_empty() {
            return None;
        }
        if ![namespace, name, &key.port_name].into_iter().all(|part| fits(part)) {
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
