//! The real program without any right: Services at loopback addresses, and node ports.

mod files;
mod handover;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use kplane_rig::loopback::unused;
use kplane_rig::process::Process;

use crate::support::eventually;

const PATIENCE: Duration = Duration::from_secs(60);

/// The user "nobody".
const NOBODY: u32 = 65_534;

/// Starts a server that sends its port and ends the connection; it ends with the test.
fn server(port: u16) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(&at.port().to_be_bytes());
        }
    });
    at
}

/// Returns which server answered.
fn answer(to: SocketAddr) -> std::io::Result<u16> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut port = [0; 2];
    stream.read_exact(&mut port)?;
    Ok(u16::from_be_bytes(port))
}

/// Writes a Service whose addresses no other test has: its ClusterIP ends with the two bytes of the node port.
fn write_service(folder: &Path, node_port: u16, endpoints: &[SocketAddr]) {
    let [high, low] = node_port.to_be_bytes();
    let slices: String = endpoints
        .iter()
        .enumerate()
        .map(|(number, at)| {
            let (ip, port) = (at.ip(), at.port());
            format!(
                "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: web-{number}, namespace: \
                 shop, labels: {{kubernetes.io/service-name: web}}}}\naddressType: IPv4\nports: [{{name: http, port: \
                 {port}}}]\nendpoints: [{{addresses: [{ip}]}}]\n"
            )
        })
        .collect();
    let service = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\nspec: {{type: NodePort, clusterIP: \
         10.96.{high}.{low}, ports: [{{name: http, port: 80, nodePort: {node_port}}}]}}\n{slices}"
    );
    let file = folder.join("web.yaml");
    let new = folder.join("web.yaml.new");
    std::fs::write(&new, service).unwrap();
    std::fs::rename(new, file).unwrap();
}

/// Starts the program, as nobody if the test may do so.
fn start(folder: &Path, manifests: &Path) -> Process {
    start_with(folder, manifests, &[])
}

/// The same with more flags.
fn start_with(folder: &Path, manifests: &Path, flags: &[String]) -> Process {
    let program = program(folder, manifests);
    run(Command::new(program), folder, manifests, flags)
}

/// Returns a copy of the program, which nobody may read and run.
fn program(folder: &Path, manifests: &Path) -> PathBuf {
    let program = folder.join("kp-nodeagent");
    // Another agent may run it already.
    if !program.exists() {
        // Not by this process: a child of another test would hold the copy open for writing, and nobody may run it then.
        let mut copy = Command::new("cp");
        copy.arg(env!("CARGO_BIN_EXE_kp-nodeagent")).arg(&program);
        assert!(copy.status().unwrap().success());
    }
    for path in [folder, manifests, &program] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
    }
    program
}

/// Runs the program, which `command` names.
fn run(mut command: Command, folder: &Path, manifests: &Path, flags: &[String]) -> Process {
    command.args([
        "--standalone",
        "--backend",
        "userspace",
        "--hostname-override",
        "laptop",
    ]);
    command.args([
        "--nodeport-addresses",
        "127.0.0.0/8",
        "--status-bind-address",
        "",
    ]);
    command.args(["--healthz-bind-address", "", "--metrics-bind-address", ""]);
    command.arg("--manifests").arg(manifests);
    command.arg("--hosts-file").arg(folder.join("hosts"));
    command.args(flags);
    command.current_dir("/").stderr(Stdio::null()).stdout(Stdio::null());
    if nix::unistd::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    Process::start(command).unwrap()
}

/// Returns the address at which the file lists a port of the Service.
fn listed(folder: &Path) -> Option<SocketAddr> {
    let text = std::fs::read_to_string(folder.join("hosts")).ok()?;
    let line = text.lines().find(|line| line.contains("http port 80/TCP"))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn u51_a_process_without_rights_serves_on_loopback() {
    let folder = tempfile::tempdir().unwrap();
    let manifests = folder.path().join("manifests");
    std::fs::create_dir(&manifests).unwrap();
    let servers = [server(0), server(0)];
    let (node_port, dead) = (unused(), unused());
    write_service(
        &manifests,
        node_port.port(),
        &[servers[0], servers[1], dead],
    );
    let agent = start(folder.path(), &manifests);
    let at = eventually("the Service is listed", || listed(folder.path()));
    // The end of the ClusterIP; port 80 needs a right, unless the machine gives it to everybody.
    let [high, low] = node_port.port().to_be_bytes();
    assert_eq!(at.ip(), Ipv4Addr::new(127, 96, high, low));
    assert!([80, 10_080].contains(&at.port()), "{at}");
    let ports = servers.map(|at| at.port());
    for to in [at, node_port] {
        let mut answers: Vec<u16> = (0..20).map(|_| answer(to).unwrap()).collect();
        answers.sort_unstable();
        answers.dedup();
        let mut expected = ports.to_vec();
        expected.sort_unstable();
        assert_eq!(
            answers, expected,
            "{to}: no connection reaches the dead endpoint"
        );
    }

    write_service(&manifests, node_port.port(), &[servers[1]]);
    eventually("the endpoint is gone", || {
        (0..6).all(|_| answer(at).is_ok_and(|port| port == ports[1])).then_some(())
    });
    // U10: without endpoints, there is no listener.
    write_service(&manifests, node_port.port(), &[]);
    eventually("clients are refused", || {
        let refused =
            |to| answer(to).is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused);
        (refused(at) && refused(node_port)).then_some(())
    });
    write_service(&manifests, node_port.port(), &servers);
    eventually("the endpoints are back", || answer(at).ok());
    drop(agent);
    eventually("the process has ended", || answer(at).err());
}

#[test]
fn a_port_of_another_process_is_taken_once_it_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let manifests = folder.path().join("manifests");
    std::fs::create_dir(&manifests).unwrap();
    let at = server(0);
    let node_port = unused();
    let other = TcpListener::bind(node_port).unwrap();
    write_service(&manifests, node_port.port(), &[at]);
    let _agent = start(folder.path(), &manifests);
    // The rest of the Service is served meanwhile.
    let cluster_ip = eventually("the Service is listed", || listed(folder.path()));
    assert_eq!(answer(cluster_ip).unwrap(), at.port());
    drop(other);
    eventually("the node port is served", || {
        answer(node_port).ok().filter(|port| *port == at.port())
    });
}
