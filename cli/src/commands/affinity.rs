//! `kpctl get affinity` and `kpctl forget-client`.

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::args::affinity::{AffinityArgs, ForgetArgs};
use crate::client::Stub;
use crate::failure::Failure;
use kplane_view::affinity::AffinityView;

/// Shows which clients nodes remember.
pub(super) async fn get(cli: &Cli, args: &AffinityArgs) -> Result<Verdict, Failure> {
    let (name, request) = args.request()?;
    let (client, _) = connect(cli).await?;
    let ask = async |mut stub: Stub| stub.get_affinity(request).await;
    let answer = client.about(&name, ask).await?;
    verdict(cli, &AffinityView::known(&name, answer))
}

/// Lets nodes forget a client.
pub(super) async fn forget(cli: &Cli, args: &ForgetArgs) -> Result<Verdict, Failure> {
    let (name, request) = args.request()?;
    let (client, _) = connect(cli).await?;
    let of = request.client.clone();
    let ask = async |mut stub: Stub| stub.forget_client(request).await;
    let answer = client.about(&name, ask).await?;
    verdict(cli, &AffinityView::forgotten(&name, of, answer))
}

fn verdict(cli: &Cli, view: &AffinityView) -> Result<Verdict, Failure> {
    show(cli, view)?;
    Ok(match view.is_complete() {
        true => Verdict::Done,
        false => Verdict::Unanswered,
    })
}
