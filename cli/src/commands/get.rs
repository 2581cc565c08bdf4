//! `kpctl get`: lists, filtered and sorted.

use kplane_proto::v1 as pb;

use super::{Verdict, connect, drops, flows, graph, listing, output, proxied, show, sorted};
use crate::args::{Cli, GetCommand, ListArgs, NodesArgs, PoliciesArgs};
use crate::failure::Failure;
use crate::watch;
use kplane_view::List;
use kplane_view::endpoints::EndpointListView;
use kplane_view::nodes::{NodeListView, NodeView};
use kplane_view::policies::PolicyListView;
use kplane_view::services::ServiceListView;

/// Shows a list.
pub(super) async fn run(cli: &Cli, command: &GetCommand) -> Result<Verdict, Failure> {
    match command {
        GetCommand::Services(args) => {
            services(cli, &args.list, args.bad, ServiceListView::new).await
        }
        GetCommand::Endpoints(args) => {
            let on_node = |ports, namespace: Option<&str>| {
                let mut view = EndpointListView::new(ports, namespace);
                if let Some(node) = &args.node {
                    view.only_on(node);
                }
                view
            };
            services(cli, args, false, on_node).await
        }
        GetCommand::Nodes(args) => nodes(cli, args).await,
        GetCommand::Policies(args) => policies(cli, args).await,
        GetCommand::Drops(args) => drops::run(cli, args).await,
        GetCommand::Flows(args) => flows::run(cli, args).await,
        GetCommand::Graph(args) => graph::run(cli, args).await,
        GetCommand::Declared(args) => listing::run(cli, args).await,
        GetCommand::Proxied(args) => proxied::get(cli, args).await,
    }
}

/// Lists Services, or objects that come with them.
async fn services<V: List>(
    cli: &Cli,
    args: &ListArgs,
    bad: bool,
    view: impl Fn(Vec<pb::ServiceView>, Option<&str>) -> V,
) -> Result<Verdict, Failure> {
    let name = args.name()?;
    let named = name.as_ref().map(|name| name.namespace.to_string());
    let namespace = named.as_deref().or(args.namespace.as_deref());
    let view = |ports| sorted(view(ports, namespace), &args.rows);
    let (client, route) = connect(cli).await?;
    let request = pb::ListServicesRequest {
        namespace: namespace.unwrap_or_default().to_owned(),
        name: name.as_ref().map(|name| name.name.to_string()).unwrap_or_default(),
        node: args.node.clone().unwrap_or_default(),
        bad,
        ..pb::ListServicesRequest::default()
    };
    if args.watch.watch {
        let mut link = watch::Link::new((client, route));
        watch::services(&mut link, &mut output(cli, true), &request, view).await?;
        return Ok(Verdict::Done);
    }
    let ports = match &name {
        Some(name) if args.node.is_none() && !bad => client.service(name).await?,
        _ => client.services(request).await?,
    };
    show(cli, &view(ports)?)
}

/// Lists nodes.
async fn nodes(cli: &Cli, args: &NodesArgs) -> Result<Verdict, Failure> {
    let wanted = |node: &NodeView| {
        let is_named = args.node.as_ref().is_none_or(|name| *name == node.name);
        let is_in_zone = args.zone.as_ref().is_none_or(|zone| *zone == node.zone);
        is_named && is_in_zone && (args.states.is_empty() || args.states.contains(&node.state))
    };
    // The control plane selects as well; an older one sends all nodes.
    let view = |fleet| {
        let mut view = NodeListView::from(fleet);
        view.retain(wanted);
        sorted(view, &args.rows)
    };
    let (client, route) = connect(cli).await?;
    if args.watch.watch {
        let mut link = watch::Link::new((client, route));
        watch::fleet(&mut link, &mut output(cli, true), view).await?;
        return Ok(Verdict::Done);
    }
    let request = pb::GetFleetRequest {
        node: args.node.clone().unwrap_or_default(),
        states: args.states.iter().map(|state| state.wire().into()).collect(),
        zone: args.zone.clone().unwrap_or_default(),
        ..pb::GetFleetRequest::default()
    };
    let mut view = view(client.fleet_of(request).await?)?;
    match &args.node {
        Some(node) if view.items().is_empty() && args.states.is_empty() && args.zone.is_none() => {
            Err(no_node(cli, node))
        }
        _ => show(cli, &view),
    }
}

/// Lists NetworkPolicies.
async fn policies(cli: &Cli, args: &PoliciesArgs) -> Result<Verdict, Failure> {
    let namespace = args.namespace.as_deref();
    let (client, _) = connect(cli).await?;
    let all = client.policies(namespace.unwrap_or_default()).await?;
    let view = PolicyListView::new(all, namespace);
    show(cli, &sorted(view, &args.rows)?)
}

/// Returns the error that a node is not known.
pub(super) fn no_node(cli: &Cli, node: &str) -> Failure {
    Failure::Refused(format!(
        "no node {node} is known. List them with: {} get nodes",
        cli.program
    ))
}
