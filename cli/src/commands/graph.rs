//! `kpctl get graph`: who talked to whom?

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::args::graph::GraphArgs;
use crate::failure::Failure;
use kplane_view::graph::GraphView;

/// Runs the command.
pub(super) async fn run(cli: &Cli, args: &GraphArgs) -> Result<Verdict, Failure> {
    let request = args.request()?;
    let (client, _) = connect(cli).await?;
    let answer = client.graph(request.clone()).await?;
    let view = GraphView::new(&request, answer);
    show(cli, &view)?;
    Ok(if view.is_complete() { Verdict::Done } else { Verdict::Unanswered })
}
