//! `kpctl drain-status`: when may this Pod be deleted?

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kplane_proto::v1 as pb;
use tokio::time::{Instant, sleep};

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::args::drain::{DrainArgs, Subject};
use crate::client::{Client, Stub};
use crate::failure::Failure;
use crate::output::Progress;
use crate::reach::{Asked, Reach};
use kplane_view::departures::DeparturesView;
use kplane_view::drain::{DrainVerdict, DrainView};

/// Pause between two questions of `--wait`: each makes all agents read their kernels' tables.
const PAUSE: Duration = Duration::from_secs(3);

/// A question that may be asked again.
struct Question {
    subject: Subject,
    /// The subject in words.
    title: String,
    request: pb::DrainStatusRequest,
    /// Whether a Pod is being shut down.
    terminating: Option<bool>,
}

/// Runs the command.
pub(crate) async fn run(cli: &Cli, args: &DrainArgs) -> Result<Verdict, Failure> {
    let Some(subject) = args.subject()? else {
        return departures(cli).await;
    };
    let question = Question::new(cli, args, subject).await?;
    let deadline = Instant::now() + cli.options.goal;
    let (mut client, mut reach) = connect(cli).await?;
    let mut progress = Progress::stderr();
    let view = loop {
        let view = match question.ask(&client).await {
            Ok(view) => view,
            // The connection may have ended while this waited.
            Err(failure) if args.wait && failure.is_transient() && Instant::now() < deadline => {
                sleep(PAUSE).await;
                client = Client::connect(&mut reach).await?;
                continue;
            }
            Err(failure) => return Err(failure),
        };
        let is_over = Instant::now() + PAUSE >= deadline;
        if !args.wait || is_over || view.verdict == DrainVerdict::Safe {
            break view;
        }
        progress.show(&view.short_line());
        sleep(PAUSE).await;
    };
    drop(progress);
    show(cli, &view)?;
    Ok(match view.verdict {
        DrainVerdict::Safe => Verdict::Done,
        DrainVerdict::Flows => Verdict::Left,
        DrainVerdict::Unknown => Verdict::Unanswered,
    })
}

/// Shows the Pods that ended lately.
async fn departures(cli: &Cli) -> Result<Verdict, Failure> {
    let request = pb::DrainStatusRequest {
        departures: true,
        ..pb::DrainStatusRequest::default()
    };
    let (client, _) = connect(cli).await?;
    let status = client.drain_status(request).await?;
    show(cli, &DeparturesView::new(status))?;
    Ok(Verdict::Done)
}

impl Question {
    async fn new(cli: &Cli, args: &DrainArgs, subject: Subject) -> Result<Self, Failure> {
        let mut request = pb::DrainStatusRequest {
            all: args.all(),
            ..pb::DrainStatusRequest::default()
        };
        let (mut terminating, title) = match &subject {
            Subject::Service(name) => {
                request.namespace = name.namespace.to_string();
                request.name = name.name.to_string();
                (None, format!("Service {name}"))
            }
            Subject::Node(node) => {
                request.node.clone_from(node);
                (None, format!("node {node}"))
            }
            Subject::Pod { namespace, name } => (None, format!("Pod {namespace}/{name}")),
        };
        if let Subject::Pod { namespace, name } = &subject {
            terminating = look_up(cli, (namespace, name), &mut request).await?;
        }
        Ok(Self {
            subject,
            title,
            request,
            terminating,
        })
    }

    async fn ask(&self, client: &Client) -> Result<DrainView, Failure> {
        let request = self.request.clone();
        let status = match &self.subject {
            Subject::Service(name) => {
                let ask = async |mut stub: Stub| stub.get_drain_status(request).await;
                client.about(name, ask).await?
            }
            _ => client.drain_status(request).await?,
        };
        Ok(DrainView::new(&self.title, status, self.terminating))
    }
}

/// Completes the question by the Pod's addresses and node, and returns whether it is being shut down. Without a
/// kubeconfig it is completed by the Pod's name: the control plane may know the rest.
async fn look_up(
    cli: &Cli,
    (namespace, name): (&str, &str),
    request: &mut pb::DrainStatusRequest,
) -> Result<Option<bool>, Failure> {
    let Ok(objects) = Reach::objects(&cli.options).await else {
        request.pod = format!("{namespace}/{name}");
        return Ok(None);
    };
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
    let pod: Option<Pod> = objects.get(&path, Asked("get pods")).await?;
    let pod = pod.ok_or_else(|| {
        Failure::Refused(format!(
            "there is no Pod {namespace}/{name}: kubectl get pods -n {namespace} lists them. If it is gone \
             already, ask for its Service: {} drain-status {namespace}/SERVICE --all",
            cli.program
        ))
    })?;
    let terminating = pod.metadata.deletion_timestamp.is_some();
    let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
    if spec.host_network == Some(true) {
        return Err(Failure::Refused(format!(
            "the Pod {namespace}/{name} has the addresses of its node, with all that runs there: ask for its \
             Service: {} drain-status {namespace}/SERVICE --all",
            cli.program
        )));
    }
    let addresses = status.pod_ips.unwrap_or_default().into_iter();
    request.addresses = addresses.map(|address| address.ip).collect();
    if request.addresses.is_empty() {
        return Err(Failure::Refused(format!(
            "the Pod {namespace}/{name} has no address yet, so no flow leads to it"
        )));
    }
    request.node = spec.node_name.unwrap_or_default();
    Ok(Some(terminating))
}
