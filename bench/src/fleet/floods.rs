//! Changes while hostile clients of another loopback address flood the port of agents. They have a thread of their own,
//! and send at bounded rates, so that what they cost this machine is mostly what they cost the control plane.

#![expect(clippy::unwrap_used, reason = "a benchmark may panic")]

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::workload::{show, shown};
use anyhow::{Context as _, Result};
use kplane_rig::flood::{PREFACE, client_hello, opened_and_reset};
use kplane_tests::fleet::{
    DEADLINE, Fleet, Size, agent_address, identity, metrics_address, percentiles,
};
use kplane_tls::{ClientConfig, greet};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};

/// Changes of one endpoint.
pub(crate) const CHANGES: usize = 20;
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
    socket.connect(agent_address(0)).await
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
async fn connections() -> Result<usize> {
    let mut stream = TcpStream::connect(metrics_address(0)).await?;
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let prefix = "kplane_controlplane_connections{port=\"agents\"} ";
    let count = answer.lines().find_map(|line| line.strip_prefix(prefix));
    Ok(count.context("no such metric")?.parse()?)
}

/// Measures changes without a flood and beside each.
pub(crate) async fn beside_floods(agents: u32) -> Result<()> {
    let size = Size {
        agents,
        services: 1,
        replicas: 1,
        reports: true,
    };
    let mut fleet = Fleet::start(crate::program("kp-controlplane")?, size).await?;
    fleet.connect().await?;
    let config = identity(fleet.certs(), "n0")?;
    let hello = Arc::new(client_hello(Arc::clone(&config)).await?);
    let mut calm = None;
    for flood in Flood::ALL {
        let flooding = Flooding::start(flood, Arc::clone(&hello), Arc::clone(&config));
        sleep(BUILD_UP).await;
        let (begun, cpu) = (Instant::now(), fleet.usage()?.cpu);
        let (latencies, _) = fleet.change(CHANGES).await?;
        let cpu = (fleet.usage()?.cpu - cpu).div_duration_f64(begun.elapsed());
        let open = connections().await?;
        drop(flooding);
        let times = percentiles(&latencies);
        let moved = times[2].div_duration_f64(*calm.get_or_insert(times[2]));
        println!(
            "{:>12} | {open:>11} {:>11} |                       {} {:>7.2}x",
            flood.name(),
            show(Duration::from_secs_f64(cpu)),
            shown(&times),
            moved,
        );
        let left = async {
            while connections().await? > usize::try_from(agents)? {
                sleep(Duration::from_millis(100)).await;
            }
            Ok::<_, anyhow::Error>(())
        };
        timeout(DEADLINE, left).await??;
    }
    Ok(())
}
