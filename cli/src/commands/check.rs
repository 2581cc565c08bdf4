//! `kpctl check`: whether all is well, and if not, what to type next.

mod before;
mod nodes;

use kplane_proto::v1 as pb;

use super::migrate::Cluster;
use super::{Verdict, show};
use crate::args::Cli;
use crate::args::check::CheckArgs;
use crate::check::{Finding, Outcome, cluster, fleet, updates};
use crate::failure::Failure;
use crate::migrate::picture::Objects as Gathered;
use crate::reach::{Asked, Reach};
use crate::view::check::CheckView;

/// Runs all checks and shows them.
pub(crate) async fn run(cli: &Cli, args: &CheckArgs) -> Result<Verdict, Failure> {
    let findings = match args.pre {
        true => before::run(cli, args).await,
        false => afterwards(cli, args).await,
    };
    let view = CheckView::new(findings);
    show(cli, &view)?;
    Ok(match view.outcome {
        Outcome::Bad => Verdict::NotReached,
        Outcome::Unknown => Verdict::Blind,
        Outcome::Ok | Outcome::Skipped | Outcome::Warning => Verdict::Done,
    })
}

/// Returns the findings about an installation.
async fn afterwards(cli: &Cli, args: &CheckArgs) -> Vec<Finding> {
    let objects = match Reach::objects(&cli.options).await {
        Ok(objects) => objects,
        Err(error) => {
            // A control plane at an address may have no cluster at all.
            let asked = match super::connect(cli).await {
                Ok((client, _)) => client.fleet().await.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            let skipped = cli.options.place.server.is_some();
            return without_cluster(&asked, &error.to_string(), skipped);
        }
    };
    let mut place = Cluster::new(objects, &cli.options, args.target.kube_proxy.clone());
    match place.gather().await {
        Ok(objects) => {
            let unasked = Err("it was not asked".to_owned());
            let mut findings = of_fleet(objects.fleet.as_ref().unwrap_or(&unasked));
            findings.extend(cluster::findings(&objects));
            findings.push(of_updates(&place, &objects).await);
            findings
        }
        Err(error) => {
            let asked = place.fleet().await.map_err(|error| error.to_string());
            without_cluster(&asked, &error.to_string(), false)
        }
    }
}

/// Returns the finding about rolling updates. It needs rights that a user may well not have.
async fn of_updates(place: &Cluster<'_>, objects: &Gathered) -> Finding {
    let listed = tokio::try_join!(
        place
            .objects()
            .list("/apis/apps/v1/deployments", "", Asked("list deployments")),
        place
            .objects()
            .list("/api/v1/services", "", Asked("list services")),
    );
    match listed {
        Ok((deployments, services)) => updates::finding(objects, &deployments, &services),
        Err(error) => Finding::skipped(updates::CHECK, error.to_string()),
    }
}

fn of_fleet(asked: &Result<pb::Fleet, String>) -> Vec<Finding> {
    match asked {
        Ok(fleet) => fleet::findings(fleet, env!("CARGO_PKG_VERSION")),
        Err(error) => fleet::unreachable(error),
    }
}

/// Returns the findings where the objects of a cluster are not known, and why not.
fn without_cluster(asked: &Result<pb::Fleet, String>, why: &str, skipped: bool) -> Vec<Finding> {
    let mut findings = of_fleet(asked);
    findings.extend(cluster::without(why, skipped, asked.as_ref().ok()));
    findings.push(Finding::skipped(updates::CHECK, why));
    findings
}
