//! The iptables backend: keeps a ruleset per family, and changes the kernel's tables to what a change asks
//! for.

mod isolate;
mod tables;

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use kplane_model::Family;

use self::tables::{Programs, Tables};
use super::DESCRIPTION;
use super::counting;
use super::layout::serves_localhost;
use super::name::{ChainName, TableName};
use super::readback::Listing;
use super::restore::parts;
use super::ruleset::{Ruleset, Settings, Staged, Written};
use super::tool::{Flavour, Tool, is_locked};
use crate::backend::{
    self, Applied, ApplyError, Backend, Change, Description, Lookups, OpenError, RuleCounts,
    Serving, Verification,
};
use crate::process::RunError;
use kplane_netlink::NetlinkError;

/// Largest share of the time for reading tables back, as 1/n. 10,000 Services are read in 0.3 s (legacy) to
/// 0.8 s, so changes by other programs are found within 4 s.
const READ_SHARE: u32 = 10;
/// Share for iptables on nf_tables, where the tables are read only after a change by another program.
const READ_SHARE_NFT: u32 = 5;

/// Share of all addresses, as 1/n, that must be added or removed before the way to a Service is measured
/// again.
const LOOKUPS_SHARE: u64 = 16;

/// Kernel setting that lets packets from loopback addresses leave through other interfaces: node ports on
/// 127.0.0.1 (C8).
const ROUTE_LOCALNET: &str = "/proc/sys/net/ipv4/conf/all/route_localnet";
/// Kernel setting that makes TCP packets out of the window valid (C7).
const TCP_BE_LIBERAL: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal";

/// The driver of iptables, with two independent sides, one per family.
#[derive(Debug)]
struct Driver<T> {
    /// The sides; for a family that this machine cannot program, the reason.
    sides: [Result<Side<T>, String>; 2],
    /// Longest time between two checks of the tables.
    probe_interval: Duration,
}

/// One family's part of the driver.
#[derive(Debug)]
struct Side<T> {
    tables: T,
    settings: Settings,
    /// The content of the tables; `None` = not known.
    ruleset: Option<Ruleset>,
    /// Numbers of rules in the tables filter and nat, while the ruleset is known.
    counts: [u64; 2],
    /// The length of the way to a Service when it was last measured.
    lookups: Lookups,
    /// The generation of nf_tables in which the tables were known to be correct.
    known: Option<u32>,
    /// Chains that should be deleted, and are empty, because rules of other programs jump to them.
    kept: Vec<(TableName, ChainName)>,
    /// Duration of the last read of the tables.
    reading: Duration,
    /// Whether node ports on loopback addresses work, or the attempt to enable them was made.
    localhost: bool,
}

/// A step that failed while applying a change.
#[derive(Debug, thiserror::Error)]
enum StepError {
    /// This machine cannot program the family.
    #[error("{0}")]
    Unusable(String),
    /// The tables could not be listed.
    #[error("iptables-save {0}")]
    Read(RunError),
    /// The counters that rules use could not be created.
    #[error("{0}; is the kernel's module nfnetlink_acct gone?")]
    Counters(NetlinkError),
    /// Another program held the lock.
    #[error("others hold the lock of iptables (/run/xtables.lock) for too long: {0}")]
    Locked(RunError),
    /// The programs or the kernel refused the change.
    #[error("iptables-restore {0}")]
    Refused(RunError),
    /// It is not known whether the change was applied.
    #[error("iptables-restore {0}; what the tables hold now is read again")]
    Interrupted(RunError),
    /// A partial change came while the content of the tables is not known.
    #[error("our rules are not known any more; everything has to be applied again")]
    Unknown,
    /// Another program changed kplane's rules. The next complete change repairs them.
    #[error("somebody else changed our rules: {0}")]
    Drifted(String),
}

impl StepError {
    fn of_restore(error: RunError) -> Self {
        match error {
            error if is_locked(&error) => Self::Locked(error),
            RunError::Failed { status, .. } if status.code().is_some() => Self::Refused(error),
            error => Self::Interrupted(error),
        }
    }
}

/// Opens the backend for this thread's network namespace.
///
/// # Errors
/// [`OpenError`] when no family can be programmed.
pub(super) fn open(settings: &backend::Settings) -> Result<Box<dyn Backend>, OpenError> {
    Ok(Box::new(Driver::open(settings)?))
}

impl Driver<Programs> {
    fn open(settings: &backend::Settings) -> Result<Self, OpenError> {
        backend::check_privilege(DESCRIPTION.name)?;
        let side = |family| {
            let tool = Tool::choose(family).map_err(|error| error.to_string())?;
            tracing::info!(%family, tool = tool.name(), "programming iptables");
            let settings = Settings {
                family,
                masquerade_bit: settings.masquerade_bit,
                own_mark: settings.own_mark,
                random_fully: true,
                localhost_nodeports: settings.localhost_nodeports && family == Family::V4,
                tcp_be_liberal: is_set(TCP_BE_LIBERAL),
                counters: counting::make(&tool),
                pod_interface: settings.pod_interface,
                layout: settings.iptables_layout,
            };
            Ok(Side::new(Programs::new(tool), settings))
        };
        let driver = Self {
            sides: Family::ALL.map(side),
            probe_interval: settings.probe_interval,
        };
        backend::check_sides(DESCRIPTION.name, &driver.sides)?;
        Ok(driver)
    }
}

impl<T: Tables> Driver<T> {
    fn side(&mut self, family: Family) -> Result<&mut Side<T>, StepError> {
        let side = self.sides[family as usize].as_mut();
        side.map_err(|reason| StepError::Unusable(reason.clone()))
    }

    fn try_apply(&mut self, change: Change<'_>) -> Result<Applied, StepError> {
        let side = self.side(change.family)?;
        match side.apply(change) {
            Err(StepError::Refused(error)) => side.isolate(change, &error),
            result => result,
        }
    }
}

impl<T: Tables> Side<T> {
    fn new(tables: T, settings: Settings) -> Self {
        Self {
            tables,
            settings,
            ruleset: None,
            counts: [0; 2],
            lookups: Lookups::default(),
            known: None,
            kept: Vec::new(),
            reading: Duration::ZERO,
            localhost: false,
        }
    }

    fn apply(&mut self, change: Change<'_>) -> Result<Applied, StepError> {
        let started = Instant::now();
        let mut ruleset = self.load(change.complete)?;
        let mut staged = ruleset.stage(change);
        let failures = std::mem::take(&mut staged.failures);
        self.keep(&mut staged);
        let planned = started.elapsed();
        let limits = self.tables.limits();
        let texts: Vec<String> = staged
            .steps
            .iter()
            .flat_map(|step| parts(step, limits))
            .collect();
        let encoded = started.elapsed();
        let bytes = match self.restore(&texts) {
            Ok(bytes) => bytes,
            Err(error) => {
                // In all other cases, the content of the tables is not known.
                if matches!(error, StepError::Refused(_)) && !change.complete {
                    self.ruleset = Some(ruleset);
                }
                return Err(error);
            }
        };
        let kernel = started.elapsed();
        let operations = staged.len() as u64;
        let mut rules = self.count(&ruleset, &staged);
        ruleset.accept(staged);
        rules.lookups = self.lookups(&ruleset, change.complete);
        self.ruleset = Some(ruleset);
        self.serve_localhost(change);
        Ok(Applied {
            operations,
            bytes,
            plan: planned,
            encode: encoded.saturating_sub(planned),
            kernel: kernel.saturating_sub(encoded),
            failures,
            rules: Some(rules),
            repaired: None,
        })
    }

    /// Takes the ruleset out of the side, or adopts the kernel's.
    fn load(&mut self, complete: bool) -> Result<Ruleset, StepError> {
        if let Some(ruleset) = self.ruleset.take() {
            return Ok(ruleset);
        }
        if !complete {
            return Err(StepError::Unknown);
        }
        if self.settings.counters {
            // If a cleanup removed the rules, it removed the counters too.
            self.tables.make_counters().map_err(StepError::Counters)?;
        }
        let found = self.read()?.found;
        let chains = found.chains().len();
        if chains > 0 {
            let family = self.settings.family;
            tracing::info!(%family, chains, "adopting the chains that are there");
        }
        let ruleset = Ruleset::adopt(self.settings, found);
        self.counts = [TableName::Filter, TableName::Nat].map(|table| ruleset.rules_in(table));
        Ok(ruleset)
    }

    fn read(&mut self) -> Result<Listing, StepError> {
        let started = Instant::now();
        let mut listing = self.tables.read().map_err(StepError::Read)?;
        self.reading = started.elapsed();
        self.kept.retain(|id| {
            let needed = listing.needed.contains(id);
            needed && listing.found.forget_empty(id)
        });
        Ok(listing)
    }

    /// Executes texts; returns their size in bytes.
    fn restore(&mut self, texts: &[String]) -> Result<u64, StepError> {
        if texts.is_empty() {
            return Ok(0);
        }
        let text = texts.concat();
        let known = self.known.take();
        let before = self.tables.generation();
        self.tables.restore(&text).map_err(StepError::of_restore)?;
        // Each part is one transaction. If there were more, another program made some of them.
        let ours = u32::try_from(texts.len()).unwrap_or(u32::MAX);
        let after = self.tables.generation();
        let only_ours = before.zip(after).map(|(b, a)| a.wrapping_sub(b)) == Some(ours);
        if known.is_some() && known == before && only_ours {
            self.known = after;
        }
        Ok(text.len() as u64)
    }

    /// Empties the chains that other programs need, instead of deleting them.
    fn keep(&mut self, staged: &mut Staged) {
        for step in &mut staged.steps {
            let table = step.table;
            self.kept
                .retain(|(t, name)| *t != table || step.write.iter().all(|c| c.name != *name));
            let kept: Vec<ChainName> = step
                .delete
                .iter()
                .copied()
                .filter(|name| self.kept.contains(&(table, *name)))
                .collect();
            step.delete.retain(|name| !kept.contains(name));
            step.write.extend(kept.into_iter().map(Written::emptied));
        }
    }

    /// Returns the number of rules in the tables filter and nat after a change, and the number that the
    /// change wrote.
    fn count(&mut self, ruleset: &Ruleset, staged: &Staged) -> RuleCounts {
        let mut last = [0; 2];
        for step in &staged.steps {
            let table = match step.table {
                TableName::Filter => 0,
                TableName::Nat => 1,
                TableName::Mangle => continue,
            };
            let written = step.write.iter().map(|chain| &chain.name);
            for name in written.chain(&step.delete) {
                let before = ruleset.rules_of(step.table, *name);
                self.counts[table] = self.counts[table].saturating_sub(before);
            }
            let new: u64 = step
                .write
                .iter()
                .map(|c| u64::from(c.content.rules()))
                .sum();
            last[table] += new;
            self.counts[table] += new;
        }
        RuleCounts {
            total: self.counts,
            last,
            lookups: self.lookups,
        }
    }

    /// Returns the length of the way to a Service. It is measured when it may have changed enough to be worth
    /// reporting.
    fn lookups(&mut self, ruleset: &Ruleset, complete: bool) -> Lookups {
        let known = self.lookups.list;
        let changed = ruleset.addresses().abs_diff(known);
        if complete || changed > known / LOOKUPS_SHARE {
            self.lookups = ruleset.lookups();
        }
        self.lookups
    }

    /// Enables node ports on loopback addresses (C8). The rule that protects the node from other senders to
    /// such addresses must exist before.
    fn serve_localhost(&mut self, change: Change<'_>) {
        if self.localhost || !serves_localhost(&self.settings, change.node) {
            return;
        }
        self.localhost = true;
        if !is_set(ROUTE_LOCALNET)
            && let Err(error) = std::fs::write(ROUTE_LOCALNET, "1")
        {
            tracing::warn!(
                %error,
                "node ports are not served on 127.0.0.1: {ROUTE_LOCALNET} cannot be set to 1"
            );
        }
    }

    /// Compares the tables with the ruleset, unless it is certain that nothing changed since the last time.
    fn verify(&mut self) -> Result<Verification, StepError> {
        let Some(ruleset) = self.ruleset.take() else {
            let what = "it is not known what our chains should hold";
            return Ok(Verification::Drifted(what.to_owned()));
        };
        let before = self.tables.generation();
        if self.known.is_some() && self.known == before {
            self.ruleset = Some(ruleset);
            return Ok(Verification::Equal);
        }
        self.known = None;
        let found = match self.read() {
            Ok(listing) => listing.found,
            Err(error) => {
                self.ruleset = Some(ruleset);
                return Err(error);
            }
        };
        if let Some(difference) = ruleset.difference(&found) {
            return Ok(Verification::Drifted(difference));
        }
        self.ruleset = Some(ruleset);
        self.known = before.filter(|_| before == self.tables.generation());
        Ok(Verification::Equal)
    }
}

impl<T: Tables> Backend for Driver<T> {
    fn describe(&self) -> &'static Description {
        &DESCRIPTION
    }

    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        self.try_apply(change)
            .map_err(|error| ApplyError::new(change.family, error))
    }

    fn verify(&mut self, family: Family) -> Result<Verification, ApplyError> {
        let outcome = self.side(family).and_then(Side::verify);
        outcome.map_err(|error| ApplyError::new(family, error))
    }

    fn probe_interval(&self) -> Option<Duration> {
        let share = |side: &Side<T>| match side.tables.flavour() {
            Flavour::Legacy => READ_SHARE,
            Flavour::Nft => READ_SHARE_NFT,
        };
        let sides = self.sides.iter().flatten();
        let least = sides.map(|side| side.reading * share(side)).max();
        Some(self.probe_interval.max(least.unwrap_or_default()))
    }

    /// Chains of kube-proxy count too: they have the same names.
    fn has_services(&mut self, family: Family) -> bool {
        let side = self.side(family).ok();
        side.and_then(|side| side.read().ok()).is_some_and(|found| {
            let mut chains = found.found.chains().keys();
            chains.any(|(_, chain)| chain.is_of_a_service())
        })
    }

    fn serving(&self) -> Option<Serving> {
        let sides = self.sides.each_ref();
        let flavours = sides.map(|side| Some(side.as_ref().ok()?.tables.flavour()));
        Some(Serving::Iptables(flavours))
    }
}

fn is_set(file: &str) -> bool {
    std::fs::read_to_string(file).is_ok_and(|text| !matches!(text.trim(), "" | "0"))
}
