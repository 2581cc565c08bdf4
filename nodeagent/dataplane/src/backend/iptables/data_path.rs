//! One family of the iptables backend: its tables, and how they are read, changed and compared.

mod isolate;
mod tables;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::time::{Duration, Instant};

use kplane_model::{Family, ServiceKey};

use self::tables::{Programs, Tables};
use super::DESCRIPTION;
use super::layout::serves_localhost;
use super::name::{ChainName, TableName};
use super::readback::Listing;
use super::restore::parts;
use super::ruleset::{Ruleset, StagedRules, Written};
use super::settings::RuleSettings;
use super::tool::{Flavour, Tool, is_locked};
use crate::backend::driver::{DataPath, StepError};
use crate::backend::{
    self, Applied, Backend, Change, Kind, Lookups, OpenError, RuleCounts, Verification, open_sides,
};
use crate::kernel_setting;
use crate::plan::{FrontendAddr, NodePlan};
use crate::process::RunError;

/// Largest share of the time for checks of legacy tables, as 1/n. A check of 10,000 Services takes 0.3 s, so there is
/// one every 30 s. kube-proxy looks for its canary chain as often.
const CHECK_SHARE: u32 = 100;
/// Longest time between two checks of legacy tables, unless the settings say longer.
const CHECK_LATEST: Duration = Duration::from_secs(60);
/// Share for iptables on nf_tables, where the tables are read only after a change by another program. 10,000 Services
/// are read in 0.8 s.
const CHECK_SHARE_NFT: u32 = 5;

/// Share of all addresses, as 1/n, that must be added or removed before the way to a Service is measured
/// again.
const LOOKUPS_SHARE: u64 = 16;

/// Kernel setting that lets packets from loopback addresses leave through other interfaces: node ports on
/// 127.0.0.1 (C8).
const ROUTE_LOCALNET: &str = "proc/sys/net/ipv4/conf/all/route_localnet";
/// Kernel setting that makes TCP packets out of the window valid (C7).
const TCP_BE_LIBERAL: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal";

/// One family's tables.
#[derive(Debug)]
struct IptablesDataPath<T> {
    tables: T,
    settings: RuleSettings,
    /// Shortest time between two checks of the tables.
    probe_interval: Duration,
    /// Numbers of rules in the tables filter and nat, while the ruleset is known.
    counts: [u64; 2],
    /// The length of the way to a Service when it was last measured.
    lookups: Lookups,
    /// The generation of nf_tables in which the tables were known to be correct.
    known: Option<u32>,
    /// Chains that should be deleted, and are empty, because rules of other programs jump to them.
    kept: Vec<(TableName, ChainName)>,
    /// Durations of the last checks that read the tables. The shortest is the cost of a check: the others may have
    /// waited for a processor.
    checks: [Duration; 3],
    /// Whether node ports on loopback addresses work, or the attempt to enable them was made.
    localhost: bool,
}

/// The tables could not be listed.
#[derive(Debug, thiserror::Error)]
#[error("iptables-save {0}")]
struct Unreadable(RunError);

fn unreadable(error: RunError) -> StepError {
    StepError::read(Unreadable(error))
}

fn failed_restore(error: RunError) -> StepError {
    match error {
        error if is_locked(&error) => StepError::interrupted(format!(
            "another program holds the lock of iptables (/run/xtables.lock) for too long: {error}"
        )),
        RunError::Failed { status, .. } if status.code().is_some() => {
            StepError::Refused(format!("iptables-restore {error}").into())
        }
        error => StepError::interrupted(format!(
            "iptables-restore {error}; the agent reads the tables again"
        )),
    }
}

/// Opens the backend for this thread's network namespace.
///
/// # Errors
/// [`OpenError`] when no family can be programmed.
pub(super) fn open(settings: &backend::Settings) -> Result<Backend, OpenError> {
    backend::check_privilege(DESCRIPTION.name)?;
    let mut flavours = [None, None];
    let side = |family| {
        let tool = Tool::choose(family).map_err(|error| error.to_string())?;
        tracing::info!(%family, tool = tool.name(), "programming iptables");
        flavours[family as usize] = Some(tool.flavour());
        let rules = RuleSettings {
            family,
            masquerade_bit: settings.masquerade_bit,
            own_mark: settings.own_mark,
            random_fully: true,
            localhost_nodeports: settings.localhost_nodeports && family == Family::V4,
            tcp_be_liberal: is_set(TCP_BE_LIBERAL),
            counters: tool.make_counters(),
            pod_interface: settings.pod_interface,
            layout: settings.iptables_layout,
        };
        let interval = settings.probe_interval;
        Ok(IptablesDataPath::new(Programs::new(tool), rules, interval))
    };
    let sides = open_sides(DESCRIPTION.name, side)?;
    Ok(Backend {
        serving: Some(Kind::Iptables.serving(flavours)),
        ..Backend::new(&DESCRIPTION, sides)
    })
}

impl<T: Tables> IptablesDataPath<T> {
    fn new(tables: T, settings: RuleSettings, probe_interval: Duration) -> Self {
        Self {
            tables,
            settings,
            probe_interval,
            counts: [0; 2],
            lookups: Lookups::default(),
            known: None,
            kept: Vec::new(),
            checks: [Duration::ZERO; 3],
            localhost: false,
        }
    }

    fn read(&mut self) -> Result<Listing, StepError> {
        let mut listing = self.tables.read().map_err(unreadable)?;
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
        self.tables.restore(&text).map_err(failed_restore)?;
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
    fn keep(&mut self, staged: &mut StagedRules) {
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

    /// Returns the number of rules in the tables filter and nat after a change that is not accepted yet, and
    /// the number that the change wrote.
    fn count(&mut self, ruleset: &Ruleset, staged: &StagedRules) -> RuleCounts {
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
            let new: u64 = step.write.iter().map(|c| u64::from(c.content.rules())).sum();
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
    fn serve_localhost(&mut self, node: &NodePlan) {
        if self.localhost || !serves_localhost(&self.settings, node) {
            return;
        }
        self.localhost = true;
        prepare();
    }
}

/// Lets packets from loopback addresses leave through other interfaces. An agent without the right to do that finds it
/// done by `--init-only`.
pub(super) fn prepare() {
    let (root, file) = (Path::new("/"), Path::new(ROUTE_LOCALNET));
    if !is_set(root.join(file))
        && let Err(error) = kernel_setting::change(root, file, "1")
    {
        tracing::warn!(
            %error,
            "node ports are not served on 127.0.0.1: /{ROUTE_LOCALNET} cannot be set to 1"
        );
    }
}

impl<T: Tables> DataPath for IptablesDataPath<T> {
    type Content = Ruleset;
    type Staged = StagedRules;

    fn family(&self) -> Family {
        self.settings.family
    }

    fn adopt(&mut self) -> Result<Ruleset, StepError> {
        if self.settings.counters {
            // If a cleanup removed the rules, it removed the counters too.
            let made = self.tables.make_counters();
            made.map_err(|error| {
                StepError::read(format!(
                    "{error}; is the kernel's module nfnetlink_acct gone?"
                ))
            })?;
        }
        let found = self.read()?.found;
        let chains = found.chains().len();
        if chains > 0 {
            let family = self.settings.family;
            tracing::info!(%family, chains, "adopted the chains of the kernel");
        }
        let ruleset = Ruleset::adopt(self.settings, found);
        self.counts = [TableName::Filter, TableName::Nat].map(|table| ruleset.rules_in(table));
        Ok(ruleset)
    }

    fn frontends<'c>(ruleset: &'c Ruleset, key: &ServiceKey) -> &'c [FrontendAddr] {
        let holdings = ruleset.services.get(key);
        holdings.map_or(&[], |holdings| &holdings.frontends)
    }

    fn stage(
        &mut self,
        ruleset: &mut Ruleset,
        change: Change<'_>,
        applied: &mut Applied,
    ) -> Result<StagedRules, StepError> {
        let mut staged = ruleset.stage(change);
        applied.failures.append(&mut staged.failures);
        self.keep(&mut staged);
        applied.operations = staged.len() as u64;
        Ok(staged)
    }

    fn commit(
        &mut self,
        _ruleset: &mut Ruleset,
        staged: &mut StagedRules,
        applied: &mut Applied,
    ) -> Result<(), StepError> {
        let started = Instant::now();
        let limits = self.tables.limits();
        let texts: Vec<String> = staged.steps.iter().flat_map(|step| parts(step, limits)).collect();
        applied.encode = started.elapsed();
        applied.bytes = self.restore(&texts)?;
        applied.kernel = started.elapsed().saturating_sub(applied.encode);
        Ok(())
    }

    fn accept(&mut self, ruleset: &mut Ruleset, staged: StagedRules, applied: &mut Applied) {
        let complete = staged.after.complete;
        let mut rules = self.count(ruleset, &staged);
        ruleset.accept(staged);
        rules.lookups = self.lookups(ruleset, complete);
        applied.rules = Some(rules);
        if let Some(node) = &ruleset.node {
            self.serve_localhost(node);
        }
    }

    /// Compares the tables with the ruleset, unless it is certain that nothing changed since the last time.
    fn check(&mut self, ruleset: &mut Ruleset) -> Result<Verification, StepError> {
        let before = self.tables.generation();
        if self.known.is_some() && self.known == before {
            return Ok(Verification::Equal);
        }
        self.known = None;
        let started = Instant::now();
        let found = self.read()?.found;
        let difference = ruleset.difference(&found);
        self.checks = [self.checks[1], self.checks[2], started.elapsed()];
        if let Some(difference) = difference {
            return Err(StepError::Drifted(difference));
        }
        self.known = before.filter(|before| self.tables.generation() == Some(*before));
        Ok(Verification::Equal)
    }

    fn before_isolation(&mut self, ruleset: &Ruleset) -> Result<(), StepError> {
        self.find_needed(ruleset)
    }

    fn rehearse(&mut self, part: Change<'_>) -> Option<Result<(), StepError>> {
        Some(self.try_out(part))
    }

    /// Chains of kube-proxy count too: they have the same names.
    fn has_services(&mut self) -> bool {
        self.read().is_ok_and(|found| {
            found.found.chains().keys().any(|(_, chain)| chain.is_of_a_service())
        })
    }

    fn probe_interval(&self) -> Option<Duration> {
        let cost = self.checks.into_iter().min().unwrap_or_default();
        let least = match self.tables.flavour() {
            Flavour::Legacy => (cost * CHECK_SHARE).min(CHECK_LATEST),
            Flavour::Nft => cost * CHECK_SHARE_NFT,
        };
        Some(self.probe_interval.max(least))
    }
}

fn is_set(file: impl AsRef<Path>) -> bool {
    std::fs::read_to_string(file).is_ok_and(|text| !matches!(text.trim(), "" | "0"))
}
