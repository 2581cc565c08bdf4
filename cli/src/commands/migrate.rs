//! `kpctl migrate`: from kube-proxy to kplane and back, node by node.

mod act;
mod gather;
mod restore;
mod walk;

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Node;

use super::{Verdict, ask, show};
use crate::args::Cli;
use crate::args::migrate::{MigrateCommand, TargetArgs, WalkArgs};
use crate::connection::{Asked, Route};
use crate::failure::Failure;
use crate::migrate::order::{Chosen, Order};
use crate::migrate::plan;
use crate::migrate::record::{Direction, Record};
use crate::migrate::snapshot::Snapshot;
use crate::migrate::stage::Stage;
use crate::view::migration::MigrationView;

pub(super) use gather::{Cluster, SAVED};
use walk::Walk;

/// Runs a command.
pub(crate) async fn run(cli: &Cli, command: &MigrateCommand) -> Result<Verdict, Failure> {
    match command {
        MigrateCommand::Plan(target) => snapshot(cli, target, true).await,
        MigrateCommand::Status(target) => snapshot(cli, target, false).await,
        MigrateCommand::Start(args) => walk(cli, args, Direction::ToKplane, None).await,
        MigrateCommand::Back { walk: args, image } => {
            walk(cli, args, Direction::Back, image.as_deref()).await
        }
        MigrateCommand::Pause(target) => pause(cli, target).await,
        MigrateCommand::Finish { yes, target } => finish(cli, target, *yes).await,
    }
}

/// Opens the way to the cluster.
async fn open<'a>(cli: &'a Cli, target: &TargetArgs) -> Result<Cluster<'a>, Failure> {
    let objects = Route::objects(&cli.options).await?;
    Ok(Cluster::new(
        objects,
        &cli.options,
        target.kube_proxy.clone(),
    ))
}

/// Shows the snapshot; for a plan, what stands in the way decides about the exit code.
async fn snapshot(cli: &Cli, target: &TargetArgs, plan: bool) -> Result<Verdict, Failure> {
    let mut cluster = open(cli, target).await?;
    let snapshot = Snapshot::from(&cluster.gather().await?);
    let view = MigrationView::new(&snapshot);
    show(cli, &view)?;
    Ok(if plan && view.is_blocked() { Verdict::NotReached } else { Verdict::Done })
}

async fn walk(
    cli: &Cli,
    args: &WalkArgs,
    direction: Direction,
    image: Option<&str>,
) -> Result<Verdict, Failure> {
    let mut cluster = open(cli, &args.target).await?;
    let order = Order {
        direction,
        chosen: chosen(&cluster, args).await?,
        at_a_time: args.at_a_time.into(),
    };
    let end = Walk::new(&mut cluster, order, args.node_timeout, image).run().await?;
    show(
        cli,
        &MigrationView::new(&end.snapshot).stopped(end.problem.clone()),
    )?;
    Ok(match end.problem {
        Some(_) => Verdict::NotReached,
        None => Verdict::Done,
    })
}

/// Returns the nodes that the flags choose.
async fn chosen(cluster: &Cluster<'_>, args: &WalkArgs) -> Result<Chosen, Failure> {
    if args.all {
        return Ok(Chosen::All);
    }
    let labels = args.selector.clone().unwrap_or_default();
    let nodes: Vec<Node> =
        cluster.objects().list("/api/v1/nodes", &labels, Asked("list nodes")).await?;
    let there: BTreeSet<String> = nodes.into_iter().filter_map(|node| node.metadata.name).collect();
    if args.selector.is_some() {
        return if there.is_empty() {
            Err(Failure::Refused(format!(
                "no node has the labels {labels}. List them with: kubectl get nodes --show-labels"
            )))
        } else {
            Ok(Chosen::Named(there))
        };
    }
    match args.node.iter().find(|name| !there.contains(*name)) {
        Some(name) => Err(Failure::Refused(format!(
            "the cluster has no node {name}. List them with: kubectl get nodes"
        ))),
        None => Ok(Chosen::Named(args.node.iter().cloned().collect())),
    }
}

/// Writes into the annotation that no further node moves.
async fn pause(cli: &Cli, target: &TargetArgs) -> Result<Verdict, Failure> {
    let mut cluster = open(cli, target).await?;
    let objects = cluster.gather().await?;
    let Some(record) = Snapshot::from(&objects).record().cloned() else {
        return Err(Failure::Refused(
            "there is no migration to pause. See: kpctl migrate status".to_owned(),
        ));
    };
    let paused = Record {
        paused: true,
        ..record
    };
    cluster.write_record(&paused).await?;
    let snapshot = Snapshot::from(&cluster.gather().await?);
    show(cli, &MigrationView::new(&snapshot))
}

/// Deletes kube-proxy's DaemonSet.
async fn finish(cli: &Cli, target: &TargetArgs, yes: bool) -> Result<Verdict, Failure> {
    let mut cluster = open(cli, target).await?;
    let objects = cluster.gather().await?;
    let snapshot = Snapshot::from(&objects);
    if let Some(blocked) = plan::unfinished(&snapshot) {
        show(cli, &MigrationView::new(&snapshot).stopped(Some(blocked)))?;
        return Ok(Verdict::NotReached);
    }
    if objects.kube_proxy.is_some() {
        let stages = snapshot.nodes.iter().map(Stage::of);
        let count = stages.filter(|stage| *stage == Stage::Kplane).count();
        let kube_proxy = &target.kube_proxy;
        anstream::eprintln!("kplane serves {count} nodes, and each is verified.");
        if !yes && !ask(&format!("Delete DaemonSet {kube_proxy}? [y/N] "))? {
            anstream::eprintln!("Nothing was deleted.");
            return Ok(Verdict::Declined);
        }
        cluster.save_and_delete().await?;
    }
    let snapshot = Snapshot::from(&cluster.gather().await?);
    show(cli, &MigrationView::new(&snapshot))
}
