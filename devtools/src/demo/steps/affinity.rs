//! Session affinity: a caller stays with its first pod, at all addresses of the Service (A11).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context as _, Result};
use kplane_model::ServiceName;

use super::super::expect::Target;
use super::super::interrupt;
use super::super::objects::Port;
use super::super::screen::{fit, plural};
use super::super::stage::{Show, Stage};
use super::super::survey::Planner;
use super::super::world::{Caller, Role};

/// Connections of a caller to each kind of address. If they were spread over three pods, they would
/// all reach one pod only once in 20,000 times.
const CALLS: usize = 10;
/// The Service with affinity in the shop.
const SERVICE: &str = "cart";

/// Shows, for a pod and a client on every node, which pod gets their connections.
pub(super) fn run(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let began = Instant::now();
    let service = stage.objects.service(&ServiceName::new("shop", SERVICE))?;
    let port = service.ports.first().context("the Service has no port")?;
    let (mut wrong, mut met) = (Vec::new(), BTreeSet::new());
    let callers = stage.world.callers.iter();
    let callers: Vec<&Caller> = callers
        .filter(|caller| matches!(caller.role, Role::Client | Role::Pod))
        .collect();
    for caller in &callers {
        interrupt::check()?;
        let pods = call(show, stage, port, caller, &mut wrong)?;
        if pods.len() > 1 {
            wrong.push(format!("one caller met {}", plural(pods.len(), "pod")));
        }
        met.extend(pods);
    }
    let pods = plural(met.len(), "pod");
    let seen = format!("{} met {pods}", plural(callers.len(), "caller"));
    let what = format!("shop/{SERVICE}: callers stay with their pod");
    show.check((&what, "1 pod a caller"), seen, wrong, began);
    Ok(())
}

/// Calls the ClusterIP and then the node port, and returns the pods that answered.
fn call(
    show: &Show,
    stage: &Stage,
    port: &Port,
    caller: &Caller,
    wrong: &mut Vec<String>,
) -> Result<BTreeSet<SocketAddr>> {
    let node_port = port.port.node_port.map(Target::NodePort);
    let planner = Planner::new(&stage.objects, &stage.world);
    let mut pods = BTreeSet::new();
    for target in [Some(Target::ClusterIp), node_port].into_iter().flatten() {
        let call = planner.call(port, target, caller, stage.node(&caller.node)?);
        let call = call.context("no address of that family")?;
        let finding = call.make_times(CALLS, CALLS)?;
        wrong.extend(call.complaint(&finding));
        let names: Vec<String> = finding
            .answers
            .iter()
            .map(|(pod, times)| format!("{} {times} times", planner.pod_name(pod.ip())))
            .collect();
        let who = fit(&call.to_string(), 52);
        show.screen
            .line(format!("      {who} {}", names.join(", ")));
        pods.extend(finding.answers.into_keys());
    }
    Ok(pods)
}
