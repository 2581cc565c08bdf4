//! `--cleanup`: takes out of the kernel what is ours, and what is kube-proxy's only when asked (I4).
//!
//! Nothing goes beside a running agent, which would write it again, and nothing that has kube-proxy's names
//! goes beside a running kube-proxy, which would not notice: it believes its rules to be there.

use std::fmt;
use std::path::PathBuf;

use crate::cache::Cache;
use crate::claim::{self, Claim, Taken};
use kplane_dataplane::backend;
use kplane_dataplane::leftovers::{self, Ports, Rival};

/// What to take out.
#[derive(Clone, Debug)]
pub struct Task {
    /// The mode of what is ours.
    pub backend: backend::Kind,
    /// Its settings.
    pub settings: backend::Settings,
    /// What is kube-proxy's as well.
    pub kube_proxy: bool,
    /// Only say what would go.
    pub dry_run: bool,
    /// Where a kube-proxy may listen.
    pub ports: Ports,
    /// Folder in which agents wrote down what they served.
    pub cache_dir: Option<PathBuf>,
}

/// What was done, or would be.
#[derive(Debug, Default)]
pub struct Done {
    /// What went, would go or stays, a line each.
    pub lines: Vec<String>,
    /// Why it was not done, or not in full, and what to do about it.
    pub problems: Vec<String>,
}

/// Carries it out in the calling thread's network namespace. Safe to repeat. Blocks.
#[must_use]
pub fn run(task: &Task) -> Done {
    let mut done = Done::default();
    if !task.backend.describe().programs_kernel && !task.kube_proxy {
        return done.or_nothing(task.dry_run);
    }
    // While this is held no agent starts.
    let _claim = claim(task.dry_run, &mut done.problems);
    done.problems
        .extend(rival(task).map(|rival| refusal(task, rival)));
    if !task.dry_run && !done.problems.is_empty() {
        return done;
    }
    let all = [
        (Owner::Kplane, leftovers::ours(task.backend, &task.settings)),
        (Owner::KubeProxy, leftovers::kube_proxys(task.backend)),
    ];
    let mut stays = Vec::new();
    for (owner, found) in all {
        if owner == Owner::KubeProxy && !task.kube_proxy {
            let names = found.names();
            stays.extend(names.map(|name| format!("stays: {owner} {name}")));
        } else if task.dry_run {
            done.tell(owner, "would go", found.names());
            done.problems
                .extend(found.problems().iter().map(ToString::to_string));
        } else {
            let outcome = found.remove();
            done.tell(owner, "gone", outcome.removed.into_iter());
            done.problems
                .extend(outcome.problems.iter().map(ToString::to_string));
        }
    }
    done.forget(task);
    if !task.dry_run {
        done.problems.extend(rival(task).map(|rival| {
            format!(
                "a kube-proxy has started meanwhile and may lack rules now ({rival}): restart it"
            )
        }));
    }
    done = done.or_nothing(task.dry_run);
    if !stays.is_empty() {
        done.lines.append(&mut stays);
        done.lines.push(STAYS.to_owned());
    }
    done
}

/// Said behind what has kube-proxy's names and stays.
const STAYS: &str = "remove that with --cleanup-kube-proxy; or what kplane made of it in mode iptables or \
                     ipvs with --cleanup --backend iptables (or ipvs)";

/// Whose names something has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    Kplane,
    KubeProxy,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kplane => "kplane's",
            Self::KubeProxy => "kube-proxy's",
        })
    }
}

impl Done {
    fn tell(&mut self, owner: Owner, verb: &str, names: impl Iterator<Item = String>) {
        self.lines
            .extend(names.map(|name| format!("{verb}: {owner} {name}")));
    }

    /// What agents wrote down goes as well: the next one is not to put back what it reads there.
    fn forget(&mut self, task: &Task) {
        let Some(folder) = &task.cache_dir else {
            return;
        };
        let (verb, files) = match task.dry_run {
            true => ("would go", Cache::files(folder).map(|files| files.len())),
            false => ("gone", Cache::forget(folder)),
        };
        let what = || ["memory of what was served".to_owned()].into_iter();
        match files {
            Ok(0) => {}
            Ok(_) => self.tell(Owner::Kplane, verb, what()),
            Err(error) => self.problems.push(format!(
                "cannot remove what agents wrote down in {}: {error}",
                folder.display()
            )),
        }
    }

    fn or_nothing(mut self, dry_run: bool) -> Self {
        if self.lines.is_empty() && self.problems.is_empty() {
            let tense = if dry_run { "is" } else { "was" };
            self.lines.push(format!("there {tense} nothing to remove"));
        }
        self
    }
}

/// Keeps agents away; a dry run only asks.
fn claim(dry_run: bool, problems: &mut Vec<String>) -> Option<Claim> {
    let taken = match dry_run {
        true => match claim::at_work() {
            Ok(Some(holder)) => Err(Taken(holder)),
            Ok(None) | Err(_) => Ok(None),
        },
        false => Claim::take(),
    };
    taken.unwrap_or_else(|Taken(holder)| {
        problems.push(format!(
            "nothing is removed beside a kp-nodeagent that runs ({holder}), which would write it again: \
             stop it first"
        ));
        None
    })
}

/// A running kube-proxy, where it matters.
fn rival(task: &Task) -> Option<Rival> {
    let matters = task.kube_proxy || task.backend.describe().shares_names;
    matters.then(|| leftovers::running(task.ports)).flatten()
}

fn refusal(task: &Task, rival: Rival) -> String {
    let way_out = match task.backend.describe().shares_names {
        true => "stop it first, since what is kplane's has its names in this mode",
        false => "stop it first, or remove what is kplane's alone with --cleanup",
    };
    format!(
        "nothing is removed beside a kube-proxy that runs ({rival}), which would not notice that its rules \
         are gone: {way_out}"
    )
}
