//! `kpctl check`: whether all is well, and if not, what to type next.

mod before;
mod nodes;

use super::migrate::Cluster;
use super::{Verdict, show};
use crate::args::Cli;
use crate::args::check::CheckArgs;
use crate::check::{Finding, Outcome, cluster, fleet};
use crate::failure::Failure;
use crate::reach::Reach;
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
    let version = env!("CARGO_PKG_VERSION");
    let objects = match Reach::objects(&cli.options).await {
        Ok(objects) => objects,
        Err(error) => {
            // A control plane at an address may have no cluster at all.
            let mut findings = match super::connect(cli).await {
                Ok((client, _)) => match client.fleet().await {
                    Ok(answer) => fleet::findings(&answer, version),
                    Err(error) => fleet::unreachable(&error.to_string()),
                },
                Err(error) => fleet::unreachable(&error.to_string()),
            };
            let skipped = cli.options.place.server.is_some();
            findings.extend(cluster::without(&error.to_string(), skipped));
            return findings;
        }
    };
    let mut place = Cluster::new(objects, &cli.options, args.target.kube_proxy.clone());
    match place.gather().await {
        Ok(objects) => {
            let mut findings = match &objects.fleet {
                Some(Ok(answer)) => fleet::findings(answer, version),
                Some(Err(error)) => fleet::unreachable(error),
                None => fleet::unreachable("it was not asked"),
            };
            findings.extend(cluster::findings(&objects));
            findings
        }
        Err(error) => {
            let mut findings = match place.fleet().await {
                Ok(answer) => fleet::findings(&answer, version),
                Err(error) => fleet::unreachable(&error.to_string()),
            };
            findings.extend(cluster::without(&error.to_string(), false));
            findings
        }
    }
}
