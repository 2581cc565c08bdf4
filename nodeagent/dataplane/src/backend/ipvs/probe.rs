//! Checks the machine's features at start. Each missing feature is named, with the kernel module to load.

use std::path::Path;
use std::time::Duration;

use kplane_model::{Family, IpvsScheduler};

use super::machine::ensure_link;
use super::rules::Lacks;
use super::scheduler::{has_scheduler, missing_scheduler};
use super::sets::SetType;
use crate::backend::iptables::Tool;
use crate::backend::iptables::tool::Feature;
use crate::process::{ProcessLimits, run};
use kplane_netlink::ipset::{self, IpSets};
use kplane_netlink::ipvs::Ipvs;
use kplane_netlink::{Errno, Links};

/// A set that no rule uses.
const PROBE_SET: &str = "KPLANE-PROBE";

/// Paths at which `modprobe` may be.
const MODPROBE: [&str; 3] = ["/sbin/modprobe", "/usr/sbin/modprobe", "/bin/modprobe"];
const MODPROBE_LIMITS: ProcessLimits = ProcessLimits {
    within: Duration::from_secs(10),
    output_bytes: 1 << 16,
};

/// Optional matches.
const PHYSDEV: &str = "the match physdev";
const IPVS: &str = "the match ipvs";

/// Features that the rules need, besides those that all of kplane's backends with iptables need. The rule
/// about a set needs an existing set, see [`tool`].
const PARTS: [Feature; 3] = [
    Feature::new(
        "the match set",
        "nat",
        " -m set --match-set KPLANE-PROBE dst -j RETURN",
    ),
    Feature {
        what: PHYSDEV,
        table: "nat",
        rule: " -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT",
        without: Some(
            "rules do not distinguish packets to external addresses by the bridge through which they come; \
             the Services work all the same",
        ),
    },
    Feature {
        what: IPVS,
        table: "filter",
        rule: " -m ipvs --ipvs -j DROP",
        without: Some(
            "the node itself may use load balancers whose source ranges leave it out; load the kernel \
             module xt_ipvs",
        ),
    },
];

/// Checks the features that both families need.
///
/// # Errors
/// The missing part, human-readable.
pub(super) fn machine(scheduler: IpvsScheduler) -> Result<(), String> {
    load_ipvs();
    let mut ipvs = Ipvs::open().map_err(|error| match error.errno() {
        Some(Errno::ENOENT) => {
            "the kernel has no IPVS: load the kernel module ip_vs (modprobe ip_vs)".to_owned()
        }
        _ => format!("IPVS: {error}"),
    })?;
    let has = has_scheduler(&mut ipvs, scheduler).map_err(|error| format!("IPVS: {error}"))?;
    if !has {
        return Err(missing_scheduler(scheduler));
    }
    let mut sets = IpSets::open().map_err(|error| format!("IP sets: {error}"))?;
    for kind in SetType::ALL {
        try_set(&mut sets, kind)?;
    }
    let mut links = Links::open().map_err(|error| error.to_string())?;
    ensure_link(&mut links).map_err(|error| error.to_string())?;
    Ok(())
}

/// Returns the programs of iptables for a family if they have the required features, and the optional
/// features that they lack.
///
/// # Errors
/// The missing part, human-readable.
pub(super) fn tool(family: Family) -> Result<(Tool, Lacks), String> {
    let mut sets = IpSets::open().map_err(|error| error.to_string())?;
    // Sets of ports have no family.
    make_set(&mut sets, SetType::Port, family)?;
    let chosen = Tool::choose_for(family, &PARTS).map_err(|error| error.to_string());
    remove_set(&mut sets);
    let (tool, missing) = chosen?;
    let lacks = Lacks {
        physdev: missing.contains(&PHYSDEV),
        ipvs: missing.contains(&IPVS),
    };
    Ok((tool, lacks))
}

fn try_set(sets: &mut IpSets, kind: SetType) -> Result<(), String> {
    make_set(sets, kind, Family::V4)?;
    remove_set(sets);
    Ok(())
}

fn make_set(sets: &mut IpSets, kind: SetType, family: Family) -> Result<(), String> {
    remove_set(sets);
    let create = ipset::SetCommand::Create {
        name: PROBE_SET,
        kind,
        family,
        capacity: 1,
    };
    let missing = |error: String| {
        let (name, module) = (kind.as_str(), kind.module());
        format!("no IP sets of type {name}: {error}; load the kernel module {module}")
    };
    let (refused, _) = sets.perform(&[create]).map_err(|error| missing(error.to_string()))?;
    match refused.first() {
        None => Ok(()),
        Some(refusal) => Err(missing(refusal.errno.to_string())),
    }
}

fn remove_set(sets: &mut IpSets) {
    // Usually the set does not exist.
    let _ = sets.perform(&[ipset::SetCommand::Destroy(PROBE_SET)]);
}

/// Loads IPVS if it is not loaded, and if the agent may do so. The kernel does not load it by itself, because
/// it does not know which module provides the requested netlink family.
pub(super) fn load_ipvs() {
    let open = Ipvs::open();
    if open.is_err_and(|error| error.errno() == Some(Errno::ENOENT)) {
        load("ip_vs");
    }
}

fn load(module: &str) {
    let program = MODPROBE.iter().map(Path::new).find(|path| path.is_file());
    if let Some(program) = program {
        // The next question to the kernel shows whether this helped.
        let _ = run(program, &["-q", module], b"", MODPROBE_LIMITS);
    }
}
