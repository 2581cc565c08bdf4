//! The commands that read the control plane's record.

use kplane_proto::v1 as pb;

use super::{Verdict, connect, listing, show};
use crate::args::Cli;
use crate::args::record::{DiffArgs, HistoryArgs, HistoryCommand};
use crate::failure::Failure;
use kplane_view::changes::ServiceHistoryView;
use kplane_view::diff::DiffView;

/// Runs `history`.
pub(crate) async fn history(cli: &Cli, args: &HistoryArgs) -> Result<Verdict, Failure> {
    match &args.of {
        None => listing::ask(cli, "publications", &pb::GetHistoryRequest {}).await,
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
