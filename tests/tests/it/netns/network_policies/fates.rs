//! What `kpctl why` tells of packets to Services where nodes enforce policies: the lines of the truth tables, which packets
//! meet as well.

use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use kplane_agents::hub::Hub;
use kplane_desired_state::admission::{Admission, Enforce};
use kplane_desired_state::index::CliffGuard;
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::{Batch, Event};
use kplane_model::Family;
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_server::StatusService as _;
use kplane_status_api::server::StatusServer;
use kplane_tests::support::cluster::{apply, node};
use kplane_tests::support::{node_name, svc};
use tokio::runtime::Builder;
use tokio::sync::mpsc;
use tonic::Request;

use super::readings::End;
use super::{Case, NETWORK_POLICIES, PODS, Question, cases, everything, objects};

pub(crate) fn np14_why_tells_what_packets_meet() -> Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let sections = [&NETWORK_POLICIES[..], &["tiers"]].concat();
    let mut reported = 0;
    for case in &cases(&sections) {
        let questions = Question::all(&case.lines)?;
        let services: Vec<_> = questions.iter().filter_map(|of| Some((of, service(of)?))).collect();
        if !services.is_empty() {
            runtime.block_on(tell(case, &services))?;
            reported += services.len();
        }
    }
    ensure!(reported >= 30, "only {reported} questions");
    Ok(())
}

/// Returns the Service that a question is about, and the node that handles the packet; `None` also if a Pod asks for the node
/// port of another node, which takes it for a client outside.
fn service(question: &Question) -> Option<(u16, u8)> {
    let (_, to) = question.line.split_once('>')?;
    let of_pod = PODS.iter().find(|(name, ..)| *name == question.from);
    let of_node = question.from.strip_prefix("node");
    let home = of_pod.map(|pod| pod.1).or(of_node.and_then(|of| of.parse().ok()));
    let (service, asked) = match to.split(['/', ' ']).next()? {
        "svc1" => (1, home?),
        "svc2" => (2, home?),
        "port1" => (1, 1),
        "port2" => (2, 1),
        "far1" => (1, 2),
        "far2" => (2, 2),
        _ => return None,
    };
    (home.unwrap_or(asked) == asked).then_some((service, asked))
}

/// Asks a control plane that has the case's policies.
async fn tell(case: &Case, questions: &[(&Question, (u16, u8))]) -> Result<()> {
    let (sink, batches) = mpsc::channel(1);
    let admission = Admission {
        network_policies: Some(Enforce::On),
        ..Admission::default()
    };
    let (hub, index) = Hub::new(1, "test", admission, CliffGuard::default(), batches);
    tokio::spawn(index);
    let mut events: Vec<Event> = Kind::WITH_POLICIES.map(Event::Init).to_vec();
    let there = [everything()?, objects(&case.policies())?].concat();
    for object in [1, 2].map(node).iter().chain(&there) {
        events.push(apply(object)?);
    }
    events.extend(Kind::WITH_POLICIES.map(Event::InitDone));
    let observed_at = SystemTime::now();
    sink.send(Batch {
        events,
        observed_at,
    })
    .await?;
    let mut head = hub.store().head();
    head.wait_for(|head| head.synced).await?;
    let server = StatusServer::new(hub);
    for (question, (number, node)) in questions {
        let reported = server
            .explain(Request::new(request(question, *number, *node)))
            .await
            .with_context(|| question.line.clone())?
            .into_inner();
        let expected = if question.through {
            pb::PacketOutcome::Reaches
        } else {
            pb::PacketOutcome::Denied
        };
        ensure!(
            reported.outcome() == expected,
            "{}: {} ({}): {}, {:#?}",
            case.name,
            question.line,
            question.to,
            reported.summary,
            reported.steps
        );
    }
    Ok(())
}

fn request(question: &Question, service: u16, node: u8) -> pb::ExplainRequest {
    let from = question.from.as_str();
    let mut request = pb::ExplainRequest {
        namespace: "test".to_owned(),
        name: svc(service).name,
        to: question.to.to_string(),
        ..pb::ExplainRequest::default()
    };
    if let Some((name, .., namespace, _)) = PODS.iter().find(|(name, ..)| *name == from) {
        request.set_sender(pb::PacketSender::Pod);
        request.sender_pod = format!("{namespace}/{name}");
    } else if from.starts_with("node") {
        request.set_sender(pb::PacketSender::Node);
        request.node = node_name(node);
    } else {
        let family = Family::of(question.to.ip());
        request.set_sender(pb::PacketSender::Outside);
        request.sender_address = End::named(from, family).ip.to_string();
        request.node = node_name(node);
    }
    request
}
