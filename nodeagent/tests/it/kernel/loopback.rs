//! Node ports on loopback addresses, which the userspace proxy serves, as the real program.

use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use kplane_rig::kernel::in_netns;
use kplane_rig::link::Route;
use kplane_rig::netns::NetNs;

use super::proxied::{PATIENCE, manifests, send_back, start};

/// Addresses of the node, at which the servers are.
const NODE: [IpAddr; 2] = [v4([172, 20, 0, 1]), v6(1)];
/// Addresses of a client behind a link.
const CLIENT: [IpAddr; 2] = [v4([172, 20, 0, 254]), v6(0xfe)];
/// ClusterIPs.
const WEB: [IpAddr; 2] = [
    v4([10, 96, 0, 10]),
    IpAddr::V6(Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, 0x10)),
];

/// Node ports of TCP and of UDP.
const PORTS: [u16; 2] = [30_080, 30_081];

/// The port of servers.
const SERVER: u16 = 8080;

const fn v4([a, b, c, d]: [u8; 4]) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(a, b, c, d))
}

const fn v6(last: u16) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0, 0, 0, 0, 0, 0, last))
}

/// Makes this namespace a node. Returns a client behind a link.
fn node() -> NetNs {
    let here = NetNs::current("node").unwrap();
    let client = NetNs::new("client").unwrap();
    let links = here.netlink().unwrap();
    links.up("lo").unwrap();
    links.veth("eth0", &client, "eth0").unwrap();
    let there = client.netlink().unwrap();
    for index in [0, 1] {
        let len = [24, 64][index];
        links.add_address("eth0", NODE[index], len).unwrap();
        there.add_address("eth0", CLIENT[index], len).unwrap();
    }
    links.up("eth0").unwrap();
    there.up("eth0").unwrap();
    for index in [0, 1] {
        there.add_route(&Route::default_via(NODE[index])).unwrap();
        links.add_route(&Route::default_via(CLIENT[index])).unwrap();
    }
    client
}

/// Starts servers of TCP and UDP in both families that send everything back.
fn echo() {
    for ip in NODE {
        send_back(TcpListener::bind((ip, SERVER)).unwrap());
    }
    for ip in NODE {
        let socket = UdpSocket::bind((ip, SERVER)).unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            loop {
                if let Ok((count, from)) = socket.recv_from(&mut buffer) {
                    let _ = socket.send_to(&buffer[..count], from);
                }
            }
        });
    }
}

/// Returns a Service with the ClusterIPs and node ports. Its endpoints are at the addresses of the node.
fn web() -> String {
    let [tcp, udp] = PORTS;
    let mut text = format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\nspec: {{type: NodePort, \
         ipFamilyPolicy: RequireDualStack, ipFamilies: [IPv4, IPv6], clusterIP: '{}', clusterIPs: ['{}', '{}'], ports: \
         [{{name: t, port: 80, nodePort: {tcp}}}, {{name: u, port: 80, protocol: UDP, nodePort: {udp}}}]}}\n",
        WEB[0], WEB[0], WEB[1]
    );
    for (index, family) in ["IPv4", "IPv6"].into_iter().enumerate() {
        write!(
            text,
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: web-{index}, namespace: shop, \
             labels: {{kubernetes.io/service-name: web}}}}\naddressType: {family}\nports: [{{name: t, port: {SERVER}}}, \
             {{name: u, port: {SERVER}, protocol: UDP}}]\nendpoints: [{{addresses: ['{}']}}]\n",
            NODE[index]
        )
        .unwrap();
    }
    text
}

fn tcp(to: SocketAddr, limit: Duration) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(b"ping")?;
    stream.read_exact(&mut [0; 4])
}

/// Sends a datagram with a new socket, and waits for the answer.
fn udp(to: SocketAddr, limit: Duration) -> std::io::Result<()> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(limit))?;
    socket.connect(to)?;
    socket.send(b"ping")?;
    socket.recv(&mut [0; 4]).map(drop)
}

/// Processes of the node may use node ports on loopback addresses, and other machines may not.
fn check_loopback(service: &str, is_served: bool) {
    let client = node();
    echo();
    let folder = manifests(service);
    let ranges = "--nodeport-addresses=172.20.0.0/24,fd20::/64,localhost";
    let mut agent = start(&folder, &["--backend", "userspace", ranges]);
    agent.until("update applied");
    let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for ip in loopback.into_iter().filter(|_| is_served) {
        tcp((ip, PORTS[0]).into(), PATIENCE).unwrap_or_else(|error| panic!("{ip}: {error}"));
        udp((ip, PORTS[1]).into(), PATIENCE).unwrap_or_else(|error| panic!("{ip}: {error}"));
    }
    for ip in loopback.into_iter().filter(|_| !is_served) {
        let short = Duration::from_millis(300);
        tcp((ip, PORTS[0]).into(), short).expect_err("an endpoint of another node answers");
    }
    // A machine that sends packets to loopback addresses to the node.
    let links = client.netlink().unwrap();
    let _ = links.delete_address("lo", loopback[0], 8);
    client.sysctl(&[("net/ipv4/conf/all/route_localnet", "1")]).unwrap();
    let ask = || {
        let to = SocketAddr::new(loopback[0], PORTS[0]);
        let outcome = TcpStream::connect_timeout(&to, Duration::from_millis(300));
        let error = outcome.expect_err("another machine is served");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        Ok(())
    };
    client.run(ask).unwrap();
    agent.stop();
}

#[test]
fn u22_node_ports_on_loopback_addresses() {
    let all = web();
    // Of this Service, the only endpoints are on another node: a policy Local does not lead there (K7).
    let local = all
        .replace(
            "type: NodePort",
            "type: NodePort, externalTrafficPolicy: Local",
        )
        .replace("']}", "'], nodeName: n2}");
    for (service, is_served) in [(all, true), (local, false)] {
        in_netns(|| check_loopback(&service, is_served));
    }
}
