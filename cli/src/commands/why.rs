//! `kpctl why`: the fate of a packet, or what NetworkPolicies say to a connection.

use k8s_openapi::api::core::v1::Pod;
use kplane_proto::v1 as pb;

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::args::why::{SenderArg, WhyArgs};
use crate::connection::{Asked, Route};
use crate::failure::Failure;
use kplane_view::policies::JudgementView;
use kplane_view::why::WhyView;

/// Runs the command.
pub(crate) async fn run(cli: &Cli, args: &WhyArgs) -> Result<Verdict, Failure> {
    if let Some(connection) = args.connection()? {
        let judged = connect(cli).await?.0.judge(connection.clone()).await?;
        return show(cli, &JudgementView::new(&connection, judged));
    }
    let (name, mut request) = args.request()?;
    let from = match &args.from {
        SenderArg::NamedPod { namespace, name } => {
            look_up(cli, (namespace, name), &mut request).await?
        }
        SenderArg::Pod => "a pod".to_owned(),
        SenderArg::Node(node) => format!("node {node}"),
        SenderArg::Outside(address) => match address.as_str() {
            "" => "a client outside of the cluster".to_owned(),
            address => format!("{address}, outside of the cluster"),
        },
        SenderArg::Address(address) => address.to_string(),
    };
    let (client, _) = connect(cli).await?;
    let reported = if args.tries {
        client.try_service(&name, request).await?
    } else {
        pb::TryResponse {
            explanation: Some(client.explain(&name, request).await?),
            ..pb::TryResponse::default()
        }
    };
    show(
        cli,
        &WhyView::new(&name.namespace, &name.name, from, reported),
    )
}

/// Completes the question by the Pod's node and address, or by its name without a kubeconfig. A Pod of the node's network
/// is the node.
async fn look_up(
    cli: &Cli,
    (namespace, name): (&str, &str),
    request: &mut pb::ExplainRequest,
) -> Result<String, Failure> {
    // The control plane knows the Pods where nodes enforce NetworkPolicies.
    let Ok(objects) = Route::objects(&cli.options).await else {
        request.sender_pod = format!("{namespace}/{name}");
        return Ok(format!("pod {namespace}/{name}"));
    };
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
    let pod: Option<Pod> = objects.get(&path, Asked("get pods")).await?;
    let pod = pod.ok_or_else(|| {
        Failure::Refused(format!(
            "there is no Pod {namespace}/{name}: kubectl get pods -n {namespace} lists them"
        ))
    })?;
    let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
    let Some(node) = spec.node_name.filter(|node| !node.is_empty()) else {
        return Err(Failure::Refused(format!(
            "the Pod {namespace}/{name} is on no node yet"
        )));
    };
    if !request.node.is_empty() && request.node != node {
        return Err(Failure::Refused(format!(
            "the Pod {namespace}/{name} is on node {node}, which handles its packets: leave --via out"
        )));
    }
    request.node = node;
    if spec.host_network == Some(true) {
        request.sender = pb::PacketSender::Node.into();
        return Ok(format!(
            "pod {namespace}/{name}, which has the network of its node"
        ));
    }
    request.sender_address = status.pod_ip.unwrap_or_default();
    Ok(format!(
        "pod {namespace}/{name} ({})",
        request.sender_address
    ))
}
