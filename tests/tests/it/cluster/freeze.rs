//! Frozen nodes, with the document of orders in a real API server and the rights of deploy/kubernetes/rbac.yaml.

use std::thread;

use anyhow::{Context as _, Result, anyhow, ensure};
use kplane_proto::v1::NodeState;
use kplane_tests::cluster::Api;
use kplane_tests::support::nft::nft;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::faults::{addresses, serve};
use crate::cluster::support::kpctl::{kpctl, kpctl_in, orders};
use crate::cluster::support::world::{DEADLINE, PAIR, Plane, reaches};
use crate::cluster::support::{World, with_pair};

/// The document.
const DOCUMENT: &str = "kplane/kplane-orders";

/// An order at one replica freezes the agent of the other, also after that replica has started anew, and while
/// the document is damaged. The agent repairs what others change meanwhile.
pub(crate) fn a_node_is_frozen_at_any_replica_and_stays_so_over_restarts() -> Result<()> {
    with_pair(|world| {
        let before = serve(world.api(), "before", 95, 2)?;
        for (_, _, node) in PAIR {
            world.leads(node, before, &addresses(95, 2))?;
        }
        orders(
            world,
            7576,
            &["freeze", "--node", "node-2", "--reason", "drill"],
        )?;
        shown(&world.pair, "node-2", NodeState::Frozen)?;
        let later = serve(world.api(), "later", 96, 2)?;
        world.leads("node-1", later, &addresses(96, 2))?;
        let lacks = |world: &World| -> Result<()> {
            let found = reaches(world.ns("node-2")?, later)?;
            ensure!(found.is_empty(), "a frozen node got {found:?}");
            Ok(())
        };
        lacks(world)?;

        let (_, text, _) = kpctl(world, 7576, &["status"])?;
        ensure!(
            text.contains("1 frozen") && text.contains("drill"),
            "{text}"
        );
        nft(world.ns("node-2")?, "flush ruleset")?;
        world.leads("node-2", before, &addresses(95, 2))?;
        lacks(world)?;

        drop(world.pair.remove(1));
        let again = world.one_of_pair(PAIR[1].0)?;
        world.pair.push(again);
        shown(&world.pair, "node-2", NodeState::Frozen)?;
        damaged(world, &world.pair)?;
        lacks(world)?;
        orders(world, 7576, &["thaw", "--node", "node-2"])?;
        world.leads("node-2", later, &addresses(96, 2))?;
        shown(&world.pair, "node-2", NodeState::InSync)?;
        least(world)
    })
}

/// Orders that two replicas are given at the same time are both in force.
pub(crate) fn orders_at_two_replicas_at_once_are_both_kept() -> Result<()> {
    with_pair(|world| {
        for (verb, state) in [("freeze", NodeState::Frozen), ("thaw", NodeState::InSync)].repeat(3)
        {
            let control = world.topology.host("control")?.ns();
            thread::scope(|scope| {
                PAIR.map(|(_, port, node)| {
                    scope.spawn(move || kpctl_in(control, port, &[verb, "--node", node]))
                })
                .into_iter()
                .try_for_each(|one| {
                    let (code, text, _) = one.join().map_err(|_| anyhow!("kpctl panicked"))??;
                    ensure!(code == Some(0), "{text}");
                    Ok(())
                })
            })?;
            for (_, _, node) in PAIR {
                shown(&world.pair, node, state)?;
            }
        }
        Ok(())
    })
}

/// Waits until each replica shows a node in a state.
fn shown(planes: &[Plane], node: &str, state: NodeState) -> Result<()> {
    eventually(DEADLINE, &format!("{node} is {state:?}"), || {
        for plane in planes {
            let fleet = plane.fleet()?;
            let found =
                fleet.nodes.iter().find(|found| found.name == node).context("no such node")?;
            ensure!(found.state() == state, "{found:?}");
            let reported = found.report.as_ref().is_some_and(|report| report.frozen);
            ensure!(
                reported == (state == NodeState::Frozen),
                "the agent does not say so"
            );
        }
        Ok::<_, anyhow::Error>(())
    })
}

/// Damages the document, and repairs it: the last good orders stay, and nobody writes over it.
fn damaged(world: &World, planes: &[Plane]) -> Result<()> {
    let set = |text: &Value| {
        let data = json!({ "data": { "orders.json": text } });
        world.api().patch("ConfigMap", DOCUMENT, &data).map(drop)
    };
    let whole = world.api().get("ConfigMap", DOCUMENT)?.context("no document")?;
    set(&json!("{"))?;
    for plane in planes {
        eventually(DEADLINE, "the damage is shown", || {
            let issues = plane.issues()?;
            let found = issues.iter().any(|issue| issue.contains("the document is damaged"));
            ensure!(found, "{issues:?}");
            Ok::<_, anyhow::Error>(())
        })?;
    }
    shown(planes, "node-2", NodeState::Frozen)?;
    let (code, text, _) = kpctl(world, 7576, &["thaw", "--all"])?;
    ensure!(code != Some(0) && text.contains("damaged"), "{text}");
    set(&whole["data"]["orders.json"])?;
    for plane in planes {
        eventually(DEADLINE, "it is whole again", || {
            let issues = plane.issues()?;
            ensure!(
                !issues.iter().any(|issue| issue.contains("damaged")),
                "{issues:?}"
            );
            Ok::<_, anyhow::Error>(())
        })?;
    }
    Ok(())
}

/// The account has the rights to the document, and to no other ConfigMap but the authority's.
fn least(world: &World) -> Result<()> {
    let may = |verb: &str, name: &str| -> Result<bool> {
        let review = json!({
            "kind": "SubjectAccessReview", "apiVersion": "authorization.k8s.io/v1",
            "spec": {
                "user": "system:serviceaccount:kplane:kplane-controlplane",
                "resourceAttributes": {
                    "namespace": "kplane", "verb": verb, "resource": "configmaps", "name": name,
                },
            },
        });
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        let api: &Api = world.api();
        let answer = api.request(http::Method::POST, path, Some(&review))?;
        Ok(answer["status"]["allowed"] == true)
    };
    for verb in ["get", "update"] {
        ensure!(
            may(verb, "kplane-orders")? && !may(verb, "other")?,
            "{verb}"
        );
    }
    for verb in ["delete", "patch", "list", "watch"] {
        ensure!(!may(verb, "kplane-orders")?, "{verb}");
    }
    Ok(())
}
