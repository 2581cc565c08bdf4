//! `kpctl uninstall`: what helm cannot remove. Every step finds by itself what is left of it, so the command can be
//! repeated after any interruption.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, Taint};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::migrate::{Cluster, SAVED};
use super::{Verdict, ask, show};
use crate::args::Cli;
use crate::args::uninstall::UninstallArgs;
use crate::connection::{Asked, Route};
use crate::failure::Failure;
use crate::migrate::cleanup::{Program, Purpose};
use crate::migrate::pods::PodState;
use crate::migrate::snapshot::{Mark, Objects as Gathered, Snapshot};
use crate::migrate::stage::Stage;
use crate::migrate::{AGENTS, LABEL};
use kplane_view::uninstall::UninstallView;

/// Time between two looks.
const LOOK: std::time::Duration = std::time::Duration::from_secs(1);

/// Most nodes that are cleaned up at the same time.
const AT_A_TIME: usize = 20;

/// Prefix of the taints of kplane.
const TAINTS: &str = "kplane.io/";

/// A label that no node has.
const NOWHERE: &str = "kplane.io/uninstalled";

/// Objects that kplane's programs make themselves, besides those of the chart.
const OWN: [(&str, &str); 4] = [
    ("configmaps", "kplane-ca"),
    ("configmaps", "kplane-orders"),
    ("configmaps", "kplane-replicas"),
    ("secrets", "kplane-certificates"),
];

/// Runs the command.
pub(crate) async fn run(cli: &Cli, args: &UninstallArgs) -> Result<Verdict, Failure> {
    let objects = Route::objects(&cli.options).await?;
    let mut cluster = Cluster::new(objects, &cli.options, args.target.kube_proxy.clone());
    let gathered = cluster.gather_objects().await?;
    let snapshot = Snapshot::from(&gathered);
    refuse(&snapshot, args)?;
    if !args.yes && !confirmed(&snapshot)? {
        anstream::eprintln!("Nothing was removed.");
        return Ok(Verdict::Declined);
    }
    let mut work = Uninstall {
        cluster: &mut cluster,
        args,
        keeps_saved: only_saved(&snapshot),
        removed: Vec::new(),
        left: Vec::new(),
    };
    work.stop_programs(&gathered).await?;
    work.clean_nodes(&gathered).await?;
    work.unmark_nodes(&gathered).await?;
    // What is left needs the DaemonSet, which knows how to remove it.
    if work.left.is_empty() {
        work.delete_objects().await?;
    }
    let Uninstall { removed, left, .. } = work;
    let next = next(&snapshot, cluster.namespace(), left.is_empty());
    let view = UninstallView::new(removed, left, next);
    show(cli, &view)?;
    Ok(if view.left.is_empty() { Verdict::Done } else { Verdict::NotReached })
}

/// Refuses to cut off nodes that kube-proxy could serve.
fn refuse(snapshot: &Snapshot, args: &UninstallArgs) -> Result<(), Failure> {
    let mut marked = snapshot.nodes.iter().filter(|node| node.mark != Mark::None);
    match marked.next() {
        Some(node) if !args.force && (snapshot.kube_proxy.is_some() || snapshot.saved) => {
            let stage = Stage::of(node);
            let why = match stage.reason() {
                "" => "kplane serves it",
                reason => reason,
            };
            Err(Failure::Refused(format!(
                "{} is not served by kube-proxy: {why}. Move all nodes back first: kpctl migrate back \
                 --all; or cut them off with --force",
                node.name
            )))
        }
        _ => Ok(()),
    }
}

fn confirmed(snapshot: &Snapshot) -> Result<bool, Failure> {
    let serves = snapshot.kube_proxy.as_ref().is_some_and(|set| !set.keeps_off);
    let text = if serves {
        "kube-proxy has a DaemonSet, and serves the nodes afterwards."
    } else if only_saved(snapshot) {
        "kube-proxy's DaemonSet is saved, not running: NO SERVICE WORKS afterwards until it is \
             created again."
    } else {
        "kube-proxy has no DaemonSet: NO SERVICE WORKS afterwards until another proxy runs."
    };
    anstream::eprintln!("{text}");
    ask(&format!(
        "Remove kplane from {} nodes? [y/N] ",
        snapshot.nodes.len()
    ))
}

fn next(snapshot: &Snapshot, namespace: &str, complete: bool) -> Vec<String> {
    if !complete {
        return vec!["kpctl uninstall, when the nodes above work again".to_owned()];
    }
    let release = snapshot.agents.as_ref().and_then(|agents| agents.release.clone());
    let mut next = Vec::new();
    if only_saved(snapshot) {
        next.push("kpctl migrate back --all, if kube-proxy shall serve the nodes again".to_owned());
    }
    next.extend(release.map(|release| format!("helm uninstall {release} --namespace {namespace}")));
    next.push(format!("kubectl delete namespace {namespace}"));
    next
}

/// Returns whether kube-proxy's DaemonSet exists only as `kpctl migrate finish` has saved it.
fn only_saved(snapshot: &Snapshot) -> bool {
    snapshot.saved && snapshot.kube_proxy.is_none()
}

struct Uninstall<'a, 'b> {
    cluster: &'a mut Cluster<'b>,
    args: &'a UninstallArgs,
    /// Whether kube-proxy's DaemonSet exists only as `kpctl migrate finish` has saved it.
    keeps_saved: bool,
    removed: Vec<String>,
    left: Vec<String>,
}

impl Uninstall<'_, '_> {
    /// Ends the agents and the control plane, without deleting them: a second attempt needs the image and the flags of
    /// the agents. Their rules stay in the kernel.
    async fn stop_programs(&mut self, gathered: &Gathered) -> Result<(), Failure> {
        let namespace = self.cluster.namespace().to_owned();
        let plane = format!("/apis/apps/v1/namespaces/{namespace}/deployments/kplane-controlplane");
        let objects = self.cluster.objects();
        let asked = Asked("patch deployments");
        match objects.patch(&plane, &json!({ "spec": { "replicas": 0 } }), asked).await {
            Err(error) if error.is_missing() => {}
            patched => patched?,
        }
        if gathered.agents.is_none() {
            return Ok(());
        }
        let nowhere = json!({ "spec": { "template": { "spec": {
            "nodeSelector": { NOWHERE: "true" },
        } } } });
        let path = self.cluster.agents_path();
        objects.patch(&path, &nowhere, Asked("patch daemonsets")).await?;
        let until = Instant::now() + self.args.node_timeout;
        loop {
            let now = self.cluster.gather_objects().await?;
            let snapshot = Snapshot::from(&now);
            // On a node that does not work, no pod ends.
            let there =
                snapshot.nodes.iter().filter(|node| node.ready && node.agent.is_there()).count();
            if there == 0 || Instant::now() >= until {
                return Ok(());
            }
            say(&format!("{there} agents have not ended"));
            sleep(LOOK).await;
        }
    }

    /// Removes rules and cache from all nodes.
    async fn clean_nodes(&mut self, gathered: &Gathered) -> Result<(), Failure> {
        let program = match &gathered.agents {
            Some(set) => Program::OfAgents(Box::new(set.clone())),
            None => Program::Image(self.args.image.clone()),
        };
        let snapshot = Snapshot::from(gathered);
        let linux = snapshot.nodes.iter().filter(|node| node.linux);
        let (ready, away): (Vec<_>, Vec<_>) = linux.partition(|node| node.ready);
        let away = away.iter().map(|node| format!("{}: the node is not Ready", node.name));
        self.left.extend(away);
        for some in ready.chunks(AT_A_TIME) {
            let names: Vec<String> = some.iter().map(|node| node.name.clone()).collect();
            for node in &names {
                // That of an earlier attempt says nothing about this one.
                self.cluster.delete_cleanup(node).await?;
            }
            self.clean(&program, names).await?;
        }
        Ok(())
    }

    async fn clean(&mut self, program: &Program, nodes: Vec<String>) -> Result<(), Failure> {
        let until = Instant::now() + self.args.node_timeout;
        let mut waiting: BTreeSet<String> = nodes.into_iter().collect();
        let mut created = BTreeSet::new();
        while !waiting.is_empty() {
            let snapshot = Snapshot::from(&self.cluster.gather_objects().await?);
            for name in waiting.clone() {
                let node = snapshot.node(&name);
                match node.map(|node| node.cleanup.clone()) {
                    Some(PodState::Absent) => {
                        let kube_proxy = node.is_some_and(|node| node.kube_proxy.is_there());
                        let purpose = Purpose::Uninstall { kube_proxy };
                        self.cluster.clean_up(&name, program, purpose).await?;
                        created.insert(name);
                    }
                    Some(PodState::Succeeded) if created.contains(&name) => {
                        self.cluster.delete_cleanup(&name).await?;
                        say(&format!("{name}: clean"));
                        self.removed.push(format!("rules and cache of {name}"));
                        waiting.remove(&name);
                    }
                    Some(PodState::Waiting { reason, hopeless }) if hopeless => {
                        self.left.push(format!("{name}: {reason}"));
                        waiting.remove(&name);
                    }
                    None => drop(waiting.remove(&name)),
                    Some(_) => {}
                }
            }
            if Instant::now() >= until {
                let late = waiting.iter().map(|name| format!("{name}: not clean in time"));
                self.left.extend(late);
                return Ok(());
            }
            if !waiting.is_empty() {
                sleep(LOOK).await;
            }
        }
        Ok(())
    }

    /// Removes labels and taints from all nodes, also from those that do not work.
    async fn unmark_nodes(&mut self, gathered: &Gathered) -> Result<(), Failure> {
        for node in &gathered.nodes {
            let name = node.metadata.name.clone().unwrap_or_default();
            let Some(fields) = unmarked(node) else {
                continue;
            };
            let path = format!("/api/v1/nodes/{name}");
            let objects = self.cluster.objects();
            match objects.patch(&path, &fields, Asked("patch nodes")).await {
                Err(error) if error.is_conflict() => {
                    self.left.push(format!("{name}: another program changes its taints"));
                }
                patched => {
                    patched?;
                    self.removed.push(format!("label and taints of {name}"));
                }
            }
        }
        Ok(())
    }

    async fn delete_objects(&mut self) -> Result<(), Failure> {
        let namespace = self.cluster.namespace().to_owned();
        let of_chart = [
            ("apis/apps/v1", "daemonsets", AGENTS),
            ("apis/apps/v1", "deployments", "kplane-controlplane"),
        ];
        // The only copy of kube-proxy's DaemonSet stays.
        let saved = (!self.keeps_saved).then_some(("configmaps", SAVED));
        let own = OWN.into_iter().chain(saved).map(|(plural, name)| ("api/v1", plural, name));
        for (group, plural, name) in of_chart.into_iter().chain(own) {
            let path = format!("/{group}/namespaces/{namespace}/{plural}/{name}");
            let asked = Asked("delete kplane's objects");
            if self.cluster.objects().delete(&path, asked).await? {
                self.removed.push(format!("{plural}/{name}"));
            }
        }
        self.cluster.forget_migration().await
    }
}

/// Returns the patch that removes kplane's label and taints; `None` if the node has neither.
fn unmarked(node: &Node) -> Option<Value> {
    let labels = node.metadata.labels.as_ref();
    let labelled = labels.is_some_and(|labels| labels.contains_key(LABEL));
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
    let (ours, others): (Vec<Taint>, Vec<Taint>) =
        taints.into_iter().partition(|taint| taint.key.starts_with(TAINTS));
    if !labelled && ours.is_empty() {
        return None;
    }
    let mut fields = json!({ "metadata": { "labels": { LABEL: null } } });
    if !ours.is_empty() {
        fields["metadata"]["resourceVersion"] = json!(node.metadata.resource_version);
        fields["spec"] = json!({ "taints": others });
    }
    Some(fields)
}

/// Prints a line about progress. Standard output is for the result.
fn say(line: &str) {
    anstream::eprintln!("{}", kplane_view::text::Span::plain(line).text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kplanes_label_and_taints_go() {
        let node = |value: Value| serde_json::from_value::<Node>(value).unwrap();
        assert_eq!(
            unmarked(&node(json!({ "metadata": { "labels": { "a": "b" } } }))),
            None
        );
        let both = node(json!({
            "metadata": { "labels": { LABEL: "kplane" }, "resourceVersion": "7" },
            "spec": { "taints": [
                { "key": "kplane.io/not-ready", "effect": "NoSchedule" },
                { "key": "dedicated", "effect": "NoExecute" },
            ] },
        }));
        let expected = json!({
            "metadata": { "labels": { LABEL: null }, "resourceVersion": "7" },
            "spec": { "taints": [{ "key": "dedicated", "effect": "NoExecute" }] },
        });
        assert_eq!(unmarked(&both), Some(expected));
    }
}
