//! Finds Pods whose packets may be too large for the node's way out.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;

use kplane_model::{Cidr, Reason, Severity};

use super::{Finding, finding};

/// Flags in `/proc/net/route`: the route is up, it has a gateway.
const UP: u32 = 1 << 0;
const GATEWAY: u32 = 1 << 1;

/// The largest packets of the interfaces that have routes, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// The interface of the default route.
    uplink: Option<(String, u32)>,
    /// Interfaces with routes to addresses on the node or beyond, without a gateway.
    near: Vec<(Cidr, String, u32)>,
}

impl Sizes {
    /// Reads the routes of IPv4 and the interfaces in them.
    pub(super) fn read(root: &Path) -> Self {
        let routes = fs::read_to_string(root.join("proc/net/route")).unwrap_or_default();
        let size = |name: &str| -> Option<u32> {
            let file = root.join("sys/class/net").join(name).join("mtu");
            fs::read_to_string(file).ok()?.trim().parse().ok()
        };
        let mut sizes = Self::default();
        for route in routes.lines().skip(1).filter_map(Route::parse) {
            let Some(bytes) = size(route.interface) else {
                continue;
            };
            let interface = route.interface.to_owned();
            match route.to.prefix_len() {
                0 => sizes.uplink = sizes.uplink.or(Some((interface, bytes))),
                _ if route.flags & GATEWAY == 0 => sizes.near.push((route.to, interface, bytes)),
                _ => {}
            }
        }
        sizes
    }

    /// Returns a finding if Pods of these ranges may send larger packets than the way out takes.
    pub(super) fn finding(&self, pods: &[Cidr]) -> Option<Finding> {
        let (uplink, most) = self.uplink.as_ref()?;
        let of_pods = |range: &Cidr| pods.iter().any(|pods| overlap(pods, range));
        let near = self
            .near
            .iter()
            .filter(|(range, interface, _)| interface != uplink && of_pods(range));
        let (_, interface, bytes) = near.max_by_key(|(_, _, bytes)| *bytes)?;
        (bytes > most).then(|| {
            let text = format!(
                "{interface} lets Pods send packets of {bytes} bytes, and {uplink} takes {most}: connections of Pods to \
                 other nodes may hang when they send much"
            );
            let fix = "set the MTU of the CNI plugin to that of the uplink, less what its tunnel adds; Pods get it when \
                       they start";
            finding(Reason::PodMtuTooLarge, Severity::Warning, text, fix)
        })
    }
}

fn overlap(one: &Cidr, other: &Cidr) -> bool {
    one.contains(other.first()) || other.contains(one.first())
}

/// A line of `/proc/net/route`.
struct Route<'a> {
    interface: &'a str,
    to: Cidr,
    flags: u32,
}

impl<'a> Route<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let interface = words.next()?;
        let mut hex = || u32::from_str_radix(words.next()?, 16).ok();
        let (to, _gateway, flags) = (hex()?, hex()?, hex()?);
        let mask = u32::from_str_radix(line.split_whitespace().nth(7)?, 16).ok()?;
        let len = u8::try_from(mask.count_ones()).ok()?;
        // The kernel writes addresses in the order of the network's bytes, as a number of this machine.
        let address = Ipv4Addr::from(to.to_ne_bytes());
        let route = Self {
            interface,
            to: Cidr::new(address.into(), len)?,
            flags,
        };
        (flags & UP != 0).then_some(route)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A default route by eth0, the node's own network, and the node's Pods behind a bridge.
    const ROUTES: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
        eth0\t00000000\t010012AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
        eth0\t000012AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n\
        cni0\t0001F40A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
        vpn\t0001F50A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";

    fn sizes(links: &[(&str, u32)]) -> Sizes {
        let root = tempfile::tempdir().unwrap();
        let net = root.path().join("proc/net");
        fs::create_dir_all(&net).unwrap();
        fs::write(net.join("route"), ROUTES).unwrap();
        for (name, bytes) in links {
            let link = root.path().join("sys/class/net").join(name);
            fs::create_dir_all(&link).unwrap();
            fs::write(link.join("mtu"), format!("{bytes}\n")).unwrap();
        }
        Sizes::read(root.path())
    }

    fn pods() -> Vec<Cidr> {
        vec!["10.244.1.0/24".parse().unwrap()]
    }

    #[test]
    fn pods_with_larger_packets_than_the_uplink_are_a_finding() {
        let found = sizes(&[("eth0", 1_500), ("cni0", 9_000), ("vpn", 65_535)])
            .finding(&pods())
            .unwrap();
        assert_eq!(found.code, Reason::PodMtuTooLarge);
        assert!(
            found
                .text
                .starts_with("cni0 lets Pods send packets of 9000 bytes, and eth0 takes 1500"),
            "{}",
            found.text
        );
    }

    #[test]
    fn equal_or_smaller_packets_and_other_interfaces_are_none() {
        for bytes in [1_500, 1_450] {
            let links = [("eth0", 1_500), ("cni0", bytes), ("vpn", 65_535)];
            assert_eq!(sizes(&links).finding(&pods()), None);
        }
        let links = [("eth0", 1_500), ("cni0", 9_000)];
        assert_eq!(sizes(&links).finding(&[]), None);
        assert_eq!(sizes(&[]).finding(&pods()), None);
    }

    #[test]
    fn any_text_is_read() {
        for line in [
            "",
            "eth0",
            "eth0 zz 0 0",
            "eth0 0 0 1 0 0 0 FFFFFFFFF",
            "e 0 0 0 0 0 0 0",
        ] {
            assert!(Route::parse(line).is_none(), "{line}");
        }
    }
}
