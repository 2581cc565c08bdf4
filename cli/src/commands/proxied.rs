//! `kpctl get proxied`.

use super::{Verdict, connect, show};
use crate::args::{Cli, ProxiedArgs};
use crate::client::Stub;
use crate::failure::Failure;
use kplane_view::proxied::ProxiedView;

/// Shows what the userspace proxies of nodes know of a Service.
pub(super) async fn get(cli: &Cli, args: &ProxiedArgs) -> Result<Verdict, Failure> {
    let (name, request) = args.request()?;
    let (client, _) = connect(cli).await?;
    let ask = async |mut stub: Stub| stub.get_proxied(request).await;
    let view = ProxiedView::new(&name, client.about(&name, ask).await?);
    show(cli, &view)?;
    Ok(if view.is_complete() { Verdict::Done } else { Verdict::Unanswered })
}
