//! `kpctl describe service` and `kpctl describe policy`.

use std::time::Duration;

use kplane_model::{PolicyName, ServiceName};
use kplane_proto::v1 as pb;
use kplane_view::describe::DescriptionView;
use kplane_view::policies::PolicyDescriptionView;
use kplane_view::proxied::ProxiedView;
use tokio::time::timeout;

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::client::{Client, Stub};
use crate::failure::Failure;

/// Time for which the description waits for the nodes' proxies.
const PROXIES_WITHIN: Duration = Duration::from_secs(2);

/// Shows a Service, and what the userspace proxies know of it if it asks for them.
pub(super) async fn service(cli: &Cli, name: ServiceName) -> Result<Verdict, Failure> {
    let (client, _) = connect(cli).await?;
    let description = client.describe(&name).await?;
    let mut view = DescriptionView::new(&name.namespace, &name.name, description);
    if view.asks_for_proxy() {
        view.set_proxied(proxied(&client, &name).await);
    }
    show(cli, &view)
}

/// Shows a NetworkPolicy.
pub(super) async fn policy(cli: &Cli, name: PolicyName) -> Result<Verdict, Failure> {
    let (client, _) = connect(cli).await?;
    let policy = client.policy(&name).await?;
    show(cli, &PolicyDescriptionView::from(policy))
}

/// Asks all nodes, or says why it is not known.
async fn proxied(client: &Client, name: &ServiceName) -> Result<ProxiedView, String> {
    let request = pb::ProxiedRequest {
        namespace: name.namespace.to_string(),
        name: name.name.to_string(),
        node: String::new(),
    };
    let ask = async |mut stub: Stub| stub.get_proxied(request).await;
    match timeout(PROXIES_WITHIN, client.about(name, ask)).await {
        Ok(Ok(answer)) => Ok(ProxiedView::new(name, answer)),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!(
            "a node did not answer within {}s",
            PROXIES_WITHIN.as_secs()
        )),
    }
}
