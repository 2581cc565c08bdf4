//! kplane beside what else brings a change to thousands of clients.

use anyhow::Result;
use kplane_tests::bench::workload::show;
use kplane_tests::fleet::{apart, inside};
use kplane_tests::rivals::{Measured, nats, watches};

use super::simulator::{Args, machine};

const HEAD: &str = "\
| server | clients | connected | memory for each | a change: first | 50 % | 99 % | all | CPU a message |
| ------ | ------: | --------: | --------------: | --------------: | ---: | ---: | --: | ------------: |
";

/// Measures the others, one after the other; returns the table with a row of kplane.
pub(crate) fn run(args: &Args, agents: u32, ours: &Measured) -> Result<String> {
    let machine = machine()?;
    let watchers = args.watches.unwrap_or(agents);
    let mut rows = row("kplane", agents, &Ok(ours.clone()));
    print!("\n{HEAD}{rows}");
    let nats = apart(nats::measure(agents, args.changes));
    rows += &printed(row("NATS", agents, &nats));
    let watches = watch(args, watchers);
    rows += &printed(row("kube-apiserver", watchers, &watches));
    Ok(format!("{machine}\n\n{HEAD}{rows}"))
}

fn watch(args: &Args, watchers: u32) -> Result<Measured> {
    let (cluster, mut input) = watches::cluster(1, args.services)?;
    let measured = watches::measure(&cluster, &mut input, watchers, args.changes);
    inside(cluster.ns(), measured)
}

fn printed(row: String) -> String {
    print!("{row}");
    row
}

fn row(server: &str, clients: u32, measured: &Result<Measured>) -> String {
    let measured = match measured {
        Ok(measured) => measured,
        Err(error) => return format!("| {server} | {clients} | not borne: {error:#} |\n"),
    };
    let latencies = [0.0, 50.0, 99.0, 100.0].map(|percent| {
        let took = measured.latencies.percentile(percent);
        show(took)
    });
    format!(
        "| {server} | {clients} | {:.1} s | {} KiB | {} | {} |\n",
        measured.connected.as_secs_f64(),
        measured.memory_each >> 10,
        latencies.join(" | "),
        show(measured.cpu_each),
    )
}
