//! A random walk: whatever happened on the way, the table is the one that a fresh start would make.

use std::collections::BTreeMap;
use std::env;

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Cidr, Family, Protocol, TrafficPolicy};
use kplane_tests::netns::NetNs;
use kplane_tests::privilege::require_tool;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom as _, SliceRandom as _};
use rand::{RngExt as _, SeedableRng as _};

use crate::netns::listing::agrees_with_nft;
use kplane_tests::contents::Contents;
use kplane_tests::support::nft::nft;
use kplane_tests::support::{
    Agent, At, Ep, Setup, Svc, cidrs, facts, node_ip, pod_ips, second_ip, svc,
};

/// Set to repeat a walk.
const SEED_VAR: &str = "KPLANE_WALK_SEED";
/// Changes of a walk.
const STEPS: u32 = 300;
/// Steps between two comparisons.
const STRIDE: u32 = 12;
/// Numbers of Services: few, so that they come back.
const SERVICES: u16 = 10;
/// Endpoints of a Service: through several classes.
const MOST_ENDPOINTS: u8 = 40;

/// One agent on its way.
struct Walk {
    rng: StdRng,
    agent: Agent,
    services: BTreeMap<u16, Svc>,
    /// Another, which always begins from nothing.
    fresh: Agent,
}

pub(crate) fn after_any_walk_the_table_is_that_of_a_fresh_start() -> Result<()> {
    let seed = match env::var(SEED_VAR) {
        Ok(text) => text.parse().context(SEED_VAR)?,
        Err(_) => rand::random(),
    };
    println!("walk: {SEED_VAR}={seed}");
    walk(seed).with_context(|| format!("{SEED_VAR}={seed}"))
}

fn walk(seed: u64) -> Result<()> {
    let agent = |name| {
        let ns = NetNs::new(name)?;
        Agent::open(&ns, facts(1)?, Setup::PodRanges.settings()?)
    };
    let mut walk = Walk {
        rng: StdRng::seed_from_u64(seed),
        agent: agent("walk")?,
        services: BTreeMap::new(),
        fresh: agent("fresh")?,
    };
    let foreign = require_tool("nft")?;
    if foreign {
        nft(&walk.agent.ns, "add table inet foreign")?;
    }
    walk.agent.replace(&[])?;
    for step in 1..=STEPS {
        let what = walk.step()?;
        if step % STRIDE == 0 || step == STEPS {
            let context = || format!("after step {step}, {what}");
            walk.compare().with_context(context)?;
            if foreign {
                walk.compare_with_nft().with_context(context)?;
                nft(
                    &walk.agent.ns,
                    "add chain inet foreign c\ndelete chain inet foreign c",
                )?;
            }
        }
    }
    Ok(())
}

impl Walk {
    /// One change, at random; says which.
    fn step(&mut self) -> Result<&'static str> {
        match self.rng.random_range(0..20) {
            0 | 1 => self.settings(),
            2 => self.restart(),
            3 => self.all_again(),
            4 => self.exchange(),
            5..=7 => self.delete(),
            _ => self.change(),
        }
    }

    /// Some Services come, or something about them changes.
    fn change(&mut self) -> Result<&'static str> {
        let mut numbers: Vec<u16> = (1..=SERVICES).collect();
        numbers.shuffle(&mut self.rng);
        numbers.truncate(self.rng.random_range(1..=3));
        let (mut old, mut new) = (Vec::new(), Vec::new());
        for number in numbers {
            let service = match self.services.get(&number).cloned() {
                Some(service) => {
                    old.push(service.clone());
                    self.other(service)?
                }
                None => self.any(number)?,
            };
            new.push(service.clone());
            self.services.insert(number, service);
        }
        let done = self.agent.exchange(&old, &new)?;
        ensure!(done.failures.is_empty(), "{:?}", done.failures);
        Ok("a change")
    }

    fn delete(&mut self) -> Result<&'static str> {
        let number = self.rng.random_range(1..=SERVICES);
        let gone: Vec<Svc> = self.services.remove(&number).into_iter().collect();
        self.agent.exchange(&gone, &[])?;
        Ok("a deletion")
    }

    /// The addresses of a Service pass to another one, and its name to other addresses.
    fn exchange(&mut self) -> Result<&'static str> {
        let number = self.rng.random_range(1..=SERVICES);
        let Some(old) = self.services.get(&number).cloned() else {
            return Ok("nothing");
        };
        let heir = if old.name.ends_with("-heir") {
            format!("svc-{number}")
        } else {
            format!("svc-{number}-heir")
        };
        let new = self.any(number)?.named(&heir);
        let done = self.agent.exchange(&[old], std::slice::from_ref(&new))?;
        ensure!(done.failures.is_empty(), "{:?}", done.failures);
        self.services.insert(number, new);
        Ok("an exchange")
    }

    fn settings(&mut self) -> Result<&'static str> {
        let setups = [Setup::PodRanges, Setup::NoPodRanges, Setup::MasqueradeAll];
        let setup = setups.choose(&mut self.rng).copied();
        self.agent.settings = setup.unwrap_or(Setup::PodRanges).settings()?;
        let node_ports: &[&[&str]] = &[
            &[],
            &["0.0.0.0/0", "::/0"],
            &["172.30.0.0/16", "172.30.1.0/24", "fd30::/64"],
            &["172.30.1.1/32", "172.30.1.2/31"],
        ];
        let chosen = node_ports.choose(&mut self.rng).copied().unwrap_or(&[]);
        self.agent.settings.nodeport_addresses = cidrs(chosen)?;
        let service_cidrs: &[&[&str]] = &[
            &["10.96.0.0/16", "fd96::/64"],
            &["10.96.0.0/17", "10.96.128.0/17", "fd96::/108"],
            &["10.96.0.0/12"],
            &[],
        ];
        let chosen = service_cidrs.choose(&mut self.rng).copied().unwrap_or(&[]);
        self.agent.facts.service_cidrs = cidrs(chosen)?;
        self.agent.facts.addresses = Family::ALL
            .map(
                |family| {
                    if self.rng.random_bool(0.5) { node_ip(1, family) } else { second_ip(family) }
                },
            )
            .to_vec();
        // As an engine does: every plan depends on the node.
        let services = self.all();
        let done = self.agent.update(&services)?;
        ensure!(done.failures.is_empty(), "{:?}", done.failures);
        Ok("other settings")
    }

    /// A new process: everything is there already.
    fn restart(&mut self) -> Result<&'static str> {
        self.agent.restart()?;
        let services = self.all();
        let done = self.agent.replace(&services)?;
        ensure!(done.operations == 0, "a restart did {done:?}");
        Ok("a restart")
    }

    fn all_again(&mut self) -> Result<&'static str> {
        let services = self.all();
        let done = self.agent.replace(&services)?;
        ensure!(done.operations == 0, "all again did {done:?}");
        Ok("all again")
    }

    fn all(&self) -> Vec<Svc> {
        self.services.values().cloned().collect()
    }

    /// Any Service of this number.
    fn any(&mut self, number: u16) -> Result<Svc> {
        let mut service = svc(number);
        for _ in 0..6 {
            service = self.other(service)?;
        }
        Ok(service)
    }

    /// The Service with one property changed.
    fn other(&mut self, mut service: Svc) -> Result<Svc> {
        let policy = |rng: &mut StdRng| {
            if rng.random_bool(0.5) { TrafficPolicy::Cluster } else { TrafficPolicy::Local }
        };
        match self.rng.random_range(0..13) {
            0 => service.external = policy(&mut self.rng),
            1 => service.internal = policy(&mut self.rng),
            2 => {
                let others = &At::ALL[1..];
                for at in others.iter().filter(|_| self.rng.random_bool(0.5)) {
                    if !service.places.remove(at) {
                        service.places.insert(*at);
                    }
                }
            }
            3 => service.ranges = self.ranges()?,
            4 => service.endpoints.clear(),
            5 => {
                let count = self.rng.random_range(1..=MOST_ENDPOINTS);
                service.endpoints = (0..count).map(|_| self.endpoint()).collect();
            }
            6 | 7 => service.endpoints.push(self.endpoint()),
            8 | 9 => {
                if !service.endpoints.is_empty() {
                    let index = self.rng.random_range(0..service.endpoints.len());
                    service.endpoints.swap_remove(index);
                }
            }
            10 => {
                service.affinity_timeout_s = match self.rng.random_range(0..3_u32) {
                    0 => None,
                    seconds => Some(seconds),
                }
            }
            _ => {
                let endpoint = self.endpoint();
                if let Some(last) = service.endpoints.last_mut() {
                    *last = endpoint;
                }
            }
        }
        // One of three protocols, or each.
        if service.endpoints.is_empty() {
            service.protocols = match self.rng.random_range(0..4_usize) {
                3 => Protocol::ALL.to_vec(),
                one => vec![Protocol::ALL[one]],
            };
        }
        Ok(service)
    }

    fn endpoint(&mut self) -> Ep {
        let node = self.rng.random_range(1..=2);
        let pod = self.rng.random_range(1..=60);
        let endpoint = Ep::new(node, pod_ips(node, pod));
        match self.rng.random_range(0..5) {
            0 => endpoint.draining(),
            1 => endpoint.port(self.rng.random_range(1..=3)),
            _ => endpoint,
        }
    }

    fn ranges(&mut self) -> Result<Vec<Cidr>> {
        let pool = cidrs(&[
            "172.30.0.0/16",
            "172.30.1.0/24",
            "172.30.0.3/32",
            "0.0.0.0/0",
            "10.244.0.0/17",
            "10.244.128.0/17",
            "fd30::/64",
            "fd30::3/128",
            "::/0",
            "fd44::/32",
        ])?;
        Ok(pool.into_iter().filter(|_| self.rng.random_bool(0.25)).collect())
    }

    /// The kernel holds what it would after a fresh start, and another process would find so.
    fn compare(&mut self) -> Result<()> {
        self.agent.ensure_equal()?;
        let mut adopting = Agent::open(
            &self.agent.ns,
            self.agent.facts.clone(),
            self.agent.settings.clone(),
        )?;
        let services = self.all();
        let done = adopting.replace(&services)?;
        ensure!(done.operations == 0, "another process did {done:?}");

        self.fresh.cleanup()?;
        self.fresh.restart()?;
        self.fresh.facts = self.agent.facts.clone();
        self.fresh.settings = self.agent.settings.clone();
        self.fresh.replace(&services)?;
        for family in Family::ALL {
            let walked = Contents::read(&self.agent.ns, family)?;
            let fresh = Contents::read(&self.fresh.ns, family)?;
            walked.ensure_same(&fresh).with_context(|| family.to_string())?;
        }
        Ok(())
    }

    fn compare_with_nft(&self) -> Result<()> {
        for family in Family::ALL {
            agrees_with_nft(&self.agent.ns, family)?;
        }
        Ok(())
    }
}
