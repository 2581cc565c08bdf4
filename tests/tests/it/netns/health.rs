//! Health check node ports of a whole agent, in a node's namespace.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use kp_nodeagent::config::Config;
use kplane_dataplane::backend::Kind;
use kplane_tests::link::Netlink;
use kplane_tests::netns::NetNs;
use kplane_tests::wait::{DEADLINE, eventually};

use crate::netns::whole::{NodeAgent, standalone};

const PORT: u16 = 31_000;

const MANIFEST: &str = "
apiVersion: v1
kind: Service
metadata: {name: lb, namespace: shop}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  healthCheckNodePort: 31000
  clusterIP: 10.96.0.20
  clusterIPs: [10.96.0.20]
  ports: [{port: 80, protocol: TCP}]
";

/// A23: with ranges in `nodePortAddresses`, a server on each own address in them, as they come and
/// go, and on no other one.
pub(crate) fn a23_health_checks_follow_the_nodes_own_addresses() -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("lb.yaml"), MANIFEST)?;
    let config = config(folder.path(), "192.0.2.0/24")?;
    let node = NetNs::new("node")?;
    let agent = NodeAgent::start(&node, &config)?;
    node.run(|| {
        let failures = |wanted: &[&str]| {
            agent.reports(|report| {
                let mut both = report.failures.iter().zip(wanted);
                report.failures.len() == wanted.len() && both.all(|(f, w)| f.reason.contains(w))
            })
        };
        failures(&["no address of this node serves node ports of this family"])?;
        let links = Netlink::open()?;
        let [first, second, other] =
            ["192.0.2.1", "192.0.2.2", "198.51.100.1"].map(str::parse::<IpAddr>);
        let (first, second, other) = (first?, second?, other?);
        for (link, ip) in [("eth0", first), ("eth1", second), ("eth2", other)] {
            links.bridge(link)?;
            links.up(link)?;
            links.add_address(link, ip, 24)?;
        }
        failures(&[])?;
        answers(first)?;
        answers(second)?;
        ensure!(ask(other).is_err(), "{other} is not chosen");
        // An address that comes back is served again.
        links.delete("eth1")?;
        let gone = || ask(second).err().context("served").map(|_| ());
        eventually(DEADLINE, "the second address is gone", gone)?;
        links.bridge("eth1")?;
        links.up("eth1")?;
        links.add_address("eth1", second, 24)?;
        answers(second)?;
        answers(first)
    })
}

/// A23, A21: with `primary`, a server on the node's own address alone, wherever Service and Node come from.
pub(crate) fn a23_with_primary_health_checks_are_on_the_nodes_own_address() -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("lb.yaml"), MANIFEST)?;
    let node = folder.path().join("node.yaml");
    let write = |ip: &str| {
        let address = format!("[{{type: InternalIP, address: {ip}}}]");
        let text = format!(
            "{{apiVersion: v1, kind: Node, metadata: {{name: node-1}}, status: {{addresses: {address}}}}}"
        );
        std::fs::write(&node, text)
    };
    write("192.0.2.1")?;
    let config = config(folder.path(), "primary")?;
    let node_ns = NetNs::new("node")?;
    node_ns.run(|| {
        let [first, second] = ["192.0.2.1", "192.0.2.2"].map(str::parse::<IpAddr>);
        let (first, second) = (first?, second?);
        let links = Netlink::open()?;
        links.bridge("eth0")?;
        links.up("eth0")?;
        for ip in [first, second] {
            links.add_address("eth0", ip, 24)?;
        }
        let _agent = NodeAgent::start(&node_ns, &config)?;
        answers(first)?;
        ensure!(ask(second).is_err(), "{second} is not the node's");
        write("192.0.2.2")?;
        answers(second)?;
        let gone = || ask(first).err().context("served").map(|_| ());
        eventually(
            DEADLINE,
            "the first address is not the node's any more",
            gone,
        )
    })
}

fn config(manifests: &Path, addresses: &str) -> Result<Config> {
    let flags = [
        &*format!("--nodeport-addresses={addresses}"),
        "--backend=noop",
    ];
    Ok(Config {
        backend: Kind::Noop,
        ..standalone(1, Path::new(""), manifests, &flags)?
    })
}

fn answers(ip: IpAddr) -> Result<()> {
    eventually(DEADLINE, &format!("{ip} answers"), || {
        let answer = ask(ip)?;
        ensure!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        Ok(())
    })
}

fn ask(ip: IpAddr) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::new(ip, PORT), DEADLINE / 10)?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
