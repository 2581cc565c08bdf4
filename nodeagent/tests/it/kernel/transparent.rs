//! Endpoints that see the client's address through the proxy, on a node with a bridge of pods (U51).

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use kplane_rig::kernel::{in_netns, nft};
use kplane_rig::link::Route;
use kplane_rig::netns::NetNs;
use nix::sys::signal::Signal;

use super::agent::binary;
use super::proxied::{PATIENCE, ends, leads, manifests, signal, start};
use crate::support::eventually;

const WEB: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);

/// Pods on one bridge, and the bridge's own address.
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 10);
const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 11);
const BRIDGE: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);

/// A client behind a link of its own, and the node's end of the link.
const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const UPLINK: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

const SERVER_PORT: u16 = 8080;

/// Connections that stay open.
const OPEN: usize = 50;

/// A host behind a link of the node.
fn host(name: &str, ip: Ipv4Addr, gateway: Ipv4Addr) -> NetNs {
    let ns = NetNs::new(name).unwrap();
    let node = NetNs::current("node").unwrap().netlink().unwrap();
    node.veth(name, &ns, "eth0").unwrap();
    let links = ns.netlink().unwrap();
    links.add_address("eth0", ip.into(), 24).unwrap();
    links.up("eth0").unwrap();
    links.add_route(&Route::default_via(gateway.into())).unwrap();
    ns
}

/// Returns the server, its neighbour on the bridge, and the client.
fn network() -> [NetNs; 3] {
    let node = NetNs::current("node").unwrap();
    let links = node.netlink().unwrap();
    links.up("lo").unwrap();
    links.bridge("br0").unwrap();
    links.add_address("br0", BRIDGE.into(), 24).unwrap();
    links.up("br0").unwrap();
    let pods = [("server", SERVER), ("neighbour", NEIGHBOUR)].map(|(name, ip)| {
        let pod = host(name, ip, BRIDGE);
        links.attach(name, "br0").unwrap();
        pod
    });
    let client = host("client", CLIENT, UPLINK);
    links.add_address("client", UPLINK.into(), 24).unwrap();
    let [server, neighbour] = pods;
    [server, neighbour, client]
}

/// Starts a server that answers each four bytes with its client's address.
fn answer(server: &NetNs) {
    let _inside = server.enter().unwrap();
    let listener = TcpListener::bind((SERVER, SERVER_PORT)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let IpAddr::V4(peer) = stream.peer_addr().unwrap().ip() else {
                    return;
                };
                while stream.read_exact(&mut [0; 4]).is_ok() {
                    if stream.write_all(&peer.octets()).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

fn connect(from: &NetNs) -> TcpStream {
    let _inside = from.enter().unwrap();
    let stream = TcpStream::connect_timeout(&SocketAddr::from((WEB, 80)), PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Returns the address that the server sees.
fn seen(stream: &mut TcpStream) -> Ipv4Addr {
    let mut answer = [0; 4];
    stream.write_all(b"who?").unwrap();
    stream.read_exact(&mut answer).unwrap();
    answer.into()
}

fn objects() -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\nspec: {{clusterIP: {WEB}, clusterIPs: \
         [{WEB}], ports: [{{port: 80}}]}}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: \
         web-x, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}\naddressType: IPv4\nports: [{{name: '', \
         port: {SERVER_PORT}}}]\nendpoints: [{{addresses: [{SERVER}], nodeName: n1}}]\n"
    )
}

fn tables() -> usize {
    nft(&["list", "tables", "ip"], "").matches("kplane-divert").count()
}

fn rules() -> String {
    let output = Command::new("ip").args(["rule", "list"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Neighbours on the bridge keep the node's address, since answers among them would not pass the node. Connections outlive
/// their agent as all others do, and `--cleanup` leaves nothing.
#[test]
fn u51_the_clients_address_stays_through_upgrade_and_drain() {
    in_netns(|| {
        let [server, neighbour, client] = network();
        answer(&server);
        let folder = manifests(&objects());
        let flags = [
            "--backend",
            "userspace",
            "--userspace-transparent",
            "--drain-timeout",
            "60s",
        ];
        let mut agent = start(&folder, &flags);
        agent.until("update applied");
        leads(WEB);
        assert_eq!(seen(&mut connect(&neighbour)), BRIDGE);
        let mut streams: Vec<TcpStream> = (0..OPEN).map(|_| connect(&client)).collect();
        let all_see = |streams: &mut [TcpStream]| {
            let mut all = streams.iter_mut();
            assert!(all.all(|stream| seen(stream) == CLIENT));
        };
        all_see(&mut streams);
        // Both agents have a table for a while.
        let mut next = start(&folder, &flags);
        ends(agent);
        next.until("update applied");
        leads(WEB);
        all_see(&mut streams);
        streams.push(connect(&client));
        all_see(&mut streams);
        assert_eq!(tables(), 1);
        // An agent that drains still gets its endpoints' answers.
        signal(&next, Signal::SIGTERM);
        eventually("new connections are the kernel's", || {
            let ruleset = nft(&["list", "tables", "ip"], "");
            (!ruleset.contains("kplane-capture")).then_some(())
        });
        all_see(&mut streams);
        drop(streams);
        ends(next);
        assert_eq!(tables(), 0);
        assert!(rules().contains("lookup 27504"), "{}", rules());
        let cleaned = binary(&["--cleanup"]).output().unwrap();
        assert!(cleaned.status.success(), "{cleaned:?}");
        assert!(!rules().contains("27504"), "{}", rules());
    });
}
