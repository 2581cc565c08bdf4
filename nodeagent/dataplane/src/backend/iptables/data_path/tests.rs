//! The driver on tables in memory, which can be made to fail.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use kplane_model::{KeyParts, Protocol, ServiceKey};

use super::*;
use crate::backend::driver::Driver;
use crate::backend::iptables::restore::Limits;
use crate::backend::iptables::{Flavour, readback};
use crate::backend::{ApplyError, Side as _};
use crate::plan::{Frontend, Origin, ServicePlan};
use kplane_netlink::NetlinkError;

/// Tables in memory, by table and chain, including built-in chains.
#[derive(Debug, Default)]
struct Memory {
    tables: BTreeMap<String, BTreeMap<String, Vec<String>>>,
    generation: u32,
    /// Text that makes a restore fail.
    refuses: Option<String>,
    /// Number of tables after which a signal ends a restore.
    killed_after: Option<usize>,
    restores: usize,
    reads: usize,
    legacy: bool,
}

fn failed(raw: i32, complaint: &str) -> RunError {
    RunError::Failed {
        status: ExitStatus::from_raw(raw),
        complaint: complaint.to_owned(),
    }
}

impl Memory {
    fn line(chains: &mut BTreeMap<String, Vec<String>>, line: &str) {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        let name = |text: &str| text.split(' ').next().unwrap_or_default().to_owned();
        match verb {
            "-A" => chains.entry(name(rest)).or_default().push(format!("-A {rest}")),
            "-I" => chains.entry(name(rest)).or_default().insert(0, format!("-A {rest}")),
            "-D" => {
                let rules = chains.entry(name(rest)).or_default();
                let at = rules.iter().position(|r| *r == format!("-A {rest}"));
                rules.remove(at.expect("a rule to delete"));
            }
            "-X" => assert_eq!(chains.remove(&name(rest)), Some(vec![]), "{line}"),
            _ => {
                let chain = verb.strip_prefix(':').expect("a known line");
                chains.insert(chain.to_owned(), Vec::new());
            }
        }
    }

    fn carry_out(&mut self, text: &str, tables: usize) {
        for part in text.split_inclusive("COMMIT\n").take(tables) {
            let mut lines = part.lines().filter(|line| *line != "COMMIT");
            let table = lines.next().and_then(|line| line.strip_prefix('*'));
            let chains = self.tables.entry(table.expect("a table").to_owned()).or_default();
            lines.for_each(|line| Self::line(chains, line));
            self.generation += 1;
        }
    }
}

impl Tables for Memory {
    fn flavour(&self) -> Flavour {
        if self.legacy { Flavour::Legacy } else { Flavour::Nft }
    }

    fn limits(&self) -> Limits {
        Limits {
            chains: 5,
            rules: 9,
        }
    }

    fn read(&mut self) -> Result<Listing, RunError> {
        self.reads += 1;
        let mut text = String::new();
        for (table, chains) in &self.tables {
            text.push_str(&format!("*{table}\n"));
            for chain in chains.keys() {
                text.push_str(&format!(":{chain} - [0:0]\n"));
            }
            for rule in chains.values().flatten() {
                text.push_str(&format!("{rule}\n"));
            }
            text.push_str("COMMIT\n");
        }
        Ok(readback::parse(&text, ChainName::parse))
    }

    fn make_counters(&mut self) -> Result<(), NetlinkError> {
        Ok(())
    }

    fn restore(&mut self, text: &str) -> Result<(), RunError> {
        self.restores += 1;
        self.try_out(text)?;
        if let Some(tables) = self.killed_after.take() {
            self.carry_out(text, tables);
            return Err(failed(9, ""));
        }
        self.carry_out(text, usize::MAX);
        Ok(())
    }

    fn try_out(&mut self, text: &str) -> Result<(), RunError> {
        match &self.refuses {
            Some(what) if text.contains(what) => Err(failed(4 << 8, "line 1: no such thing")),
            _ => Ok(()),
        }
    }

    fn generation(&mut self) -> Option<u32> {
        Some(self.generation)
    }
}

fn driver() -> Driver<IptablesDataPath<Memory>> {
    let settings = RuleSettings::new(Family::V4);
    let probe_interval = Duration::from_secs(2);
    Driver::new(IptablesDataPath::new(
        Memory::default(),
        settings,
        probe_interval,
    ))
}

fn memory(driver: &mut Driver<IptablesDataPath<Memory>>) -> &mut Memory {
    &mut driver.path.tables
}

type Plans = Vec<(ServiceKey, Option<ServicePlan>)>;

fn plan(number: u8, endpoints: u8) -> (ServiceKey, Option<ServicePlan>) {
    let key = ServiceKey::from(KeyParts {
        port_name: "web".into(),
        ..KeyParts::clone(&ServiceKey::sample("test", &format!("svc-{number}")))
    });
    let ip = std::net::IpAddr::from([10, 96, 0, number]);
    let endpoints: Vec<_> = (1..=endpoints)
        .map(|n| kplane_model::EndpointAddr::new([10, 244, number, n], 80))
        .collect();
    let frontend = Frontend {
        at: FrontendAddr::Address {
            ip,
            protocol: Protocol::Tcp,
            port: 80,
        },
        origin: Origin::ClusterIp,
        endpoints,
        policy: kplane_model::TrafficPolicy::Cluster,
        inside: None,
        masquerade: false,
        unserved: None,
        source_ranges: vec![],
    };
    let plan = ServicePlan {
        frontends: vec![frontend],
        ..ServicePlan::sample(key.clone(), ip)
    };
    (key, Some(plan))
}

fn apply(
    driver: &mut Driver<IptablesDataPath<Memory>>,
    services: &Plans,
    complete: bool,
) -> Result<Applied, ApplyError> {
    driver.apply(Change {
        family: Family::V4,
        node: &NodePlan::default(),
        services,
        complete,
    })
}

fn plans(numbers: std::ops::RangeInclusive<u8>) -> Plans {
    numbers.map(|number| plan(number, 2)).collect()
}

#[test]
fn what_is_there_is_adopted_without_a_restore() {
    let mut first = driver();
    apply(&mut first, &plans(1..=9), true).unwrap();
    let mut second = driver();
    std::mem::swap(memory(&mut first), memory(&mut second));
    memory(&mut second).restores = 0;
    let applied = apply(&mut second, &plans(1..=9), true).unwrap();
    assert_eq!((applied.operations, applied.bytes), (0, 0));
    assert_eq!(memory(&mut second).restores, 0);
    // There are fewer Services: the chains of the missing ones are removed.
    apply(&mut second, &plans(1..=2), true).unwrap();
    let nat = &memory(&mut second).tables["nat"];
    let endpoints = nat.keys().filter(|name| name.starts_with("KUBE-SEP-"));
    assert_eq!(endpoints.count(), 4);
    assert_eq!(second.verify().unwrap(), Verification::Equal);
}

#[test]
fn rules_are_counted_as_they_come_and_go() {
    let mut driver = driver();
    let all = |driver: &mut Driver<IptablesDataPath<Memory>>, table: &str| {
        let chains = &memory(driver).tables[table];
        chains
            .iter()
            .filter(|(name, _)| name.starts_with("KUBE-"))
            .map(|(_, rules)| rules.len() as u64)
            .sum::<u64>()
    };
    let mut plans = plans(1..=9);
    for round in 0..3 {
        let applied = apply(&mut driver, &plans, round == 0).unwrap();
        let counts = applied.rules.unwrap();
        let there = ["filter", "nat"].map(|table| all(&mut driver, table));
        assert_eq!(counts.total, there, "{round}");
        plans = vec![plan(3, 7), (plan(4, 2).0, None)];
    }
}

/// A check costs one question, unless a program may have changed something.
#[test]
fn tables_are_read_when_the_generation_moved() {
    let mut driver = driver();
    apply(&mut driver, &plans(1..=3), true).unwrap();
    driver.verify().unwrap();
    memory(&mut driver).reads = 0;
    driver.verify().unwrap();
    apply(&mut driver, &vec![plan(2, 5)], false).unwrap();
    driver.verify().unwrap();
    assert_eq!(memory(&mut driver).reads, 0, "our own changes are known");
    memory(&mut driver).generation += 1;
    assert_eq!(driver.verify().unwrap(), Verification::Equal);
    assert_eq!(memory(&mut driver).reads, 1);
    // Another program empties a chain just before kplane's change.
    let memory = memory(&mut driver);
    memory.generation += 1;
    let nat = memory.tables.get_mut("nat").unwrap();
    nat.get_mut("KUBE-POSTROUTING").unwrap().clear();
    apply(&mut driver, &vec![plan(2, 1)], false).unwrap();
    let seen = driver.verify().unwrap();
    assert!(matches!(&seen, Verification::Drifted(what) if what.contains("KUBE-POSTROUTING")));
    let partial = apply(&mut driver, &vec![plan(2, 2)], false).unwrap_err();
    assert!(partial.to_string().contains("applied again"), "{partial}");
    apply(&mut driver, &plans(1..=3), true).unwrap();
    assert_eq!(driver.verify().unwrap(), Verification::Equal);
}

/// Checks of legacy tables take a hundredth of the time, and are never more than a minute apart by themselves. A
/// check that had to wait for a processor counts for nothing.
#[test]
fn the_time_between_checks_follows_their_duration() {
    let mut driver = driver();
    let seconds = Duration::from_secs;
    for (check_ms, legacy, nft) in [(4, 2, 2), (300, 30, 2), (1_000, 60, 5)] {
        let check = Duration::from_millis(check_ms);
        driver.path.checks = [check, seconds(20), check];
        let intervals = [true, false].map(|legacy| {
            memory(&mut driver).legacy = legacy;
            driver.probe_interval()
        });
        assert_eq!(intervals, [legacy, nft].map(|s| Some(seconds(s))));
    }
    driver.path.probe_interval = seconds(90);
    memory(&mut driver).legacy = true;
    assert_eq!(driver.probe_interval(), Some(seconds(90)));
}

#[test]
fn c10_the_guilty_are_found_and_the_others_applied() {
    for complete in [true, false] {
        let mut driver = driver();
        apply(&mut driver, &plans(1..=3), true).unwrap();
        memory(&mut driver).refuses = Some("--to-destination 10.244.7.".to_owned());
        let services = plans(if complete { 1..=9 } else { 4..=9 });
        let applied = apply(&mut driver, &services, complete).unwrap();
        let names: Vec<_> = applied.failures.iter().map(|f| &*f.key.service.name).collect();
        assert_eq!(names, ["svc-7"]);
        assert!(applied.failures[0].reason.contains("no such thing"));
        assert_eq!(driver.verify().unwrap(), Verification::Equal);
        let rules = memory(&mut driver).tables["nat"].values().flatten();
        let served = rules.filter(|rule| rule.contains("DNAT")).count();
        assert_eq!(served, 2 * 8, "complete: {complete}");
    }
}

/// No ServicePort is the cause: the error says so, and nothing counts as applied.
#[test]
fn what_is_always_refused_is_an_error_of_the_family() {
    let mut driver = driver();
    memory(&mut driver).refuses = Some("KUBE-POSTROUTING".to_owned());
    let error = apply(&mut driver, &plans(1..=3), true).unwrap_err();
    assert!(error.to_string().contains("no such thing"), "{error}");
    memory(&mut driver).refuses = None;
    apply(&mut driver, &plans(1..=3), true).unwrap();
    assert_eq!(driver.verify().unwrap(), Verification::Equal);
}

/// SIGKILL after any number of tables: the tables are read again, and the change is completed.
#[test]
fn a_killed_restore_is_made_up_for() {
    for tables in 0..12 {
        let mut driver = driver();
        memory(&mut driver).killed_after = Some(tables);
        let error = apply(&mut driver, &plans(1..=6), true).unwrap_err();
        assert!(
            error.to_string().contains("reads the tables again"),
            "{error}"
        );
        apply(&mut driver, &plans(1..=6), true).unwrap();
        assert_eq!(driver.verify().unwrap(), Verification::Equal);
    }
}
