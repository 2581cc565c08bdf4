//! Real agents whose userspace proxies avoid an endpoint, and what two replicas of the control plane make of their reports.

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;

use kp_controlplane::app::{Config, Origin, build};
use kplane_agents::peers;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{self as pb, Severity};
use kplane_rig::kernel::in_netns;
use kplane_rig::netns::NetNs;
use tokio::runtime::Runtime;
use tonic::Code;

use super::agent::{Agent, binary};
use crate::support::eventually;

/// An address of this machine that is no loopback address.
const HERE: Ipv4Addr = Ipv4Addr::new(172, 20, 0, 1);

/// Ports of the replicas for agents, and for operators and each other.
const REPLICAS: [(u16, u16); 2] = [(7465, 7466), (7475, 7476)];

/// The agents, and the address of the node port of each.
const NODES: [(&str, Ipv4Addr); 2] = [
    ("n1", Ipv4Addr::new(172, 20, 0, 11)),
    ("n2", Ipv4Addr::new(172, 20, 0, 12)),
];

const NODE_PORT: u16 = 30_080;

fn local(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// Starts a server that accepts connections, and sends a byte to each.
fn server(port: u16) {
    let listener = TcpListener::bind((HERE, port)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = std::io::Write::write_all(&mut stream.unwrap(), b"x");
        }
    });
}

/// Writes a Service with one endpoint for each port.
fn manifests(folder: &Path, ports: [u16; 2]) {
    let service = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\nspec: {{type: NodePort, clusterIP: \
         10.96.0.10, clusterIPs: [10.96.0.10], ports: [{{name: http, port: 80, nodePort: {NODE_PORT}}}]}}\n"
    );
    let slices = ports.map(|port| {
        format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: web-{port}, namespace: shop, \
             labels: {{kubernetes.io/service-name: web}}}}\naddressType: IPv4\nports: [{{name: http, port: {port}}}]\n\
             endpoints: [{{addresses: [{HERE}]}}]\n"
        )
    });
    std::fs::write(folder.join("web.yaml"), service + &slices.concat()).unwrap();
}

/// Starts a replica, which runs until the runtime ends.
async fn replica(manifests: &Path, (agents, status): (u16, u16)) {
    let places = REPLICAS.map(|(_, status)| local(status).to_string().parse().unwrap());
    let mut peers = peers::Config::default();
    peers.flags.peers = places.to_vec();
    let config = Config {
        agent_listen: Some(local(agents)),
        status_listen: Some(local(status)),
        peers,
        ..Config::new(Origin::Manifests(manifests.to_owned()))
    };
    tokio::spawn(build(config).await.unwrap().wait());
}

/// Connects to the node port of an agent so often that its proxy avoids an endpoint that refuses.
fn connect(at: Ipv4Addr) {
    for _ in 0..20 {
        let mut stream = TcpStream::connect((at, NODE_PORT)).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 1, "{at}");
    }
}

/// Returns what a replica says about the endpoints of the Service: severity, nodes and text; `None` if it was asked too
/// often.
fn reported(runtime: &Runtime, status: u16) -> Option<Vec<(Severity, Vec<String>, String)>> {
    let request = pb::DescribeServiceRequest {
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
    };
    let described = runtime.block_on(async {
        let address = format!("http://{}", local(status));
        let mut client = StatusServiceClient::connect(address).await.unwrap();
        match client.describe_service(request).await {
            Ok(described) => Some(described.into_inner()),
            Err(status) if status.code() == Code::ResourceExhausted => None,
            Err(status) => panic!("{status}"),
        }
    });
    Some(
        described?
            .findings
            .into_iter()
            .filter(|finding| finding.code == "EndpointAvoided")
            .map(|finding| (finding.severity(), finding.nodes, finding.text))
            .collect(),
    )
}

#[test]
fn u53_nodes_that_avoid_the_same_endpoint_warn_the_fleet() {
    in_netns(|| {
        let links = NetNs::current("node").unwrap().netlink().unwrap();
        links.up("lo").unwrap();
        links.bridge("eth0").unwrap();
        for at in [HERE, NODES[0].1, NODES[1].1] {
            links.add_address("eth0", at.into(), 24).unwrap();
        }
        links.up("eth0").unwrap();
        let folder = tempfile::tempdir().unwrap();
        // Clients get no such ports, so that the second one is free when a server needs it.
        let (well, dead) = (8081, 8082);
        server(well);
        manifests(folder.path(), [well, dead]);
        let runtime = Runtime::new().unwrap();
        for ports in REPLICAS {
            runtime.block_on(replica(folder.path(), ports));
        }
        let _agents = [0, 1].map(|number: usize| {
            let ((node, at), (port, _)) = (NODES[number], REPLICAS[number]);
            let [plane, range] = [local(port).to_string(), format!("{at}/32")];
            let mut command = binary(&["--control-plane", &plane, "--node-name", node]);
            command.args(["--backend", "userspace-loopback", "--log-format", "json"]);
            command.args(["--nodeport-addresses", &range]);
            command.args(["--healthz-bind-address", "", "--metrics-bind-address", ""]);
            Agent::spawn(command)
        });
        for (node, at) in NODES {
            eventually(&format!("{node} serves"), || {
                TcpStream::connect((at, NODE_PORT)).ok()
            });
        }
        let first = eventually("an answer", || reported(&runtime, REPLICAS[0].1));
        assert_eq!(first, []);

        let says = |severity: Severity, nodes: &[&str]| {
            for (_, status) in REPLICAS {
                let what = format!("{status} says {severity:?} about {nodes:?}");
                eventually(&what, || {
                    let reported = reported(&runtime, status)?;
                    let [(is, of, text)] = reported.as_slice() else {
                        return None;
                    };
                    assert!(text.contains(&format!("{HERE}:{dead}")), "{text}");
                    (*is == severity && of == nodes).then_some(())
                });
            }
        };
        connect(NODES[0].1);
        says(Severity::Info, &["n1"]);
        connect(NODES[1].1);
        says(Severity::Warning, &["n1", "n2"]);

        server(dead);
        eventually("the endpoint is well again", || {
            for (_, at) in NODES {
                connect(at);
            }
            REPLICAS
                .iter()
                .all(|(_, status)| {
                    reported(&runtime, *status).is_some_and(|reported| reported.is_empty())
                })
                .then_some(())
        });
    });
}
