//! A whole agent that begins anew beside a folder that was emptied meanwhile: connections go on.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use kp_nodeagent::config::Config;
use kp_nodeagent::report::Report;
use kplane_tests::client::Probe;
use kplane_tests::load::{Load, Pace};
use kplane_tests::netns::NetNs;

use crate::netns::whole::{NodeAgent, applied, numbered, place, standalone, write};
use kplane_tests::support::{Client, World, pod_ips};
use kplane_tests::wait::DEADLINE;

/// As many as it takes for a cliff.
const SERVICES: usize = 12;

/// Runs an agent until its report is as it should be, and then as long as a load takes to notice.
fn run(
    node: &NetNs,
    config: &Config,
    load: Option<&Load>,
    wanted: impl Fn(&Report) -> bool,
) -> Result<()> {
    let agent = NodeAgent::start(node, config)?;
    agent.reports(wanted)?;
    load.map_or(Ok(()), |load| load.goes_on(20, DEADLINE))?;
    agent.stop()
}

pub(crate) fn a_start_beside_an_emptied_folder_cuts_nobody_off() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let services = (0..SERVICES).flat_map(|number| numbered(number, &pod_ips(1, 1)[..1]));
    write(folder.path(), "services", &services.collect::<Vec<_>>())?;
    let world = World::without_agents()?;
    let client = world.net.ns(Client::Outside)?;
    let to = Probe::tcp(place(3));
    let start = |cache: &Path, load, wanted: &dyn Fn(&Report) -> bool| {
        run(
            world.node(1)?,
            &standalone(1, cache, folder.path(), &[])?,
            load,
            wanted,
        )
    };
    start(cache.path(), None, &|report| {
        applied(report) && report.counts.services == 12
    })?;
    let pace = Pace {
        threads: 1,
        ..Pace::default()
    };
    let load = Load::start(client, to, pace)?;
    let mut session = to.open(client)?;

    fs::remove_file(folder.path().join("services.yaml"))?;
    let kept = |report: &Report| {
        let held = report.keeps.as_ref().is_some_and(|held| held.services == SERVICES);
        applied(report) && held
    };
    start(cache.path(), Some(&load), &kept)?;
    session.echo(DEADLINE)?;
    // Without memory nobody can tell which these are: nothing is touched.
    let untouched = |report: &Report| {
        let untouched =
            report.keeps.as_ref().is_some_and(kp_nodeagent::desired::Held::is_untouched);
        report.applied.is_none() && untouched
    };
    start(Path::new(""), Some(&load), &untouched)?;
    session.echo(DEADLINE)?;
    let report = load.stop();
    ensure!(report.lost() == 0 && report.ok() > 0, "{report}");
    Ok(())
}
