//! Two Pods on one bridge of a node, as CNI plugins with a bridge have them.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::time::Duration;

use kplane_dataplane::policy::Enforcer;
use kplane_model::{Family, LocalPod, PolicyName, PolicyObject};
use kplane_rig::link::answers_neighbours;
use kplane_rig::netns::NetNs;
use kplane_rig::privilege::available;

use super::world::{apply, block, own_tables, policy, rule};

const BRIDGE: &str = "br0";
const LINK: &str = "eth0";
const PORT: u16 = 7000;

/// Whom a Pod sends to, and from which of its addresses.
struct Pod {
    ns: NetNs,
    ips: [IpAddr; 2],
    link_local: Ipv6Addr,
    index: u32,
    /// Takes datagrams of both families.
    server: UdpSocket,
}

impl Pod {
    fn new(node: &NetNs, name: &str, last: u8) -> Self {
        let ns = NetNs::new(name).unwrap();
        node.run(|| {
            let netlink = node.netlink()?;
            netlink.veth(name, &ns, LINK)?;
            netlink.attach(name, BRIDGE)?;
            netlink.up(name)
        })
        .unwrap();
        let part = u16::from(last);
        let ips = [
            IpAddr::from([10, 244, 1, last]),
            IpAddr::from([0xfd44, 0, 0, 1, 0, 0, 0, part]),
        ];
        let link_local = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, part);
        let (index, server) = ns
            .run(|| {
                let netlink = ns.netlink()?;
                netlink.up(LINK)?;
                netlink.add_address(LINK, ips[0], 24)?;
                netlink.add_address(LINK, ips[1], 64)?;
                netlink.add_address(LINK, link_local.into(), 64)?;
                netlink.carries(LINK)?;
                answers_neighbours(&ips)?;
                let server = UdpSocket::bind(("::", PORT))?;
                server.set_read_timeout(Some(Duration::from_millis(500)))?;
                Ok((netlink.index(LINK)?, server))
            })
            .unwrap();
        Self {
            ns,
            ips,
            link_local,
            index,
            server,
        }
    }

    /// Returns whether a datagram to an address of the other one arrives.
    fn reaches(&self, other: &Self, to: SocketAddr) -> bool {
        let any = Family::of(to.ip()).pick("0.0.0.0:0", "[::]:0");
        self.ns.run(|| Ok(UdpSocket::bind(any)?.send_to(b"datagram", to)?)).unwrap();
        other.server.recv(&mut [0; 8]).is_ok()
    }

    fn reaches_ip(&self, other: &Self, family: Family) -> bool {
        self.reaches(other, SocketAddr::new(other.ips[family as usize], PORT))
    }

    fn reaches_link_local(&self, other: &Self) -> bool {
        let to = SocketAddrV6::new(other.link_local, PORT, 0, self.index);
        self.reaches(other, to.into())
    }
}

/// Neighbours find each other, and policies hold for link-local addresses, of which no API tells.
#[test]
fn pods_on_one_bridge_do_not_get_around_policies() {
    let Some(node) = available(NetNs::new("node")).unwrap() else {
        return;
    };
    play(&node);
}

fn play(node: &NetNs) {
    node.sysctl(&[
        ("net.bridge.bridge-nf-call-iptables", "1"),
        ("net.bridge.bridge-nf-call-ip6tables", "1"),
    ])
    .unwrap();
    node.run(|| node.netlink()?.bridge(BRIDGE)).unwrap();
    let (x, y) = (Pod::new(node, "x", 20), Pod::new(node, "y", 21));
    let mut enforcer = Enforcer::new(own_tables());
    let mut enforce = |objects: &[PolicyObject]| {
        let objects: Vec<_> = objects.iter().map(|o| (o.key(), Some(o))).collect();
        node.run(|| {
            for family in Family::ALL {
                apply(&mut enforcer, family, &objects, true);
            }
            Ok(())
        })
        .unwrap();
    };
    let pod = |name: &str, pod: &Pod, policies: &[&str]| {
        PolicyObject::Pod(LocalPod {
            name: PolicyName::new("ns", name),
            addresses: pod.ips.to_vec(),
            ports: Vec::new(),
            policies: policies.iter().map(|p| PolicyName::new("ns", p)).collect(),
            tier: None,
        })
    };
    assert!(x.reaches_link_local(&y), "nobody is isolated");
    let blocks = ["10.244.1.0/24", "fd44:0:0:1::/64"].map(|range| block(range, &[]));
    let open = policy("p", Some(vec![rule(false, &blocks, None)]), None);
    let nobody = policy("p", Some(Vec::new()), None);
    for (policy, is_open) in [(open, true), (nobody, false)] {
        let (x_pod, y_pod) = (pod("x", &x, &[]), pod("y", &y, &["p"]));
        enforce(&[x_pod, y_pod, PolicyObject::Policy(policy)]);
        for family in Family::ALL {
            assert_eq!(x.reaches_ip(&y, family), is_open, "{family}");
        }
        assert!(!x.reaches_link_local(&y), "open: {is_open}");
    }
    enforce(&[pod("x", &x, &[]), pod("y", &y, &[])]);
    assert!(x.reaches_link_local(&y), "nobody is isolated any more");
}
