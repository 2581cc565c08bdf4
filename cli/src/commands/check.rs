//! `kpctl check`: whether all is well, and if not, what to type next.

mod before;
mod nodes;

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;

use super::migrate::Cluster;
use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::args::check::CheckArgs;
use crate::args::probe;
use crate::check::{Finding, Outcome, cluster, dns, fleet, neighbours, ranges, updates};
use crate::client::Stub;
use crate::connection::{Asked, Route};
use crate::failure::Failure;
use crate::migrate::snapshot::Objects as Gathered;
use crate::view::check::CheckView;

/// The checks that need all Services of a cluster.
const OF_SERVICES: [&str; 2] = [ranges::CHECK, updates::CHECK];

/// Runs all checks and shows them.
pub(crate) async fn run(cli: &Cli, args: &CheckArgs) -> Result<Verdict, Failure> {
    let findings = if args.pre {
        before::run(cli, args).await
    } else {
        afterwards(cli, args).await
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
    let objects = match Route::objects(&cli.options).await {
        Ok(objects) => objects,
        Err(error) => {
            // A control plane at an address may have no cluster at all.
            let asked = match connect(cli).await {
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
            findings.extend(of_services(&place, &objects).await);
            findings.push(of_dns(cli).await);
            findings.push(of_neighbours(cli).await);
            findings
        }
        Err(error) => {
            let asked = place.fleet().await.map_err(|error| error.to_string());
            without_cluster(&asked, &error.to_string(), false)
        }
    }
}

/// Returns the findings about Services and Deployments. They need rights that a user may well not have.
async fn of_services(place: &Cluster<'_>, objects: &Gathered) -> [Finding; 2] {
    let list = place.objects();
    let services = list.list("/api/v1/services", "", Asked("list services"));
    let services = match services.await {
        Ok(listed) => listed,
        Err(error) => return OF_SERVICES.map(|check| Finding::skipped(check, error.to_string())),
    };
    let path = "/apis/networking.k8s.io/v1/servicecidrs";
    let (ranges, deployments) = tokio::join!(
        list.list(path, "", Asked("list servicecidrs")),
        list.list("/apis/apps/v1/deployments", "", Asked("list deployments")),
    );
    let ranges = match &ranges {
        Ok(listed) => ranges::finding(&services, Some(listed)),
        Err(error) if error.is_missing() => ranges::finding(&services, None),
        Err(error) => Finding::skipped(ranges::CHECK, error.to_string()),
    };
    let updates = match &deployments {
        Ok(listed) => updates::finding(objects, listed, &services),
        Err(error) => Finding::skipped(updates::CHECK, error.to_string()),
    };
    [ranges, updates]
}

/// Lets all agents ask the cluster's DNS. That needs a right that a user may well not have, and the usual Service.
async fn of_dns(cli: &Cli) -> Finding {
    let (name, request) = probe::of_dns();
    match probed(cli, &name, request).await {
        Ok(report) => dns::finding(&report),
        Err(error) => Finding::skipped(dns::CHECK, error.to_string()),
    }
}

/// Lets some agents try the ports of other nodes. That needs the same right.
async fn of_neighbours(cli: &Cli) -> Finding {
    let request = pb::ProbeRequest {
        neighbours: true,
        ..pb::ProbeRequest::default()
    };
    match probed(cli, &ServiceName::new("default", "kubernetes"), request).await {
        Ok(report) => neighbours::finding(&report),
        Err(error) => Finding::skipped(neighbours::CHECK, error.to_string()),
    }
}

async fn probed(
    cli: &Cli,
    name: &ServiceName,
    request: pb::ProbeRequest,
) -> Result<pb::ProbeReport, Failure> {
    let ask = async |mut stub: Stub| stub.probe_nodes(request).await;
    let (client, _) = connect(cli).await?;
    Ok(client.about(name, ask).await?)
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
    let of_cluster = OF_SERVICES.into_iter().chain([dns::CHECK, neighbours::CHECK]);
    findings.extend(of_cluster.map(|check| Finding::skipped(check, why)));
    findings
}
