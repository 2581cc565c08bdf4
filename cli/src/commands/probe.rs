//! `kpctl probe`: do the data paths of all nodes work?

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::args::probe::ProbeArgs;
use crate::failure::Failure;
use kplane_view::probe::{Overall, ProbeReportView};

/// Runs the command.
pub(super) async fn run(cli: &Cli, args: &ProbeArgs) -> Result<Verdict, Failure> {
    let (name, request) = args.request()?;
    let (client, _) = connect(cli).await?;
    let view = ProbeReportView::new(client.probe(&name, request).await?);
    show(cli, &view)?;
    Ok(match view.overall {
        Overall::Works => Verdict::Done,
        Overall::Broken => Verdict::NotReached,
        Overall::Unknown => Verdict::Unanswered,
    })
}
