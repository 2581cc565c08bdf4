//! An agent that may open few files (U15).

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use kplane_rig::loopback::unused;
use kplane_rig::process::Process;

use super::handover::{connect, echo, exchange};
use super::{listed, program, run};
use crate::support::eventually;

/// The limit of open files.
const FILES: u32 = 64;

/// Clients that come at once: each connection takes two files, and four while the kernel moves data.
const CLIENTS: usize = 100;

/// Bytes from which on the kernel moves data through a pipe, and more.
const MUCH: usize = 200 * 1024;

fn service(name: &str, protocol: &str, node_port: u16, endpoint: SocketAddr) -> String {
    let (ip, port) = (endpoint.ip(), endpoint.port());
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\nspec: {{type: NodePort, clusterIP: \
         10.96.77.{}, ports: [{{name: http, port: 80, protocol: {protocol}, nodePort: {node_port}}}]}}\n---\napiVersion: \
         discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: {name}-1, namespace: shop, labels: \
         {{kubernetes.io/service-name: {name}}}}}\naddressType: IPv4\nports: [{{name: http, protocol: {protocol}, port: \
         {port}}}]\nendpoints: [{{addresses: [{ip}]}}]\n",
        name.len()
    )
}

fn start_limited(folder: &Path, manifests: &Path) -> Process {
    let program = program(folder, manifests);
    let mut command = std::process::Command::new("sh");
    let limit = format!("ulimit -n {FILES}; exec \"$0\" \"$@\"");
    command.args(["-c", &limit]).arg(program);
    run(command, folder, manifests, &[])
}

fn udp_echo() -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((count, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..count], from);
        }
    });
    at
}

/// Uses as many files as the agent gives: connections with much data, and flows.
fn flood(to: SocketAddr, udp: SocketAddr) -> (Vec<TcpStream>, Vec<UdpSocket>) {
    let clients: Vec<TcpStream> = (0..CLIENTS)
        .filter_map(|_| {
            let mut stream = connect(to).ok()?;
            stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            stream.set_nonblocking(true).unwrap();
            // Nobody reads the answers.
            let _ = stream.write(&vec![0; MUCH]);
            Some(stream)
        })
        .collect();
    let flows = (0..CLIENTS).map(|_| {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let _ = socket.send_to(b"hello", udp);
        socket
    });
    (clients, flows.collect())
}

#[test]
fn u15_an_agent_without_files_recovers_within_a_second_and_other_services_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let manifests = folder.path().join("manifests");
    std::fs::create_dir(&manifests).unwrap();
    let [web, other, dns] = [unused(), unused(), unused()];
    let all = [
        service("web", "TCP", web.port(), echo()),
        service("other", "TCP", other.port(), echo()),
        service("lookup", "UDP", dns.port(), udp_echo()),
    ];
    std::fs::write(manifests.join("all.yaml"), all.concat()).unwrap();
    let mut agent = start_limited(folder.path(), &manifests);
    eventually("the Services are listed", || {
        let ended = agent.try_wait().unwrap();
        assert!(ended.is_none(), "the agent has ended: {ended:?}");
        listed(folder.path())
    });
    for _ in 0..5 {
        let (clients, flows) = flood(web, dns);
        // One Service's clients take no files that are for the rest.
        for _ in 0..20 {
            // With eight connections in all, the Service has its share until the one before has ended.
            eventually("another Service is served", || {
                let mut stream = connect(other).ok()?;
                exchange(&mut stream).ok()
            });
        }
        assert!(agent.try_wait().unwrap().is_none(), "the agent has ended");
        drop((clients, flows));
        let start = Instant::now();
        let mut stream = eventually("a new client is served", || {
            let mut stream = connect(web).ok()?;
            exchange(&mut stream).ok()?;
            Some(stream)
        });
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "{:?}",
            start.elapsed()
        );
        // Much data passes as well: the kernel moves it if there are files for a pipe, or else the agent.
        let mut sender = stream.try_clone().unwrap();
        let sent = std::thread::spawn(move || sender.write_all(&vec![7; MUCH]));
        let mut back = vec![0; MUCH];
        stream.read_exact(&mut back).unwrap();
        sent.join().unwrap().unwrap();
        assert!(back.iter().all(|byte| *byte == 7));
    }
}
