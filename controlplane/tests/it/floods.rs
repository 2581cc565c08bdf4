//! Floods at a port with TLS: peers that trickle bytes, connections and streams that are opened and reset, more
//! handshakes than an address may have. An agent beside them gets its changes, and what the floods hold is bounded.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kp_controlplane::app::Bound;
use kplane_agents::connection_limits::Limits;
use kplane_agents::identity;
use kplane_desired_state::publish::{Publication, Published};
use kplane_http::client::{get, until};
use kplane_model::{Endpoint, EndpointAddr, ServiceKey, ServicePort};
use kplane_rig::flood::{HEADERS, PREFACE, client_hello, opened, opened_and_reset};
use kplane_rig::usage;
use kplane_tls::{ClientConfig, ClientFiles, Files as _, Wire, greet};
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use crate::support::alone::is_alone;
use crate::support::secure::Certs;
use crate::support::{DEADLINE, Peer, closed, hello};

/// The address from which floods come.
const ELSEWHERE: [u8; 4] = [127, 0, 0, 2];
/// Connections of a flood that are open at a time.
const CROWD: usize = 200;
/// Most connections of agents beside a flood.
const OTHERS: usize = 8;
/// Most memory that a flood may cost this process, control plane and flood together.
const MEMORY: u64 = 64 << 20;

const LIMITS: Limits = Limits {
    connections: 128,
    per_address: 64,
    waiting: 64,
    waiting_per_address: 32,
    handshakes_per_second: 1_000,
    snapshots_per_second: 500,
};

/// A control plane, and an agent that is connected.
struct Stage {
    certs: Certs,
    bound: Bound,
    bystander: Peer,
}

impl Stage {
    async fn build(limits: Limits) -> Self {
        let certs = Certs::new(&["n1", "n2", "n3"], &[]);
        let bound = certs.control_plane(limits, identity::AuthenticatorConfig::default()).await;
        let wire = wire(
            &certs,
            "n1",
            TcpStream::connect(agents(&bound)).await.unwrap(),
        )
        .await;
        let bystander = Peer::over(wire, hello("n1")).await.unwrap();
        Self {
            certs,
            bound,
            bystander,
        }
    }

    /// Wants the connected agent to get a change, and another agent to connect.
    async fn serves_others(&mut self) {
        static SERVICES: AtomicU64 = AtomicU64::new(0);
        let number = SERVICES.fetch_add(1, Ordering::Relaxed);
        let key = ServiceKey::sample("shop", &format!("svc-{number}"));
        let ready = Endpoint::ready(EndpointAddr::new([10, 0, 0, 1], 8080));
        let published = Published::new(ServicePort::sample(key.clone()), &[ready]);
        let publication = Publication::sample(vec![(key, Some(published))], vec![]);
        let revision = self.bound.hub().store().publish(publication);
        self.bystander.reach(revision).await;
        let stream = TcpStream::connect(agents(&self.bound)).await.unwrap();
        let newcomer = wire(&self.certs, "n3", stream).await;
        Peer::over(newcomer, hello("n3")).await.unwrap();
    }

    /// Returns a number from the metrics.
    async fn metric(&self, series: &str) -> usize {
        let metrics = get(self.bound.http_addr.unwrap(), "/metrics").await.unwrap();
        let value = metrics
            .body
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.unwrap().parse().unwrap()
    }

    /// Wants the number of connections to be within the limits.
    async fn is_bounded(&self) {
        let open = "kplane_controlplane_connections{port=\"agents\"}";
        let count = self.metric(open).await;
        assert!(count <= LIMITS.per_address + OTHERS, "{count} connections");
    }

    /// Waits until the flood has no connection any more.
    async fn calms_down(&mut self) {
        // The clients that connected meanwhile leave at some time, too.
        let open = "kplane_controlplane_connections{port=\"agents\"} 1";
        let calm = until(self.bound.http_addr.unwrap(), "/metrics", |reply| {
            reply.is_some_and(|reply| reply.body.lines().any(|line| line == open))
        });
        calm.await;
        self.bystander.is_answered().await;
    }
}

fn agents(bound: &Bound) -> SocketAddr {
    bound.agent_addr.unwrap()
}

fn client(certs: &Certs, node: &str) -> Arc<ClientConfig> {
    let files = ClientFiles {
        authorities: certs.file("ca.crt"),
        pair: Some(certs.pair(&format!("nodes/{node}"))),
    };
    files.load().unwrap()
}

/// Performs a node's handshake.
async fn wire(certs: &Certs, node: &str, stream: TcpStream) -> Box<dyn Wire> {
    let greeted = greet(stream, Some(client(certs, node)), "localhost");
    greeted.await.unwrap()
}

/// Connects from the address of floods.
async fn from_elsewhere(to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((ELSEWHERE, 0).into())?;
    socket.connect(to).await
}

#[tokio::test]
async fn connections_that_trickle_a_handshake_hold_up_nobody() {
    let mut stage = Stage::build(LIMITS).await;
    let to = agents(&stage.bound);
    let hello = client_hello(client(&stage.certs, "n2")).await.unwrap();
    let trickles: Vec<_> = (0..CROWD)
        .map(|_| {
            let hello = hello.clone();
            tokio::spawn(async move {
                let mut stream = from_elsewhere(to).await.unwrap();
                for byte in hello {
                    if stream.write_all(&[byte]).await.is_err() {
                        break;
                    }
                    sleep(Duration::from_millis(50)).await;
                }
                closed(&mut stream).await;
            })
        })
        .collect();
    // Those that are too many make room; the others run out of time, whatever they send meanwhile.
    while trickles.iter().any(|trickle| !trickle.is_finished()) {
        stage.is_bounded().await;
        stage.serves_others().await;
        sleep(Duration::from_millis(50)).await;
    }
    for trickle in trickles {
        trickle.await.unwrap();
    }
    // Some made room before they had sent anything; or others were refused.
    let mut turned_away = 0;
    for reason in ["displaced", "refused"] {
        let closed = "kplane_controlplane_connections_closed_total";
        let name = format!("{closed}{{port=\"agents\",reason=\"{reason}\"}}");
        turned_away += stage.metric(&name).await;
    }
    assert!(turned_away > 0);
    stage.calms_down().await;
}

#[tokio::test]
async fn connections_that_are_reset_leave_nothing_behind() {
    let mut stage = Stage::build(LIMITS).await;
    let to = agents(&stage.bound);
    let flood = async move {
        for number in 0..2_000 {
            // The port may refuse some: too many are open for a moment.
            let Ok(mut stream) = from_elsewhere(to).await else {
                continue;
            };
            SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
            if number % 2 == 0 {
                let _ = stream.write_all(&[22, 3, 1]).await;
            }
        }
    };
    let flood = AbortOnDropHandle::new(tokio::spawn(flood));
    while !flood.is_finished() {
        stage.is_bounded().await;
        stage.serves_others().await;
        // A node may begin a stream a second, however long the flood takes.
        sleep(Duration::from_secs(1)).await;
    }
    stage.calms_down().await;
    stage.serves_others().await;
}

#[tokio::test]
async fn handshakes_beyond_the_rate_are_refused_and_those_of_others_are_not() {
    // Nothing else can be the reason of a refusal.
    let limits = Limits {
        handshakes_per_second: 10,
        ..Limits::AGENTS
    };
    let mut stage = Stage::build(limits).await;
    let to = agents(&stage.bound);
    let config = client(&stage.certs, "n2");
    let crowd = (0..CROWD).map(|_| {
        let config = Arc::clone(&config);
        tokio::spawn(async move {
            let stream = from_elsewhere(to).await?;
            greet(stream, Some(config), "localhost").await.map(drop)
        })
    });
    let mut refused = 0;
    for handshake in crowd.collect::<Vec<_>>() {
        let handshake = timeout(DEADLINE, handshake).await.unwrap().unwrap();
        refused += usize::from(handshake.is_err());
    }
    assert!(refused > 0, "all {CROWD} handshakes were accepted");
    stage.serves_others().await;
}

/// Waits for the begin of an answer: the stream was a valid one.
async fn is_answered(wire: &mut dyn Wire) {
    let frames = async {
        loop {
            let mut head = [0; 9];
            wire.read_exact(&mut head).await.unwrap();
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; usize::try_from(length).unwrap()];
            wire.read_exact(&mut payload).await.unwrap();
            if head[3] == HEADERS {
                break;
            }
        }
    };
    timeout(DEADLINE, frames).await.unwrap();
}

/// An agent with a certificate that opens streams and resets them at once (CVE-2023-44487).
#[tokio::test]
async fn streams_that_are_reset_at_once_end_their_connection() {
    if !is_alone("floods::streams_that_are_reset_at_once_end_their_connection") {
        return;
    }
    let mut stage = Stage::build(LIMITS).await;
    let to = agents(&stage.bound);
    let own = [std::process::id()];
    let before = usage::memory(&own).unwrap().now;
    let mut streams = 0_usize;
    for _ in 0..20 {
        let stream = from_elsewhere(to).await.unwrap();
        let mut wire = wire(&stage.certs, "n2", stream).await;
        wire.write_all(&[PREFACE, &opened(1)].concat()).await.unwrap();
        is_answered(&mut *wire).await;
        let ended = async {
            for number in (3..).step_by(2).take(50_000) {
                if wire.write_all(&opened_and_reset(number)).await.is_err() {
                    break;
                }
                streams += 1;
            }
        };
        timeout(DEADLINE, ended).await.unwrap();
        closed(&mut *wire).await;
        stage.is_bounded().await;
        stage.serves_others().await;
    }
    let grown = usage::memory(&own).unwrap().now.saturating_sub(before);
    assert!(grown < MEMORY, "{streams} streams cost {grown} bytes");
    stage.calms_down().await;
}
