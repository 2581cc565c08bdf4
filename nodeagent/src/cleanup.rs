//! Implements `--cleanup`: removes kplane's rules from the kernel, and kube-proxy's only on request (I4).
//!
//! A cleanup is refused while an agent runs, which would write its rules again. Rules with kube-proxy's
//! names are not removed while a kube-proxy runs, which assumes that its rules exist and would not notice.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::cache::Cache;
use crate::claim::{self, Claim, Taken};
use kplane_dataplane::backend;
use kplane_dataplane::kernel_setting;
use kplane_dataplane::leftovers::{self, CompetingProxy, Leftovers, Ports};

/// A cleanup as the command line requests it.
#[derive(Clone, Debug)]
pub struct Cleanup {
    /// The mode whose rules to remove.
    pub backend: backend::Kind,
    /// The settings of that backend.
    pub settings: backend::Settings,
    /// Whether to remove kube-proxy's rules as well.
    pub kube_proxy: bool,
    /// Whether to list only what would be removed.
    pub dry_run: bool,
    /// The ports on which a kube-proxy may listen.
    pub ports: Ports,
    /// The folder of the cache files that agents wrote.
    pub cache_dir: Option<PathBuf>,
    /// Longest wait for a kube-proxy that takes the node over: nothing is removed before its own rules are in the
    /// kernel. `None` = kube-proxy does not take over.
    pub after_kube_proxy: Option<Duration>,
}

/// The outcome of a cleanup, or of a dry run.
#[derive(Debug, Default)]
pub struct Done {
    /// One line for each thing that was removed, would be removed, or stays.
    pub lines: Vec<String>,
    /// The reasons why the cleanup was not done in full, and what to do about them.
    pub problems: Vec<String>,
}

/// Runs the cleanup in the calling thread's network namespace. Blocks. Safe to repeat.
pub fn run(task: &Cleanup) -> Done {
    let mut done = Done::default();
    if !task.backend.describe().programs_kernel && !task.kube_proxy {
        return done.or_nothing(task.dry_run);
    }
    // No agent starts while the claim is held.
    let _claim = claim(task, &mut done.problems);
    if let (Some(limit), true) = (task.after_kube_proxy, done.problems.is_empty()) {
        if let Err(problem) = takes_over(task, limit) {
            done.problems.push(problem);
            return done;
        }
        if task.backend.describe().shares_names {
            done.lines.push(
                "kept: the rules, which kube-proxy has taken over, because they have its names"
                    .to_owned(),
            );
            done.remove(Owner::Kplane, leftovers::own_names());
            done.forget(task);
            return done;
        }
    }
    if done.problems.is_empty() {
        // An agent that runs answers at kube-proxy's ports as kube-proxy does.
        let competing_proxy =
            competing_proxy(task).map(|competing_proxy| refusal(task, competing_proxy));
        done.problems.extend(competing_proxy);
    }
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
            stays.extend(names.map(|name| format!("kept: {owner} {name}")));
        } else if task.dry_run {
            done.tell(owner, "would remove", found.names());
            done.problems.extend(found.problems().iter().map(ToString::to_string));
        } else {
            done.remove(owner, found);
        }
    }
    done.put_back(task);
    done.forget(task);
    if !task.dry_run {
        done.problems.extend(competing_proxy(task).map(|competing_proxy| {
            format!(
                "kube-proxy started during the cleanup and may have lost rules ({competing_proxy}): restart \
                 kube-proxy"
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

/// Text printed after anything that has kube-proxy's names and stays.
const STAYS: &str = "to remove what is kept, use --cleanup-kube-proxy; if kplane made it in mode \
                     iptables or ipvs, use --cleanup --backend iptables (or ipvs)";

/// The program whose names a rule or an object has.
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
        self.lines.extend(names.map(|name| format!("{verb}: {owner} {name}")));
    }

    fn remove(&mut self, owner: Owner, found: Leftovers) {
        let outcome = found.remove();
        self.tell(owner, "removed", outcome.removed.into_iter());
        self.problems.extend(outcome.problems.iter().map(ToString::to_string));
    }

    /// Restores the kernel settings that agents changed. A kube-proxy that runs may rely on them.
    fn put_back(&mut self, task: &Cleanup) {
        let root = Path::new("/");
        let text = task.cache_dir.as_deref().map(Cache::kernel_settings);
        let settings = kernel_setting::parse(&text.unwrap_or_default(), root);
        let Some(first) = settings.iter().find(|setting| setting.is_ours(root)) else {
            return;
        };
        if leftovers::running(task.ports).is_some() {
            let text = format!("kept: kernel settings that kube-proxy may need; before, {first}");
            self.lines.push(text);
            return;
        }
        for setting in settings.iter().filter(|setting| setting.is_ours(root)) {
            let put_back = if task.dry_run {
                Ok("would set")
            } else {
                setting.put_back(root).map(|()| "set")
            };
            self.lines.push(match put_back {
                Ok(verb) => format!("{verb}: {setting}, as before"),
                Err(error) => format!("kept: a kernel setting ({error}); before, {setting}"),
            });
        }
    }

    /// Deletes the cache files as well, so that the next agent does not restore what they contain.
    fn forget(&mut self, task: &Cleanup) {
        let Some(folder) = &task.cache_dir else {
            return;
        };
        let (verb, files) = if task.dry_run {
            (
                "would remove",
                Cache::files(folder).map(|files| files.len()),
            )
        } else {
            ("removed", Cache::forget(folder))
        };
        let what = || ["cache of what was served".to_owned()].into_iter();
        if !task.dry_run {
            // The folder stays if other files are in it, or if it is a mount.
            let _ = std::fs::remove_dir(folder);
        }
        match files {
            Ok(0) => {}
            Ok(_) => self.tell(Owner::Kplane, verb, what()),
            Err(error) => self.problems.push(format!(
                "cannot remove the cache in {}: {error}",
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

/// Time between two checks for kube-proxy's rules.
const TAKE_OVER_LOOK: Duration = Duration::from_secs(1);

/// Waits until a kube-proxy runs and its own rules are in the kernel. kube-proxy writes a family at a time, so the
/// rules must be the same twice.
fn takes_over(task: &Cleanup, limit: Duration) -> Result<(), String> {
    let until = Instant::now() + limit;
    let mut before = None;
    loop {
        let runs = leftovers::running(task.ports).is_some();
        // With shared names there is no telling whose rules these are.
        let shared = task.backend.describe().shares_names;
        let names: Option<BTreeSet<String>> = if shared {
            Some(BTreeSet::new())
        } else {
            let found = leftovers::kube_proxys(task.backend);
            let problems = found.problems().iter().map(ToString::to_string);
            let names = || problems.chain(found.names()).collect();
            found.serve().then(names)
        };
        if runs && names.is_some() && names == before {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(format!(
                "nothing is removed, because kube-proxy does not serve this node after {} s: {}",
                limit.as_secs(),
                if runs {
                    "it runs, and has not written rules; read its log"
                } else {
                    "no kube-proxy runs; start it"
                }
            ));
        }
        before = names;
        sleep(TAKE_OVER_LOOK);
    }
}

/// Keeps agents from starting; a dry run only checks for one.
fn claim(task: &Cleanup, problems: &mut Vec<String>) -> Option<Claim> {
    let folder = task.cache_dir.as_deref();
    let taken = if task.dry_run {
        match claim::at_work(folder) {
            Ok(Some(holder)) => Err(Taken(holder)),
            Ok(None) | Err(_) => Ok(None),
        }
    } else {
        Claim::take(folder)
    };
    taken.unwrap_or_else(|Taken(holder)| {
        problems.push(format!(
            "nothing is removed while a kp-nodeagent runs ({holder}), because it would write \
             everything again: stop the agent first"
        ));
        None
    })
}

/// Returns a running kube-proxy, if the cleanup concerns kube-proxy's names.
fn competing_proxy(task: &Cleanup) -> Option<CompetingProxy> {
    let matters = task.kube_proxy || task.backend.describe().shares_names;
    matters.then(|| leftovers::running(task.ports)).flatten()
}

fn refusal(task: &Cleanup, competing_proxy: CompetingProxy) -> String {
    let way_out = if task.backend.describe().shares_names {
        "stop kube-proxy first, because kplane uses the same names in this mode"
    } else {
        "stop kube-proxy first, or remove only kplane's objects with --cleanup"
    };
    format!(
        "nothing is removed while a kube-proxy runs ({competing_proxy}), because it would not notice that \
         its rules are removed: {way_out}"
    )
}
