//! `kpctl get affinity`.

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::args::affinity::AffinityArgs;
use crate::client::Stub;
use crate::failure::Failure;
use kplane_view::affinity::AffinityView;

/// Shows which clients nodes remember.
pub(super) async fn get(cli: &Cli, args: &AffinityArgs) -> Result<Verdict, Failure> {
    let (name, request) = args.request()?;
    let (client, _) = connect(cli).await?;
    let ask = async |mut stub: Stub| stub.get_affinity(request).await;
    let view = AffinityView::new(&name, client.about(&name, ask).await?);
    show(cli, &view)?;
    Ok(if view.is_complete() { Verdict::Done } else { Verdict::Unanswered })
}
