//! The addresses on which node ports are served (A21).

use std::net::IpAddr;

use kplane_model::{Cidr, Family};

use crate::own_addresses;

/// Returns the addresses of this machine within ranges. A range of everything is the unspecified address, and a range of
/// loopback addresses is the first of these.
pub(super) fn addresses(family: Family, ranges: &[Cidr]) -> Vec<IpAddr> {
    let loopback = family.loopback();
    if ranges.contains(&Cidr::everything(family)) {
        return vec![family.unspecified()];
    }
    let mut found: Vec<IpAddr> = Vec::new();
    for range in ranges {
        if range.contains(loopback) {
            found.push(loopback);
        } else {
            found.extend(of_machine().into_iter().filter(|ip| range.contains(*ip)));
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// Returns the addresses of this machine; none if they cannot be listed.
pub(super) fn of_machine() -> Vec<IpAddr> {
    own_addresses().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(family: Family, ranges: &[&str]) -> Vec<String> {
        let ranges: Vec<Cidr> = ranges.iter().map(|range| range.parse().unwrap()).collect();
        addresses(family, &ranges).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a21_ranges_become_addresses_of_this_machine() {
        assert_eq!(of(Family::V4, &["0.0.0.0/0"]), ["0.0.0.0"]);
        assert_eq!(of(Family::V6, &["::/0"]), ["::"]);
        assert_eq!(
            of(Family::V4, &["127.0.0.0/8", "192.0.2.1/32"]),
            ["127.0.0.1"]
        );
        assert_eq!(of(Family::V6, &["::1/128"]), ["::1"]);
        // Documentation addresses belong to no machine.
        assert!(of(Family::V4, &["203.0.113.0/24"]).is_empty());
    }
}
