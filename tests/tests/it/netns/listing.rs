//! What `nft` makes of our tables: it prints them, and what it prints loads again and does the same
//! (invariant: text).

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;
use kplane_tests::contents::settled;
use kplane_tests::netns::NetNs;
use kplane_tests::privilege::need_tools;
use serde_json::Value;

use crate::netns::addresses::cluster_policies;
use crate::netns::policies::external_local;
use crate::netns::restart::every_kind;
use kplane_tests::support::nft::{load, need_loading, objects, run};
use kplane_tests::support::{Scenario, Setup, World};
use kplane_tests::wait::{DEADLINE, eventually};

pub(crate) fn a_printed_ruleset_loads_again_and_does_the_same() -> Result<()> {
    need_loading()?;
    let mut services = every_kind()?;
    let local = external_local();
    let scenarios = [
        cluster_policies(),
        Scenario {
            service: services[2].clone(),
            ..local
        },
    ];
    services.sort_by_key(|service| service.number);
    let world = World::serving(Setup::PodRanges, &services)?;
    let copy = World::without_agents()?;
    for number in 1..=2 {
        let text = run(world.node(number)?, &["list", "ruleset"])?;
        load(copy.node(number)?, &text)?;
        let again = run(copy.node(number)?, &["list", "ruleset"])?;
        ensure!(again == text, "what is loaded prints as something else");
    }
    for scenario in &scenarios {
        scenario.observe(&world.net).context("as programmed")?;
        scenario.observe(&copy.net).context("as loaded")?;
    }
    Ok(())
}

/// Readable: names and comments, no raw expressions, nothing that `nft` could not make out.
pub(crate) fn a_printed_ruleset_is_readable() -> Result<()> {
    need_tools(&["nft"])?;
    let world = World::serving(Setup::PodRanges, &every_kind()?)?;
    let text = run(world.node(1)?, &["list", "ruleset"])?;
    for part in [
        "comment \"kplane nftables layout ",
        "ip daddr . meta l4proto . th dport",
        "10.96.0.1 . tcp . 80 . 0 : 10.244.1.1 . 8080",
        "fd96::1 . sctp . 80 . 0 : fd44:0:0:1::1 . 8080",
        "10.244.1.1 . 10.244.1.1 . tcp . 8080",
        "198.19.0.7 . tcp . 80 . 172.30.0.0/24",
        "masquerade fully-random",
    ] {
        ensure!(text.contains(part), "no {part:?} in:\n{text}");
    }
    for odd in ["@nh,", "@th,", "[invalid", "unknown", "0x0000000"] {
        let line = text.lines().find(|line| line.contains(odd));
        ensure!(line.is_none(), "{odd:?}: {line:?}");
    }
    Ok(())
}

pub(crate) fn json_listings_agree_with_what_we_read_back() -> Result<()> {
    need_tools(&["nft"])?;
    let world = World::serving(Setup::PodRanges, &every_kind()?)?;
    let node = world.node(1)?;
    run(node, &["-j", "list", "ruleset"])?;
    for family in Family::ALL {
        agrees_with_nft(node, family)?;
    }
    Ok(())
}

/// Wants `nft` and our own decoder to see the same, once the kernel has enlarged its sets.
pub(crate) fn agrees_with_nft(ns: &NetNs, family: Family) -> Result<()> {
    eventually(DEADLINE, "one content of a table", || {
        let (printed, read) = (printed_counts(ns, family)?, read_counts(ns, family)?);
        ensure!(
            printed == read,
            "{family}: nft sees {printed:?}, we {read:?}"
        );
        Ok(())
    })
}

/// Number of elements by set, for those that have any, as `nft` sees it.
fn printed_counts(ns: &NetNs, family: Family) -> Result<BTreeMap<String, usize>> {
    let objects = objects(ns, family)?;
    let sets = objects
        .iter()
        .flat_map(|object| [object.get("set"), object.get("map")])
        .flatten();
    let count = |set: &Value| {
        let elements = set["elem"].as_array()?.len();
        Some((set["name"].as_str()?.to_owned(), elements))
    };
    Ok(sets.filter_map(count).collect())
}

/// The same as our own decoder sees it.
pub(crate) fn read_counts(ns: &NetNs, family: Family) -> Result<BTreeMap<String, usize>> {
    let mut counts = BTreeMap::new();
    for element in settled(ns, family)? {
        *counts.entry(element.set.name().to_owned()).or_default() += 1;
    }
    Ok(counts)
}
