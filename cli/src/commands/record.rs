//! The commands that read the control plane's record.

use std::time::Duration;

use kplane_proto::v1 as pb;

use super::{Verdict, connect, output, show};
use crate::args::Cli;
use crate::args::record::{DiffArgs, EventsArgs, HistoryArgs, HistoryCommand};
use crate::failure::Failure;
use kplane_view::changes::ServiceHistoryView;
use kplane_view::diff::DiffView;
use kplane_view::events::EventListView;
use kplane_view::history::HistoryView;

/// Time between two questions of `events --watch`.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs `history`.
pub(crate) async fn history(cli: &Cli, args: &HistoryArgs) -> Result<Verdict, Failure> {
    match &args.of {
        None => {
            let history = connect(cli).await?.0.history().await?;
            show(cli, &HistoryView::from(history))
        }
        Some(HistoryCommand::Service(args)) => {
            let (name, request) = args.request()?;
            let history = connect(cli).await?.0.service_history(&name, request).await?;
            show(cli, &ServiceHistoryView::new(&name, &args.node, history))
        }
    }
}

/// Runs `diff`.
pub(crate) async fn diff(cli: &Cli, args: &DiffArgs) -> Result<Verdict, Failure> {
    let request = args.request()?;
    let diff = connect(cli).await?.0.diff(request).await?;
    show(cli, &DiffView::from(diff))
}

/// Runs `events`. With --watch it asks again every second.
pub(crate) async fn events(cli: &Cli, args: &EventsArgs) -> Result<Verdict, Failure> {
    let (client, _) = connect(cli).await?;
    let mut request = pb::NoticedRequest {
        after: 0,
        limit: args.limit,
    };
    let mut output = output(cli, false);
    loop {
        let noticed = client.noticed(request).await?;
        let last = noticed.events.last().map(|event| event.number);
        let is_first = request.after == 0;
        if is_first || last.is_some() {
            output.show(&EventListView::new(noticed, is_first))?;
        }
        if !args.watch {
            return Ok(Verdict::Done);
        }
        request.after = last.unwrap_or(request.after);
        tokio::time::sleep(PAUSE).await;
    }
}
