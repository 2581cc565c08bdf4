//! `kpctl bundle`: everything that the control plane knows, in one file.

use std::collections::BTreeSet;
use std::path::PathBuf;

use jiff::Timestamp;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use serde::Serialize;

use super::{Verdict, connect, listing, show};
use crate::args::Cli;
use crate::args::record::BundleArgs;
use crate::bundle::{Addresses, Bundle};
use crate::client::{Client, Error};
use crate::failure::Failure;
use kplane_view::bundle::{BundleView, PartView};
use kplane_view::changes::ServiceHistoryView;
use kplane_view::declared::Listing;
use kplane_view::describe::DescriptionView;
use kplane_view::endpoints::EndpointListView;
use kplane_view::fleet::FleetView;
use kplane_view::policies::PolicyListView;
use kplane_view::services::ServiceListView;
use kplane_view::version::VersionView;

/// Maximum number of Services that are described.
const DESCRIBED: usize = 50;
/// Number of changes of each of them.
const CHANGES: u32 = 200;

/// A bundle in progress.
struct Collector {
    bundle: Bundle,
    view: BundleView,
}

impl Collector {
    /// Adds a part, or the reason why it cannot be had.
    fn add(&mut self, name: &str, text: Result<String, String>) -> Result<(), Failure> {
        let added = match text {
            Ok(text) => self.bundle.add(name, &text)?,
            Err(problem) => Err(problem),
        };
        let (bytes, problem) = match added {
            Ok(bytes) => (Some(bytes), None),
            Err(problem) => (None, Some(problem)),
        };
        self.view.parts.push(PartView {
            name: name.to_owned(),
            bytes,
            problem,
        });
        Ok(())
    }

    /// Adds a part of a view.
    fn view<V: Serialize>(&mut self, name: &str, view: Result<V, Error>) -> Result<(), Failure> {
        let text = view.map_err(|error| error.to_string()).and_then(|view| {
            serde_json::to_string_pretty(&view).map_err(|error| error.to_string())
        });
        self.add(name, text)
    }
}

/// Runs the command.
pub(crate) async fn run(cli: &Cli, args: &BundleArgs) -> Result<Verdict, Failure> {
    let asked = args.services()?;
    let (client, _) = connect(cli).await?;
    let now = Timestamp::now();
    let file = args.file.clone().unwrap_or_else(|| {
        PathBuf::from(now.strftime("kplane-bundle-%Y%m%dT%H%M%SZ.tar.gz").to_string())
    });
    let addresses = args.hash_addresses.then(Addresses::new);
    let seconds = u64::try_from(now.as_second()).unwrap_or_default();
    let mut to = Collector {
        bundle: Bundle::new(seconds, addresses),
        view: BundleView::new(file.display().to_string(), args.hash_addresses),
    };
    let services = fleet(&client, &mut to, asked).await?;
    for name in services.iter().take(DESCRIBED) {
        service(&client, &mut to, name).await?;
    }
    let listed = serde_json::to_string_pretty(&to.view).map_err(std::io::Error::other)?;
    to.add("bundle.json", Ok(listed))?;
    let Collector { bundle, mut view } = to;
    let written = bundle.write(&file).map_err(|error| {
        Failure::Refused(format!(
            "cannot write {}: {error}. Name another file with --file",
            file.display()
        ))
    })?;
    view.bytes = Some(written);
    show(cli, &view)?;
    Ok(if view.lacks_parts() { Verdict::Blind } else { Verdict::Done })
}

/// Adds what is about the whole fleet; returns the Services that are worth a look.
async fn fleet(
    client: &Client,
    to: &mut Collector,
    asked: Vec<ServiceName>,
) -> Result<Vec<ServiceName>, Failure> {
    let mut services = asked;
    let fleet = client.fleet().await;
    let plane = fleet.as_ref().ok().and_then(|fleet| fleet.control_plane.as_ref());
    let version = plane.map(|plane| plane.version.clone());
    let issues = plane.into_iter().flat_map(|plane| &plane.issues);
    let with_issues = issues.filter(|issue| issue.kind == "Service");
    services.extend(with_issues.map(|issue| ServiceName::new(&issue.namespace, &issue.name)));
    to.view("version.json", Ok(VersionView::new(version)))?;
    to.view("status.json", fleet.map(FleetView::from))?;
    let ports = client.services(pb::ListServicesRequest::default()).await;
    match ports {
        Ok(ports) => {
            let view = ServiceListView::new(ports.clone(), None);
            to.view("services.json", Ok(view))?;
            to.view("endpoints.json", Ok(EndpointListView::new(ports, None)))?;
        }
        Err(error) => to.add("services.json", Err(error.to_string()))?,
    }
    let policies = client.policies("").await;
    if !policies.as_ref().is_err_and(Error::is_precondition) {
        let view = policies.map(|policies| PolicyListView::new(policies, None));
        to.view("policies.json", view)?;
    }
    for kind in Listing::all().iter().filter(|kind| kind.is_of_all()) {
        let list = listing::all(client, kind).await;
        if !list.as_ref().is_err_and(Error::is_precondition) {
            to.view(&format!("{}.json", kind.name()), list)?;
        }
    }
    let metrics = client.metrics().await;
    to.add("metrics.txt", metrics.map_err(|error| error.to_string()))?;
    let mut known = BTreeSet::new();
    services.retain(|name| known.insert(name.clone()));
    Ok(services)
}

/// Adds what is about one Service.
async fn service(client: &Client, to: &mut Collector, name: &ServiceName) -> Result<(), Failure> {
    let (namespace, short) = (name.namespace.to_string(), name.name.to_string());
    let description = client.describe(name).await;
    let described = description.map(|reported| DescriptionView::new(&namespace, &short, reported));
    to.view(
        &format!("services/{namespace}/{short}/describe.json"),
        described,
    )?;
    let request = pb::ServiceHistoryRequest {
        namespace: namespace.clone(),
        name: short.clone(),
        node: String::new(),
        limit: CHANGES,
    };
    let history = client
        .service_history(name, request)
        .await
        .map(|reported| ServiceHistoryView::new(name, "", reported));
    to.view(
        &format!("services/{namespace}/{short}/history.json"),
        history,
    )
}
