//! The operator's limits on the userspace proxy, which connects to endpoints with the node's own rights.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::str::FromStr;

use crate::cidr::{Cidr, ParseCidrError};

/// The namespaces whose Services may ask for the proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProxyNamespaces {
    /// None.
    #[default]
    None,
    /// These.
    Of(BTreeSet<String>),
    /// All.
    All,
}

impl ProxyNamespaces {
    /// Returns whether a Service of a namespace may ask.
    pub fn allow(&self, namespace: &str) -> bool {
        match self {
            Self::None => false,
            Self::Of(names) => names.contains(namespace),
            Self::All => true,
        }
    }
}

/// The error for text that is not [`ProxyNamespaces`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no namespaces: use none, all, or names such as shop,games")]
pub struct ParseNamespacesError(String);

impl FromStr for ProxyNamespaces {
    type Err = ParseNamespacesError;

    /// Parses `none`, `all` or `shop,games`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_name = |name: &str| {
            let is_one_of = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
            !name.is_empty() && name.bytes().all(is_one_of)
        };
        match text {
            "none" => Ok(Self::None),
            "all" => Ok(Self::All),
            names if names.split(',').all(is_name) => {
                Ok(Self::Of(names.split(',').map(str::to_owned).collect()))
            }
            _ => Err(ParseNamespacesError(text.to_owned())),
        }
    }
}

/// The endpoints to which the proxy may connect for a Service that asks for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProxyEndpoints {
    /// Pods, in the pod ranges of Nodes.
    #[default]
    Pods,
    /// Pods within these ranges.
    Within(Vec<Cidr>),
    /// Any endpoint, also addresses of nodes.
    Any,
}

impl ProxyEndpoints {
    /// Returns whether an address is in the listed ranges, if there are any.
    pub fn contain(&self, ip: IpAddr) -> bool {
        match self {
            Self::Pods | Self::Any => true,
            Self::Within(ranges) => ranges.iter().any(|range| range.contains(ip)),
        }
    }
}

impl FromStr for ProxyEndpoints {
    type Err = ParseCidrError;

    /// Parses `pods`, `any` or `10.244.0.0/16,fd00:10:244::/56`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "pods" => Ok(Self::Pods),
            "any" => Ok(Self::Any),
            ranges => {
                let ranges = ranges.split(',').map(str::parse);
                Ok(Self::Within(ranges.collect::<Result<_, _>>()?))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_namespace_may_ask_unless_it_is_named() {
        let allows = |text: &str| {
            let namespaces: ProxyNamespaces = text.parse().unwrap();
            ["shop", "games"].map(|name| namespaces.allow(name))
        };
        assert_eq!(allows("none"), [false, false]);
        assert_eq!(allows("shop"), [true, false]);
        assert_eq!(allows("shop,games"), [true, true]);
        assert_eq!(allows("all"), [true, true]);
        assert_eq!(ProxyNamespaces::default(), ProxyNamespaces::None);
        for wrong in ["", "shop,", "Shop", "a b", "*"] {
            assert!(wrong.parse::<ProxyNamespaces>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn endpoints_are_pods_unless_the_operator_says_otherwise() {
        assert_eq!("pods".parse(), Ok(ProxyEndpoints::default()));
        assert_eq!("any".parse(), Ok(ProxyEndpoints::Any));
        let ranges: ProxyEndpoints = "10.244.0.0/16,fd00::/56".parse().unwrap();
        let contains = |ip: &str| ranges.contain(ip.parse().unwrap());
        assert!(contains("10.244.3.4") && contains("fd00::7") && !contains("192.0.2.1"));
        assert!("nodes".parse::<ProxyEndpoints>().is_err());
    }
}
