//! An agent's stream: whatever messages it brings, answers or a status; and what it reported can be shown.
//!
//! The bytes are messages, each after its length in two bytes. They go to the control plane twice: once as a stream
//! of their own, so that their Hello counts, and once after the Hello of an agent that has virtual servers and is
//! asked about them.

#![no_main]

use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;

use http_body::Frame;
use http_body_util::StreamBody;
use kplane_agents::hub::Hub;
use kplane_agents::identity::{Authenticator, AuthenticatorConfig};
use kplane_agents::streams::AgentServer;
use kplane_desired_state::admission::Admission;
use kplane_desired_state::index::CliffGuard;
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::manifests::parse;
use kplane_desired_state::source::{Batch, Event};
use kplane_proto::shared::{AgentService, Messages};
use kplane_proto::v1::status_service_server::StatusService;
use kplane_proto::v1::{self as pb, AgentMessage, ServerMessage, agent_message, server_message};
use kplane_status_api::server::StatusServer;
use libfuzzer_sys::fuzz_target;
use prost::Message;
use prost::bytes::{BufMut, Bytes, BytesMut};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Status};

const OBJECTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Node
metadata: {name: n1}
";

/// What the source says: the objects, and nothing else.
static BATCH: LazyLock<Batch> = LazyLock::new(|| {
    let objects = parse(OBJECTS.into()).objects;
    let applied = objects.into_iter().map(|located| Event::InitApply(Box::new(located)));
    let [begun, done] =
        [Event::Init, Event::InitDone].map(|event| Kind::ALL.into_iter().map(event));
    Batch {
        events: begun.chain(applied).chain(done).collect(),
        observed_at: SystemTime::now(),
    }
});

fuzz_target!(|bytes: &[u8]| {
    // Time stands still: it passes only while everything waits.
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build().unwrap();
    runtime.block_on(serve(bytes));
});

async fn serve(bytes: &[u8]) {
    let (hub, _source) = hub().await;
    let authenticator =
        Authenticator::open(&AuthenticatorConfig::default(), Arc::clone(&hub), None).unwrap();
    let agents = AgentServer::new(Arc::clone(&hub), authenticator);

    let mut stream = AgentStream::open(&agents).await;
    messages(bytes).for_each(|message| stream.send(message));
    stream.end().await;

    let mut stream = AgentStream::open(&agents).await;
    let asked = stream.is_asked(&hub).await;
    messages(bytes).for_each(|message| stream.send(message));
    stream.end().await;
    asked.await.unwrap();

    let status = StatusServer::new(hub);
    let fleet = status.get_fleet(Request::new(pb::GetFleetRequest::default()));
    assert!(!fleet.await.unwrap().into_inner().encode_to_vec().is_empty());
}

/// A control plane that knows a Service and a Node, and its source, which must not go away.
async fn hub() -> (Arc<Hub>, mpsc::Sender<Batch>) {
    let (source, batches) = mpsc::channel(1);
    let (admission, guard) = (Admission::default(), CliffGuard::default());
    let (hub, index) = Hub::new(1, "fuzzing", admission, guard, batches);
    tokio::spawn(index);
    source.send(BATCH.clone()).await.unwrap();
    let synced = hub.store().head().wait_for(|head| head.synced).await.is_ok();
    assert!(synced);
    (hub, source)
}

fn messages(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first_chunk()?;
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (message, rest) = rest.split_at(length);
        bytes = rest;
        Some(message)
    })
}

/// An agent's end of a stream.
struct AgentStream {
    outbox: mpsc::UnboundedSender<Result<Frame<Bytes>, Status>>,
    answers: Pin<Box<dyn Stream<Item = Result<Bytes, Status>>>>,
}

impl AgentStream {
    async fn open(agents: &AgentServer) -> Self {
        let (outbox, frames) = mpsc::unbounded_channel();
        let body = StreamBody::new(UnboundedReceiverStream::new(frames));
        let messages = Messages::new(body);
        let answers = agents.sync(Request::new(messages)).await.unwrap();
        Self {
            outbox,
            answers: Box::pin(answers),
        }
    }

    /// Sends a message with gRPC's prefix: not compressed, and its length.
    fn send(&mut self, message: &[u8]) {
        let mut frame = BytesMut::new();
        frame.put_u8(0);
        frame.put_u32(u32::try_from(message.len()).unwrap());
        frame.put_slice(message);
        // The stream may have ended.
        let _ = self.outbox.send(Ok(Frame::data(frame.freeze())));
    }

    fn say(&mut self, kind: agent_message::Kind) {
        self.send(&AgentMessage { kind: Some(kind) }.encode_to_vec());
    }

    /// Says Hello, and has a user ask about the agent's virtual servers; returns when the agent has the question.
    async fn is_asked(&mut self, hub: &Arc<Hub>) -> tokio::task::JoinHandle<()> {
        self.say(agent_message::Kind::Hello(pb::Hello {
            protocol_version: kplane_proto::PROTOCOL_VERSION,
            node_name: "n1".to_owned(),
            ..pb::Hello::default()
        }));
        let servers = Some(pb::ServerStats::default());
        let family = pb::FamilyStatus {
            servers,
            ..pb::FamilyStatus::default()
        };
        self.say(agent_message::Kind::Report(pb::Report {
            families: vec![family],
            ..pb::Report::default()
        }));
        let mut changes = hub.agents().changes();
        let reported = changes.wait_for(|_| !hub.agents().with_servers().is_empty());
        assert!(reported.await.is_ok());
        let status = StatusServer::new(Arc::clone(hub));
        let asked = tokio::spawn(async move {
            let (namespace, name) = ("shop".to_owned(), "web".to_owned());
            let request = Request::new(pb::DescribeServiceRequest { namespace, name });
            status.describe_service(request).await.unwrap();
        });
        while let Some(Ok(answer)) = self.answers.next().await {
            let message = ServerMessage::decode(answer.slice(5..)).unwrap();
            if matches!(message.kind, Some(server_message::Kind::Inspect(_))) {
                break;
            }
        }
        asked
    }

    /// Ends the agent's side, and reads what the control plane has to say.
    async fn end(mut self) {
        drop(self.outbox);
        while self.answers.next().await.is_some() {}
    }
}
