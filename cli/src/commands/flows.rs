//! `kpctl get flows`: who is connected to a Service?

use std::time::Duration;

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use tokio::time::sleep;

use super::{Verdict, connect, output, show};
use crate::args::Cli;
use crate::args::flows::FlowsArgs;
use crate::client::{Client, Error, Stub};
use crate::failure::Failure;
use crate::watch::Link;
use kplane_view::flows::FlowsView;

/// Pause between two questions of `--watch`: each makes all agents read their kernels' tables.
const PAUSE: Duration = Duration::from_secs(2);

/// Runs the command.
pub(super) async fn run(cli: &Cli, args: &FlowsArgs) -> Result<Verdict, Failure> {
    let (name, request) = args.request()?;
    if args.watch {
        return watch(cli, &name, &request).await;
    }
    let (client, _) = connect(cli).await?;
    let view = ask(&client, &name, &request).await?;
    show(cli, &view)?;
    Ok(if view.is_complete() { Verdict::Done } else { Verdict::Unanswered })
}

async fn ask(
    client: &Client,
    name: &ServiceName,
    request: &pb::FlowsRequest,
) -> Result<FlowsView, Error> {
    let question = request.clone();
    let ask = async |mut stub: Stub| stub.get_flows(question).await;
    let answer = client.about(name, ask).await?;
    Ok(FlowsView::new(name, request, answer))
}

/// Asks again and again, and shows each answer. Returns only on failure.
async fn watch(
    cli: &Cli,
    name: &ServiceName,
    request: &pb::FlowsRequest,
) -> Result<Verdict, Failure> {
    let mut link = Link::new(connect(cli).await?);
    let mut output = output(cli, true);
    let mut last = None;
    loop {
        let answer = match link.client().await {
            Ok(client) => ask(&client, name, request).await,
            Err(error) => Err(error),
        };
        match answer {
            Ok(view) => {
                link.prove();
                // Programs hear of changes only.
                if output.redraws() || last.as_ref() != Some(&view) {
                    output.show(&view)?;
                }
                last = Some(view);
            }
            Err(error) => link.outage(error, &mut output).await?,
        }
        sleep(PAUSE).await;
    }
}
