//! Addresses of links.

use std::net::IpAddr;

use kplane_model::Family;
use kplane_netlink::{Errno, Links, link_index};

use kplane_rig::kernel::in_netns;

/// More than fit into one message of a list.
const MANY: u32 = 1_000;

#[test]
fn d2_addresses_come_and_go() {
    in_netns(|| {
        let mut links = Links::open().unwrap();
        let lo = link_index("lo").unwrap();
        let v4 = |number: u32| IpAddr::V4((0x0a60_0000 + number).into());
        let v6 = |number: u32| IpAddr::V6((0xfd96_u128 << 112 | u128::from(number)).into());
        for (family, ips) in [
            (Family::V4, (1..=MANY).map(v4).collect::<Vec<_>>()),
            (Family::V6, (1..=MANY).map(v6).collect()),
        ] {
            let all = |add| ips.iter().map(|ip| (add, *ip)).collect::<Vec<_>>();
            let (refused, bytes) = links.perform(lo, &all(true)).unwrap();
            assert_eq!(refused, []);
            assert!(bytes > 0);
            let mut held: Vec<IpAddr> = links
                .addresses(family)
                .unwrap()
                .into_iter()
                .filter(|address| address.link == lo && !address.is_of_host)
                .map(|address| address.ip)
                .collect();
            held.sort_unstable();
            let lost = ips.iter().find(|ip| !held.contains(ip));
            assert_eq!((lost, held.len()), (None, ips.len()));
            let (refused, _) = links.perform(lo, &[(true, ips[3])]).unwrap();
            assert_eq!(refused[0].errno, Errno::EEXIST);
            let (refused, _) = links.perform(lo, &all(false)).unwrap();
            assert_eq!(refused, []);
            let (refused, _) = links.perform(lo, &[(false, ips[3])]).unwrap();
            assert_eq!(refused[0].errno, Errno::EADDRNOTAVAIL);
        }
    });
}
