//! Changes while hostile clients of another loopback address flood the port of agents. They have a thread of their own,
//! and send at bounded rates, so that what they cost this machine is mostly what they cost the control plane.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kplane_rig::flood::{PREFACE, client_hello, opened_and_reset};
use kplane_rig::usage;
use kplane_tests::bench::workload::{percentiles, show};
use kplane_tls::{ClientConfig, ClientFiles, Files as _, KeyPair, greet};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};

use super::{AGENT_PORT, DEADLINE, Fleet};

/// The address from which floods come.
const ELSEWHERE: [u8; 4] = [127, 0, 0, 2];
/// Time after which a flood has its full strength.
const BUILD_UP: Duration = Duration::from_secs(3);
/// Handshakes that the flood begins a second: twice as many as an address may have.
const HANDSHAKES: u32 = 2_000;
/// Connections of the slow-loris flood: twice as many as may wait.
const TRICKLES: u32 = 2_048;
/// Connections of the reset flood at a time, and streams that each of them tries to open.
const RESETS: [u32; 2] = [8, 2_000];

/// A kind of hostile clients.
#[derive(Clone, Copy, Debug)]
enum Flood {
    None,
    /// Clients that begin a handshake, have the server do its part, and go.
    Handshakes,
    /// Clients that send a handshake byte by byte.
    SlowLoris,
    /// Clients with the certificate of a node that open streams and reset them.
    Resets,
}

impl Flood {
    const ALL: [Self; 4] = [Self::None, Self::Handshakes, Self::SlowLoris, Self::Resets];

    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Handshakes => "handshakes",
            Self::SlowLoris => "slow loris",
            Self::Resets => "resets",
        }
    }

    /// Floods until it is told to stop.
    async fn run(self, hello: Arc<Vec<u8>>, config: Arc<ClientConfig>) {
        let mut clients = JoinSet::new();
        match self {
            Self::None => {}
            Self::Handshakes => {
                let mut turns = interval(Duration::from_secs(1) / HANDSHAKES);
                loop {
                    turns.tick().await;
                    clients.spawn(begins_a_handshake(Arc::clone(&hello)));
                    while clients.try_join_next().is_some() {}
                }
            }
            Self::SlowLoris => {
                for _ in 0..TRICKLES {
                    clients.spawn(trickles(Arc::clone(&hello)));
                    sleep(BUILD_UP / TRICKLES).await;
                }
            }
            Self::Resets => {
                for _ in 0..RESETS[0] {
                    clients.spawn(resets(Arc::clone(&config)));
                }
            }
        }
        std::future::pending::<()>().await;
    }
}

async fn connect() -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((ELSEWHERE, 0).into())?;
    let to = SocketAddr::from(([127, 0, 0, 1], AGENT_PORT));
    socket.connect(to).await
}

async fn begins_a_handshake(hello: Arc<Vec<u8>>) {
    let begin = async {
        let mut stream = connect().await?;
        stream.write_all(&hello).await?;
        stream.read_u8().await
    };
    // The port may refuse the connection.
    let _ = timeout(Duration::from_secs(1), begin).await;
}

async fn trickles(hello: Arc<Vec<u8>>) {
    loop {
        if let Ok(mut stream) = connect().await {
            for byte in &*hello {
                if stream.write_all(&[*byte]).await.is_err() {
                    break;
                }
                sleep(Duration::from_millis(500)).await;
            }
        }
        sleep(Duration::from_secs(1)).await;
    }
}

async fn resets(config: Arc<ClientConfig>) {
    loop {
        let flood = async {
            let mut wire = greet(connect().await?, Some(Arc::clone(&config)), "localhost").await?;
            wire.write_all(PREFACE).await?;
            for stream in (1..).step_by(2).take(usize::try_from(RESETS[1]).unwrap()) {
                wire.write_all(&opened_and_reset(stream)).await?;
            }
            wire.shutdown().await
        };
        // The control plane ends the connection.
        let _ = timeout(DEADLINE, flood).await;
        sleep(Duration::from_millis(50)).await;
    }
}

/// A thread that floods, until the value is dropped.
struct Flooding {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Flooding {
    fn start(flood: Flood, hello: Arc<Vec<u8>>, config: Arc<ClientConfig>) -> Self {
        let (stop, mut stopped) = watch::channel(false);
        // A thread is in the network of the thread that starts it.
        let thread = std::thread::spawn(move || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            runtime.enable_all().build().unwrap().block_on(async {
                tokio::select! {
                    () = flood.run(hello, config) => {}
                    _ = stopped.wait_for(|stopped| *stopped) => {}
                }
            });
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Flooding {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Returns the number of connections at the port of agents.
async fn connections() -> usize {
    let http = SocketAddr::from(([127, 0, 0, 1], 7_445));
    let mut stream = TcpStream::connect(http).await.unwrap();
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let prefix = "kplane_controlplane_connections{port=\"agents\"} ";
    let count = answer.lines().find_map(|line| line.strip_prefix(prefix));
    count.unwrap().parse().unwrap()
}

fn config(certs: &Path, node: &str) -> Arc<ClientConfig> {
    let pair = |kind: &str| certs.join(format!("nodes/{node}.{kind}"));
    let files = ClientFiles {
        authorities: certs.join("ca.crt"),
        pair: Some(KeyPair {
            certificate: pair("crt"),
            key: pair("key"),
        }),
    };
    files.load().unwrap()
}

/// Measures changes without a flood and beside each.
pub(super) async fn beside_floods(agents: u32) {
    let mut fleet = Fleet::start(agents, 1).await;
    fleet.connect(agents).await;
    let config = config(&fleet.certs, "n0");
    let hello = Arc::new(client_hello(Arc::clone(&config)).await.unwrap());
    let pid = [fleet.plane.0.id()];
    let mut calm = None;
    for flood in Flood::ALL {
        let flooding = Flooding::start(flood, Arc::clone(&hello), Arc::clone(&config));
        sleep(BUILD_UP).await;
        let (begun, cpu) = (Instant::now(), usage::cpu(&pid).unwrap());
        let (latencies, _) = fleet.change().await;
        let cpu = (usage::cpu(&pid).unwrap() - cpu).div_duration_f64(begun.elapsed());
        let open = connections().await;
        drop(flooding);
        let p99 = latencies[(latencies.len() - 1) * 99 / 100];
        let moved = p99.div_duration_f64(*calm.get_or_insert(p99));
        println!(
            "{:>12} | {open:>11} {:>11} |                       {} {:>7.2}x",
            flood.name(),
            show(Duration::from_secs_f64(cpu)),
            percentiles(&latencies),
            moved,
        );
        let left = async {
            while connections().await > usize::try_from(agents).unwrap() {
                sleep(Duration::from_millis(100)).await;
            }
        };
        timeout(DEADLINE, left).await.unwrap();
    }
}
