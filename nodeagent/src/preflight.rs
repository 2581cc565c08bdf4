//! `--preflight`: whether this machine can run the agent. Changes nothing: backends are tried out in a network namespace
//! that ends with its thread.

use std::fs;
use std::path::Path;
use std::thread;

use kplane_dataplane::backend::{self, Kind};
use kplane_dataplane::chain;
use kplane_dataplane::leftovers::{self, CompetingProxy, Ports};
use nix::sched::{CloneFlags, unshare};
use nix::sys::utsname::uname;
use serde::Serialize;

use crate::config::kube_proxy::{Level, Note};
use crate::sysctl;

/// The oldest kernel with which kplane is tested.
const OLDEST: (u32, u32) = (5, 13);

/// Programs that own rules or Services, by the names of their processes, and what that means.
const OWNERS: [(&str, &str); 7] = [
    (
        "firewalld",
        "a reload of firewalld must not flush other tables: check FlushAllOnReload=no",
    ),
    ("dockerd", "docker's rules stay beside those of kplane"),
    (
        "calico-node",
        "Calico's rules stay; its eBPF mode must be off",
    ),
    (
        "cilium-agent",
        "Cilium must not replace kube-proxy: kubeProxyReplacement=false",
    ),
    (
        "kube-router",
        "kube-router must not serve Services: --run-service-proxy=false",
    ),
    (
        "antrea-agent",
        "Antrea must not serve Services: antreaProxy.proxyAll=false",
    ),
    ("flanneld", "flannel's rules stay beside those of kplane"),
];

/// The outcome of a check, in the words of `kpctl check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Outcome {
    /// All is well.
    Ok,
    /// The check does not apply here.
    Skipped,
    /// All works, and something deserves attention.
    Warning,
    /// The check could not be made.
    Unknown,
    /// Something is wrong.
    Bad,
}

/// The finding of a check, as `kpctl check` has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckFinding {
    /// The name of the check.
    pub check: String,
    /// The outcome.
    pub outcome: Outcome,
    /// One line.
    pub summary: String,
    /// More lines.
    pub details: Vec<String>,
    /// What to do next; empty if all is well.
    pub remedy: String,
}

fn finding(
    check: &str,
    outcome: Outcome,
    summary: impl Into<String>,
    remedy: &str,
) -> CheckFinding {
    CheckFinding {
        check: check.to_owned(),
        outcome,
        summary: summary.into(),
        details: Vec::new(),
        remedy: remedy.to_owned(),
    }
}

/// Makes all checks. `backend` is the one that the configuration asks for, and `notes` say what else it would do.
pub fn run(
    backend: Kind,
    settings: &backend::Settings,
    conntrack: &sysctl::ConntrackSettings,
    ports: Ports,
    notes: &[Note],
) -> Vec<CheckFinding> {
    let mut findings = vec![kernel(&release(), backend)];
    findings.extend(backends(backend, settings));
    findings.push(connection_tracking(Path::new("/"), conntrack));
    findings.push(owners(&processes(Path::new("/proc"))));
    findings.push(rules());
    let competing_proxy = leftovers::running(ports);
    findings.push(left(backend, competing_proxy));
    findings.push(match competing_proxy {
        None => finding(
            "kube-proxy-here",
            Outcome::Ok,
            "no kube-proxy runs on this machine",
            "",
        ),
        Some(competing_proxy) => finding(
            "kube-proxy-here",
            Outcome::Ok,
            format!("a kube-proxy runs, and an agent can take over from it: {competing_proxy}"),
            "",
        ),
    });
    findings.push(configuration(notes));
    findings
}

fn release() -> String {
    let name = uname().ok();
    let release = name.and_then(|name| name.release().to_str().map(str::to_owned));
    release.unwrap_or_default()
}

fn kernel(release: &str, wanted: Kind) -> CheckFinding {
    const CHECK: &str = "kernel";
    let mut numbers = release.split(['.', '-']).map(str::parse::<u32>);
    let version = match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => {
            let text = format!("the version {release:?} is not a number");
            return finding(CHECK, Outcome::Unknown, text, "uname -r");
        }
    };
    if version >= OLDEST {
        return finding(CHECK, Outcome::Ok, format!("Linux {release}"), "");
    }
    // Older kernels may have all that kube-proxy's older modes need, and the check of the mode says whether.
    let outcome = if wanted.describe().shares_names { Outcome::Warning } else { Outcome::Bad };
    let (major, minor) = OLDEST;
    let text =
        format!("Linux {release} is older than {major}.{minor}, with which kplane is tested");
    finding(CHECK, outcome, text, "update the node's kernel")
}

/// Tries out all backends of the kernel. Only the one that will be used has to work.
fn backends(wanted: Kind, settings: &backend::Settings) -> Vec<CheckFinding> {
    Kind::ALL
        .into_iter()
        .filter(|kind| kind.describe().serves_in_kernel())
        .map(|kind| {
            let name = kind.describe().name;
            match attempt(kind, settings.clone()) {
                Attempt::Works => finding(name, Outcome::Ok, "works on this kernel", ""),
                Attempt::Fails(reason) if kind == wanted => finding(
                    name,
                    Outcome::Bad,
                    reason,
                    "load the module or install the program that is missing, \
                     or choose another --backend",
                ),
                Attempt::Fails(reason) => finding(
                    name,
                    Outcome::Skipped,
                    format!("not available, and not asked for: {reason}"),
                    "",
                ),
                Attempt::NotTried(reason) => finding(
                    name,
                    Outcome::Unknown,
                    format!("cannot be tried out: {reason}"),
                    "run the same command as root",
                ),
            }
        })
        .collect()
}

/// The outcome of an attempt.
enum Attempt {
    Works,
    Fails(String),
    NotTried(String),
}

/// Opens a backend in a network namespace of its own, which ends with the thread.
fn attempt(kind: Kind, settings: backend::Settings) -> Attempt {
    let work = move || {
        if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
            return Attempt::NotTried(format!("no network namespace can be made ({error})"));
        }
        match kind.open(&settings) {
            Ok(_) => Attempt::Works,
            Err(error) => Attempt::Fails(chain(&error)),
        }
    };
    let tried = thread::Builder::new().name("preflight".to_owned()).spawn(work);
    match tried.map(thread::JoinHandle::join) {
        Ok(Ok(attempt)) => attempt,
        Ok(Err(_)) => Attempt::NotTried("the attempt crashed".to_owned()),
        Err(error) => Attempt::NotTried(error.to_string()),
    }
}

/// Compares the kernel's settings with those that the agent's start makes.
fn connection_tracking(root: &Path, settings: &sysctl::ConntrackSettings) -> CheckFinding {
    const CHECK: &str = "conntrack";
    let compared = sysctl::compare(root, settings);
    if !compared.unread.is_empty() {
        let unread = compared.unread.iter();
        return CheckFinding {
            details: unread.map(|it| it.path().display().to_string()).collect(),
            ..finding(
                CHECK,
                Outcome::Warning,
                "some limits cannot be read: the module nf_conntrack is not loaded",
                "modprobe nf_conntrack",
            )
        };
    }
    let differ = compared.differ.iter();
    let change = |(it, now): &(sysctl::Wanted, u64)| {
        format!("{}: {now}, will be {}", it.path().display(), it.value)
    };
    let differ = Vec::from_iter(differ.map(change));
    let text = match differ.len() {
        0 => "all limits are as the agent wants them".to_owned(),
        count => format!("the agent will change {count} limits at its start"),
    };
    CheckFinding {
        details: differ,
        ..finding(CHECK, Outcome::Ok, text, "")
    }
}

/// Returns the names of all processes.
fn processes(proc: &Path) -> Vec<String> {
    fs::read_dir(proc)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect()
}

fn owners(processes: &[String]) -> CheckFinding {
    const CHECK: &str = "other-owners";
    let found: Vec<_> = OWNERS
        .iter()
        .filter(|(name, _)| processes.iter().any(|process| process == name))
        .collect();
    if found.is_empty() {
        return finding(
            CHECK,
            Outcome::Ok,
            "no other program that is known to own rules runs",
            "",
        );
    }
    let names: Vec<&str> = found.iter().map(|(name, _)| *name).collect();
    CheckFinding {
        details: found.iter().map(|(name, means)| format!("{name}: {means}")).collect(),
        ..finding(
            CHECK,
            Outcome::Warning,
            format!("other programs own rules: {}", names.join(", ")),
            "check what the details say about each",
        )
    }
}

fn rules() -> CheckFinding {
    const CHECK: &str = "tables";
    match leftovers::all_tables() {
        Err(error) => {
            let text = format!("nftables' tables cannot be listed: {error}");
            finding(
                CHECK,
                Outcome::Unknown,
                text,
                "run the same command as root",
            )
        }
        Ok(tables) if tables.is_empty() => {
            finding(CHECK, Outcome::Ok, "there are no nftables tables", "")
        }
        Ok(tables) => CheckFinding {
            summary: format!("{} nftables tables exist", tables.len()),
            details: tables,
            ..finding(CHECK, Outcome::Ok, "", "")
        },
    }
}

/// Finds rules of kube-proxy, and of kplane's modes that share its names, and whether an agent here can remove them.
fn left(backend: Kind, competing_proxy: Option<CompetingProxy>) -> CheckFinding {
    const CHECK: &str = "old-rules";
    if let Err(error) = leftovers::all_tables() {
        let text = format!("nftables' rules cannot be read: {error}");
        return finding(
            CHECK,
            Outcome::Unknown,
            text,
            "run the same command as root",
        );
    }
    let found = leftovers::kube_proxys(backend);
    let names: Vec<String> = found.names().collect();
    let stay: Vec<String> = found
        .problems()
        .iter()
        .filter(|problem| !problem.is_harmless())
        .map(ToString::to_string)
        .collect();
    let (outcome, text, details, remedy) = match (
        stay.is_empty(),
        names.is_empty(),
        competing_proxy,
    ) {
        (false, ..) => (
            Outcome::Bad,
            "rules that this agent cannot remove would lead packets as well as its own",
            stay,
            "use the agent's image with iptables (chart: agent.variant=iptables), or do what the details say",
        ),
        (true, true, _) => (Outcome::Ok, "there are no rules of kube-proxy", names, ""),
        (true, false, Some(_)) => (
            Outcome::Ok,
            "an agent removes kube-proxy's rules when kube-proxy has ended",
            names,
            "",
        ),
        (true, false, None) => (
            Outcome::Warning,
            "rules of a kube-proxy that does not run lead packets, perhaps to endpoints that are gone",
            names,
            "an agent removes them as soon as it serves; until then: kube-proxy --cleanup",
        ),
    };
    CheckFinding {
        details,
        ..finding(CHECK, outcome, text, remedy)
    }
}

fn configuration(notes: &[Note]) -> CheckFinding {
    const CHECK: &str = "configuration";
    let lines = notes.iter().map(|note| note.text.clone());
    let warnings = notes.iter().filter(|note| note.level == Level::Warning);
    match warnings.count() {
        0 => CheckFinding {
            details: lines.collect(),
            ..finding(
                CHECK,
                Outcome::Ok,
                "means the same to kplane as to kube-proxy",
                "",
            )
        },
        count => CheckFinding {
            details: lines.collect(),
            ..finding(
                CHECK,
                Outcome::Warning,
                format!("{count} settings work differently than with kube-proxy"),
                "see docs/kube-proxy-compat.md",
            )
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_kernels_are_named() {
        let of = |release, wanted| kernel(release, wanted).outcome;
        assert_eq!(of("6.12.3-amd64", Kind::Nftables), Outcome::Ok);
        assert_eq!(of("5.13", Kind::Nftables), Outcome::Ok);
        assert_eq!(of("5.4.0-42", Kind::Nftables), Outcome::Bad);
        assert_eq!(of("5.4.0-42", Kind::Iptables), Outcome::Warning);
        assert_eq!(of("", Kind::Nftables), Outcome::Unknown);
    }

    #[test]
    fn programs_that_own_rules_are_named() {
        let running = ["systemd", "firewalld"].map(str::to_owned);
        let found = owners(&running);
        assert_eq!(found.outcome, Outcome::Warning);
        assert_eq!(found.details.len(), 1);
        assert_eq!(owners(&running[..1]).outcome, Outcome::Ok);
    }

    #[test]
    fn a_kernel_without_connection_tracking_is_named() {
        let root = tempfile::tempdir().unwrap();
        let found = connection_tracking(root.path(), &sysctl::ConntrackSettings::default());
        assert_eq!(found.outcome, Outcome::Warning);
        assert!(!found.details.is_empty());
    }
}
