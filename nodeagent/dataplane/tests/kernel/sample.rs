//! Elements for every set.

use std::net::IpAddr;

use kplane_dataplane::backend::nftables::{
    Balancer, Carries, Data, Destination, Element, Key, NodePort, Set,
};
use kplane_model::{EndpointAddr, Family, Protocol};

/// An address of the family whose last four bytes are `low`.
pub(crate) fn ip(family: Family, low: u32) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(low.into()),
        Family::V6 => IpAddr::V6((0xfd00_u128 << 112 | u128::from(low)).into()),
    }
}

pub(crate) fn destination(family: Family, number: u32) -> Destination {
    let node_port = node_port(number);
    Destination {
        ip: ip(family, 0x0a60_0000 + number),
        protocol: node_port.protocol,
        port: node_port.port,
    }
}

pub(crate) fn node_port(number: u32) -> NodePort {
    NodePort {
        protocol: Protocol::ALL[number as usize % 3],
        port: 30_000 + u16::try_from(number % 2_000).unwrap(),
    }
}

pub(crate) fn endpoint(family: Family, number: u32) -> EndpointAddr {
    EndpointAddr::new(ip(family, 0x0a00_0000 + number), 8080)
}

/// Three elements for every set; ranges include everything, the first and the last address.
pub(crate) fn elements(family: Family) -> Vec<Element> {
    let ranges = match family {
        Family::V4 => [
            "0.0.0.0/8",
            "10.0.0.0/16",
            "10.1.0.0/16",
            "255.255.255.255/32",
        ],
        Family::V6 => ["::/8", "fd00::/64", "fd00:0:0:1::/64", "ff00::/8"],
    };
    let everything = match family {
        Family::V4 => "0.0.0.0/0",
        Family::V6 => "::/0",
    };
    let mut elements = Vec::new();
    let mut push = |set, key, data| elements.push(Element { set, key, data });
    for set in Set::all() {
        if set == Set::NodeportIps {
            push(set, Key::Range(everything.parse().unwrap()), None);
            continue;
        }
        for (number, range) in (0..).zip(ranges) {
            let (destination, node_port) = (destination(family, number), node_port(number));
            let range = range.parse().unwrap();
            let keys = [
                Key::Service(destination),
                Key::NodePort(node_port),
                Key::Ip(destination.ip),
                Key::Hairpin(destination),
                Key::Range(range),
                Key::FirewallSource(destination, range),
                Key::ServiceSlot(destination, number * 300),
                Key::NodePortSlot(node_port, number * 300),
            ];
            let data = match set.carries() {
                Carries::Endpoint => Some(Data::Endpoint(endpoint(family, number))),
                Carries::Nothing => None,
                Carries::Number => Some(Data::Number(1 << 31 | number)),
                // These need chains: see the tests of session affinity.
                Carries::Chain => continue,
            };
            for key in keys.into_iter().filter(|key| key.fits(set)) {
                push(set, key, data);
            }
        }
    }
    let all = everything.parse().unwrap();
    let key = Key::FirewallSource(destination(family, 9), all);
    push(Set::FirewallSources, key, None);
    elements
}

/// Services with three endpoints each: five elements per Service.
pub(crate) fn many_elements(family: Family, services: u32) -> Vec<Element> {
    let mut elements = Vec::new();
    for number in 0..services {
        let destination = destination(family, number);
        let mut push = |set, key, data| elements.push(Element { set, key, data });
        let word = Some(Data::Number(1 << 31 | 3));
        push(Set::Places, Key::Service(destination), word);
        push(Set::ClusterIps, Key::Ip(destination.ip), None);
        for index in 0..3 {
            let data = Some(Data::Endpoint(endpoint(family, number * 3 + index)));
            let key = Key::ServiceSlot(destination, index);
            push(Set::Endpoints(Balancer::Service), key, data);
        }
    }
    elements
}
