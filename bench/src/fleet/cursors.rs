//! What agents cost in a control plane without a network: sessions, streams and cursors are the product's, in one process
//! with clients that count what they get.

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use crate::workload::show;
use anyhow::{Context as _, Result, ensure};
use http_body::Frame;
use http_body_util::StreamBody;
use kplane_agents::hub::Hub;
use kplane_agents::identity::{self, AuditLog, Authenticator};
use kplane_agents::streams::AgentServer;
use kplane_desired_state::admission::Admission;
use kplane_desired_state::index::CliffGuard;
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::{Batch, Event};
use kplane_proto::shared::{self, Messages};
use kplane_proto::v1::{self as pb, AgentMessage, agent_message};
use kplane_tests::fleet::{objects, slice};
use kplane_tests::support::cluster::apply;
use kplane_tests::usage;
use prost::Message as _;
use prost::bytes::{BufMut as _, Bytes, BytesMut};
use serde_json::{Value, json};
use shared::AgentService as _;
use tokio::sync::mpsc;
use tokio::time::{interval_at, sleep};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::IntervalStream;
use tonic::{Request, Status};

use super::simulator::{Args, machine};
use super::table;

const HEAD: &str = "\
| agents | memory for each | idle CPU | a change that concerns | messages | CPU | for each message | after |
| -----: | --------------: | -------: | ---------------------- | -------: | --: | ---------------: | ----: |
";
/// Changes of each sort, a second apart.
const CHANGES: u32 = 10;
/// One agent in so many has a Node that changes.
const SHARE: u32 = 100;
/// As of real agents.
const PING: Duration = Duration::from_secs(5);
/// The first byte of an update, after the prefix.
const UPDATE: u8 = 3 << 3 | 2;
/// Length of gRPC's prefix of a message.
const PREFIX: usize = 5;
const DEADLINE: Duration = Duration::from_secs(180);

/// Measures all numbers of agents, each in a process of its own, whose memory is its own.
pub(crate) fn run(args: &Args) -> Result<()> {
    let title = format!("{} Services; {}", args.services, machine()?);
    print!("{title}\n\n{HEAD}");
    let mut rows = String::new();
    for agents in &args.cursors {
        let mut own = Command::new(std::env::current_exe()?);
        own.args(["fleet", "--cursors", &agents.to_string()]);
        own.args(["--services", &args.services.to_string()]);
        let some = kplane_tests::process::output(own)?;
        print!("{some}");
        rows += &some;
    }
    if args.write {
        let text = format!("{title}\n\n{HEAD}{rows}");
        table::write("cargo xtask fleet --cursors", &text)?;
    }
    Ok(())
}

/// Measures so many agents, and prints the rows.
pub(crate) fn measure(agents: u32, services: u32) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let plane = Plane::start(agents, services).await?;
        let before = usage::memory(&[std::process::id()])?.now;
        plane.connect(agents).await?;
        let grown = usage::memory(&[std::process::id()])?.now - before;
        let each = grown / u64::from(agents) / 1_024;
        let idle = plane.cost(|_| None).await?.cpu;
        let sorts = [
            ("all", plane.cost(|n| Some(shared_by_all(n))).await?),
            ("1 %", plane.cost(|n| Some(nodes(n, agents))).await?),
            ("none", plane.cost(|_| Some(needless())).await?),
        ];
        for (sort, cost) in sorts {
            let cpu = cost.cpu.saturating_sub(idle) / CHANGES;
            let messages = cost.messages / u64::from(CHANGES);
            let message = cpu.div_f64(messages.max(1) as f64);
            println!(
                "| {agents} | {each} KiB | {:.2} | {sort} | {messages} | {} | {} | {} |",
                idle.as_secs_f64() / f64::from(CHANGES),
                show(cpu),
                if messages == 0 { "-".to_owned() } else { show(message) },
                show(cost.longest),
            );
        }
        Ok(())
    })
}

/// An endpoint that all agents need.
fn shared_by_all(change: u32) -> Vec<Value> {
    let endpoint = Ipv4Addr::from_bits(Ipv4Addr::new(10, 64, 1, 0).to_bits() + change);
    vec![slice(0, &[endpoint])]
}

/// Nodes, each of which only its agent needs.
fn nodes(change: u32, agents: u32) -> Vec<Value> {
    let node = |number| {
        let range = format!("10.{}.0.0/24", change % 200 + 1);
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("n{number}")},
               "spec": {"podCIDR": range, "podCIDRs": [range]}})
    };
    (0..agents / SHARE).map(|nth| node(nth * SHARE)).collect()
}

/// A Service that no proxy serves.
fn needless() -> Vec<Value> {
    vec![
        json!({"apiVersion": "v1", "kind": "Service", "spec": {"clusterIP": "None"},
                "metadata": {"name": "headless", "namespace": "fleet"}}),
    ]
}

/// Counts of what clients got.
#[derive(Debug, Default)]
struct Counts {
    updates: AtomicU64,
    /// Time from the start until the last update, in microseconds.
    last: AtomicU64,
}

/// The cost of all changes of a sort.
struct Cost {
    cpu: Duration,
    messages: u64,
    /// Time until the last update after a change.
    longest: Duration,
}

/// A control plane without a network.
struct Plane {
    hub: Arc<Hub>,
    server: AgentServer,
    batches: mpsc::Sender<Batch>,
    counts: Arc<Counts>,
    begun: Instant,
}

impl Plane {
    async fn start(agents: u32, services: u32) -> Result<Self> {
        let (batches, inbox) = mpsc::channel(1);
        let admission = Admission::default();
        let (hub, index) = Hub::new(1, "cursors", admission, CliffGuard::default(), inbox);
        tokio::spawn(index);
        hub.streams().snapshots.limit(1_000_000);
        let config = identity::AuthenticatorConfig {
            audit: AuditLog::Off,
            ..identity::AuthenticatorConfig::default()
        };
        let authenticator = Authenticator::open(&config, Arc::clone(&hub), None)?;
        let plane = Self {
            server: AgentServer::new(Arc::clone(&hub), authenticator),
            hub,
            batches,
            counts: Arc::default(),
            begun: Instant::now(),
        };
        let mut events: Vec<Event> = Kind::ALL.into_iter().map(Event::Init).collect();
        for object in objects(agents, services) {
            if let Event::Apply(located) = apply(&object)? {
                events.push(Event::InitApply(located));
            }
        }
        events.extend(Kind::ALL.into_iter().map(Event::InitDone));
        plane.send(events).await?;
        let mut head = plane.hub.store().head();
        head.wait_for(|head| head.synced).await?;
        Ok(plane)
    }

    async fn send(&self, events: Vec<Event>) -> Result<()> {
        let batch = Batch {
            events,
            observed_at: SystemTime::now(),
        };
        self.batches.send(batch).await.context("the index has ended")
    }

    /// Opens the streams of all agents, and waits until each has got everything.
    async fn connect(&self, agents: u32) -> Result<()> {
        let ready = Arc::new(AtomicU64::new(0));
        for number in 0..agents {
            let frames = self.server.sync(Request::new(talk(number))).await?;
            let (counts, begun) = (Arc::clone(&self.counts), self.begun);
            tokio::spawn(listen(frames, counts, begun, Arc::clone(&ready)));
        }
        let began = Instant::now();
        while ready.load(Relaxed) < agents.into() {
            ensure!(began.elapsed() < DEADLINE, "not all agents get an update");
            sleep(Duration::from_millis(20)).await;
        }
        sleep(Duration::from_secs(2)).await;
        Ok(())
    }

    /// Makes a change each second.
    async fn cost(&self, change: impl Fn(u32) -> Option<Vec<Value>>) -> Result<Cost> {
        let own = [std::process::id()];
        let (cpu, messages) = (usage::cpu(&own)?, self.counts.updates.load(Relaxed));
        let mut longest = Duration::ZERO;
        for number in 1..=CHANGES {
            let next = Instant::now() + Duration::from_secs(1);
            let published = self.begun.elapsed();
            if let Some(objects) = change(number) {
                let events: Result<_> = objects.iter().map(apply).collect();
                self.send(events?).await?;
            }
            tokio::time::sleep_until(next.into()).await;
            let last = Duration::from_micros(self.counts.last.load(Relaxed));
            longest = longest.max(last.saturating_sub(published));
        }
        Ok(Cost {
            cpu: usage::cpu(&own)?.saturating_sub(cpu),
            messages: self.counts.updates.load(Relaxed) - messages,
            longest,
        })
    }
}

/// Returns what an agent says: who it is, and every few seconds that it lives.
fn talk(number: u32) -> Messages {
    let hello = agent_message::Kind::Hello(pb::Hello {
        protocol_version: kplane_proto::PROTOCOL_VERSION,
        node_name: format!("n{number}"),
        instance: number.into(),
        ..pb::Hello::default()
    });
    let ping = framed(agent_message::Kind::Ping(pb::Ping { token: 1 }));
    let first = tokio::time::Instant::now() + rand::random_range(Duration::ZERO..PING);
    let pings = IntervalStream::new(interval_at(first, PING)).map(move |_| ping.clone());
    let bytes = tokio_stream::once(framed(hello)).chain(pings);
    let body = StreamBody::new(bytes.map(|bytes| Ok::<_, Status>(Frame::data(bytes))));
    Messages::new(body)
}

fn framed(kind: agent_message::Kind) -> Bytes {
    let message = AgentMessage { kind: Some(kind) };
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.encoded_len()).unwrap_or_default());
    message.encode_raw(&mut framed);
    framed.freeze()
}

/// Counts an agent's updates.
async fn listen<F>(mut frames: F, counts: Arc<Counts>, begun: Instant, ready: Arc<AtomicU64>)
where
    F: tokio_stream::Stream<Item = Result<Bytes, Status>> + Unpin,
{
    let mut is_ready = false;
    while let Some(Ok(frame)) = frames.next().await {
        if frame.get(PREFIX) != Some(&UPDATE) {
            continue;
        }
        if !std::mem::replace(&mut is_ready, true) {
            ready.fetch_add(1, Relaxed);
        }
        counts.updates.fetch_add(1, Relaxed);
        let now = begun.elapsed().as_micros();
        let now = u64::try_from(now).unwrap_or(u64::MAX);
        counts.last.fetch_max(now, Relaxed);
    }
}
