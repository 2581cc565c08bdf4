//! `kpctl drain-status`: the Pods that waited to end.

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::failure::Failure;
use kplane_view::departures::DeparturesView;

/// Runs the command.
pub(crate) async fn run(cli: &Cli) -> Result<Verdict, Failure> {
    let (client, _) = connect(cli).await?;
    show(cli, &DeparturesView::new(client.drain_status().await?))?;
    Ok(Verdict::Done)
}
