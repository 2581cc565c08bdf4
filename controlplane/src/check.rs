//! The flag `--check`: reports problems of manifests without serving them.

use std::path::Path;
use std::process::ExitCode;
use std::time::SystemTime;

use kplane_desired_state::admission::Admission;
use kplane_desired_state::index::{Index, Totals};
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::manifests::load;
use kplane_desired_state::source::{Batch, Event};
use kplane_model::{Issue, Severity};

/// Loads manifests without serving them and prints every problem, one per line, worst first, then a
/// summary. Exit code 0 if everything would be served, 1 if not or if nothing can be read.
pub fn run(path: &Path, admission: Admission) -> ExitCode {
    let loaded = match load(path) {
        Ok(loaded) => loaded,
        Err(error) => {
            eprintln!("kp-controlplane: {:#}", anyhow::Error::from(error));
            return ExitCode::FAILURE;
        }
    };
    let mut events: Vec<Event> = Kind::ALL.into_iter().map(Event::Init).collect();
    events.extend(loaded.objects.into_iter().map(|object| Event::InitApply(Box::new(object))));
    events.extend(Kind::ALL.into_iter().map(Event::InitDone));
    events.push(Event::Issues(loaded.issues));
    events.push(Event::Doubts(loaded.doubts));
    let mut index = Index::new(admission);
    index.apply(Batch {
        events,
        observed_at: SystemTime::now(),
    });
    let doubt = index.trust();
    if doubt.is_partial() {
        println!(
            "incomplete: a control plane that starts with this input removes nothing that is \
             missing: {}",
            doubt.doubt()
        );
    }
    report(path, &index.issues(), index.totals())
}

fn report(path: &Path, issues: &[Issue], totals: Totals) -> ExitCode {
    let of = |severity| issues.iter().filter(move |issue| issue.severity == severity);
    for severity in [Severity::Error, Severity::Warning] {
        for issue in of(severity) {
            println!("{severity}: {issue}");
        }
    }
    let (errors, warnings) = (of(Severity::Error).count(), of(Severity::Warning).count());
    let Totals {
        services,
        endpoints,
        ..
    } = totals;
    println!(
        "{}: {services} Services with {endpoints} endpoints would be served; \
         {errors} errors, {warnings} warnings",
        path.display()
    );
    if errors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
