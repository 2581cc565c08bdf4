//! What strangers say, over real gRPC and TCP: an agent with a stolen key, and wrong Services. Measured are bytes of log and
//! of kept texts.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kp_controlplane::app::Bound;
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::{self as pb, AgentMessage, Hello, agent_message, server_message};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::support::alone::is_alone;
use crate::support::{DEADLINE, control_plane, empty, hello, sync};

/// Nearly as much as a message may have.
const LONG: usize = 230_000;

/// The log of this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn begin() -> Self {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false);
        subscriber.with_writer(move || writer.clone()).init();
        log
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    fn lines_with(&self, part: &str) -> usize {
        self.text().lines().filter(|line| line.contains(part)).count()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn channel(bound: &Bound) -> Channel {
    let address = bound.agent_addr.unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    endpoint.connect().await.unwrap()
}

/// Opens a stream; returns its ends and the first answer.
async fn open(
    channel: &Channel,
    hello: Hello,
) -> (
    mpsc::Sender<AgentMessage>,
    Streaming<pb::ServerMessage>,
    server_message::Kind,
) {
    let mut client = AgentServiceClient::new(channel.clone());
    let (send, mut answers) = sync(&mut client, hello).await.unwrap();
    let first = timeout(DEADLINE, answers.message())
        .await
        .unwrap()
        .unwrap()
        .unwrap()
        .kind
        .unwrap();
    (send, answers, first)
}

/// A thief opens stream after stream with a Hello of 230 kB: 46 MB in all.
#[tokio::test]
async fn a_stolen_key_neither_fills_the_log_nor_costs_a_snapshot_each_time() {
    if !is_alone("said::a_stolen_key_neither_fills_the_log_nor_costs_a_snapshot_each_time") {
        return;
    }
    let log = Log::begin();
    let (bound, _folder) = empty(|_| {}).await;
    let channel = channel(&bound).await;
    let start = Instant::now();
    let mut welcome = 0;
    for _ in 0..200 {
        let hello = Hello {
            agent_version: "\u{1b}[2J\u{202e}".repeat(LONG / 7),
            ..hello("n1")
        };
        let (_send, _answers, first) = open(&channel, hello).await;
        match first {
            server_message::Kind::Welcome(_) => welcome += 1,
            server_message::Kind::ComeBackLater(later) => {
                assert!(later.after_ms <= 1_000, "{later:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    // One more comes back in a second, however slow this machine is.
    let most = 31 + usize::try_from(start.elapsed().as_secs()).unwrap();
    assert!((30..=most).contains(&welcome), "{welcome} streams");
    // Another node is not concerned.
    let (_send, _answers, first) = open(&channel, hello("n2")).await;
    assert!(matches!(first, server_message::Kind::Welcome(_)));
    let text = log.text();
    assert!(!text.contains(['\u{1b}', '\u{202e}']));
    assert!(text.len() < 64 << 10, "{} bytes of log", text.len());
    assert_eq!(log.lines_with("agent_version has a length of"), 1, "{text}");
    assert_eq!(log.lines_with("connects too often"), 1, "{text}");
}

/// A report of 230 kB, three times from each of 30 nodes.
#[tokio::test]
async fn a_long_report_is_kept_as_a_short_one_and_its_field_is_named_once() {
    if !is_alone("said::a_long_report_is_kept_as_a_short_one_and_its_field_is_named_once") {
        return;
    }
    let log = Log::begin();
    let (bound, _folder) = empty(|_| {}).await;
    let channel = channel(&bound).await;
    let hub = bound.hub();
    let mut agents = Vec::new();
    for n in 0..30 {
        let (send, answers, first) = open(&channel, hello(&format!("n{n}"))).await;
        assert!(matches!(first, server_message::Kind::Welcome(_)));
        for revision in 1..=3 {
            let failure = pb::ObjectFailure {
                reason: format!("{revision}{}", "x".repeat(LONG)),
                ..pb::ObjectFailure::default()
            };
            let report = pb::Report {
                received_revision: revision,
                failures: vec![failure],
                ..pb::Report::default()
            };
            let kind = Some(agent_message::Kind::Report(report));
            send.send(AgentMessage { kind }).await.unwrap();
        }
        agents.push((send, answers));
    }
    let mut changes = hub.agents().changes();
    let reported = changes.wait_for(|_| {
        let records = hub.agents().records();
        records
            .values()
            .filter_map(|record| record.report.as_ref())
            .filter(|report| report.received_revision == 3)
            .count()
            == 30
    });
    timeout(DEADLINE, reported).await.unwrap().unwrap();
    let records = hub.agents().records();
    let reports = records.values().filter_map(|record| record.report.as_ref());
    let failures = reports.flat_map(|report| &report.failures);
    let kept: usize = failures.map(|failure| failure.reason.capacity()).sum();
    assert!(kept <= 30 * 1_024, "{kept} bytes");
    assert_eq!(log.lines_with("failures.reason has a length of 230001"), 30);
    assert!(log.text().len() < 128 << 10);
}

/// 3,000 Services, each with five problems, in one folder.
#[tokio::test]
async fn thousands_of_bad_services_are_a_few_lines_of_log() {
    if !is_alone("said::thousands_of_bad_services_are_a_few_lines_of_log") {
        return;
    }
    let log = Log::begin();
    let ips: Vec<String> = (0..5).map(|n| format!("\"127.0.0.{n}\"")).collect();
    let ips = ips.join(", ");
    let services: Vec<String> = (0..3_000)
        .map(|n| {
            format!(
                "kind: Service\napiVersion: v1\nmetadata: {{name: s-{n}, namespace: shop}}\nspec: {{clusterIP: 10.96.{}.{}, \
                 externalIPs: [{ips}], ports: [{{port: 80}}]}}",
                n / 250,
                n % 250 + 1
            )
        })
        .collect();
    let (bound, _folder) = control_plane(&services.join("\n---\n")).await;
    assert_eq!(bound.hub().issues().len(), 15_000);
    let text = log.text();
    assert!(
        text.len() < 16 << 10,
        "{} bytes of log: {}",
        text.len(),
        &text[..4_096]
    );
    assert_eq!(
        log.lines_with("and 14999 more problems of the kind InvalidAddress"),
        1,
        "{text}"
    );
}
