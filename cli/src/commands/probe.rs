//! `kpctl probe`: do the data paths of all nodes work?

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::args::probe::ProbeArgs;
use crate::client::Stub;
use crate::failure::Failure;
use kplane_view::probe::{Overall, ProbeReportView};

/// Runs the command.
pub(super) async fn run(cli: &Cli, args: &ProbeArgs) -> Result<Verdict, Failure> {
    let (name, request) = args.request()?;
    let (client, _) = connect(cli).await?;
    let ask = async |mut stub: Stub| stub.probe_nodes(request).await;
    let report = client.about(&name, ask).await?;
    if args.asks_dns() && report.dns_name.is_empty() {
        return Err(Failure::Refused(
            "the control plane is older than kpctl, and lets no agent ask DNS: upgrade it"
                .to_owned(),
        ));
    }
    let view = ProbeReportView::new(report);
    show(cli, &view)?;
    Ok(match view.overall {
        Overall::Works => Verdict::Done,
        Overall::Broken => Verdict::NotReached,
        Overall::Unknown => Verdict::Unanswered,
    })
}
