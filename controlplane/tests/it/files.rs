//! The program with few open files: clients that hold connections block neither status nor
//! readiness.

use std::io::Read as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};

use kplane_http::client::{becomes, get};
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_rig::process::Process;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::loopback::address;
use crate::support::{DEADLINE, Peer, hello};

/// A separate control plane on an address of its own.
struct Program {
    process: Process,
    address: Ipv4Addr,
    _folder: tempfile::TempDir,
}

impl Program {
    /// Starts a control plane that may open this number of files, and waits until it is ready.
    async fn start(files: u32) -> Self {
        let address = address();
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {files} && exec \"$0\" \"$@\"")]);
        command.arg(env!("CARGO_BIN_EXE_kp-controlplane"));
        command.arg("--manifests").arg(folder.path());
        for (flag, port) in [("agent", 7465), ("status", 7466), ("http", 7467)] {
            command.arg(format!("--{flag}-listen={address}:{port}"));
        }
        command.stderr(Stdio::piped());
        let program = Self {
            process: Process::start(command).unwrap(),
            address,
            _folder: folder,
        };
        becomes(program.at(7467), "/readyz", 200).await;
        program
    }

    fn at(&self, port: u16) -> SocketAddr {
        (self.address, port).into()
    }

    async fn silent(&self, port: u16, count: usize) -> Vec<TcpStream> {
        let mut streams = Vec::new();
        for _ in 0..count {
            streams.push(TcpStream::connect(self.at(port)).await.unwrap());
        }
        streams
    }

    /// Returns a number from the metrics.
    async fn metric(&self, name: &str) -> f64 {
        let metrics = get(self.at(7467), "/metrics").await.unwrap().body;
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.expect(&metrics).trim().parse().unwrap()
    }

    async fn fleet(&self) -> pb::Fleet {
        let address = format!("http://{}", self.at(7466));
        let asked = async {
            let mut client = StatusServiceClient::connect(address).await.unwrap();
            let answer = client.get_fleet(pb::GetFleetRequest::default()).await;
            answer.unwrap().into_inner()
        };
        timeout(DEADLINE, asked).await.unwrap()
    }

    /// Returns its log, once it has ended.
    fn log(mut self) -> String {
        self.process.kill().unwrap();
        let mut log = String::new();
        let mut stderr = self.process.stderr.take().unwrap();
        stderr.read_to_string(&mut log).unwrap();
        log
    }
}

#[tokio::test]
async fn silent_connections_take_neither_status_nor_readiness_nor_agents_away() {
    kplane_http::raise_file_limit().unwrap();
    let program = Program::start(1_024).await;
    let mut agent = Peer::connect(program.at(7465), hello("n0")).await.unwrap();
    for count in [1_010, 5_000] {
        let silent = program.silent(7465, count).await;
        assert_eq!(get(program.at(7467), "/readyz").await.unwrap().status, 200);
        Peer::connect(program.at(7465), hello("n1")).await.unwrap();
        assert_eq!(program.fleet().await.nodes.len(), 2);
        agent.is_answered().await;
        drop(silent);
    }
    // Nothing failed for lack of files, so nothing was retried in a loop.
    let failures = "kplane_controlplane_accept_failures_total{port=\"agents\"}";
    assert!(program.metric(failures).await < 0.5);
    let log = program.log();
    assert!(log.contains("allows fewer agents"), "{log}");
}

#[tokio::test]
async fn without_files_it_pauses_says_so_once_and_recovers() {
    // The limit is too low even for the connections of the status API.
    let program = Program::start(48).await;
    let silent = program.silent(7466, 100).await;
    let agents = program.silent(7465, 100).await;
    drop((silent, agents));
    becomes(program.at(7467), "/readyz", 200).await;
    let mut failures = 0.0;
    for port in ["agents", "http", "status"] {
        let name = format!("kplane_controlplane_accept_failures_total{{port=\"{port}\"}}");
        failures += program.metric(&name).await;
    }
    assert!(failures >= 1.0);
    let _agent = Peer::connect(program.at(7465), hello("n1")).await.unwrap();
    assert_eq!(program.fleet().await.nodes.len(), 1);
    let log = program.log();
    let said = log.matches("cannot accept connections for").count();
    assert!((1..=3).contains(&said), "once for each port: {log}");
    // A loop without a pause would cause far more.
    assert!(failures < 1_000.0, "{failures}");
}
