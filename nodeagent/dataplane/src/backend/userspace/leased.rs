//! A chain of iptables that leads connections and datagrams for Services to a socket of this process, for kernels without
//! nf_tables (U51).
//!
//! ```text
//! table nat, PREROUTING and OUTPUT, first rule: -j KPLANE-CAPTURE
//!   -m set ! --match-set KPLANE-LEASE dst -j RETURN       nothing renews the lease: the kernel's own rules serve
//!   -m mark --mark OWN -j RETURN
//!   -d 127.0.0.0/8 ! -o lo -j RETURN                       from another machine
//!   -p tcp -m set --match-set KPLANE-PLACES dst,dst -j DNAT --to-destination ADDRESS:PORT         also for udp
//!   -p tcp -m set --match-set KPLANE-NODES dst -m addrtype --dst-type LOCAL
//!          -m set --match-set KPLANE-TCP dst -j DNAT ..    node ports
//!   -d 127.0.0.0/8 -p tcp -m set --match-set KPLANE-LOCAL-TCP dst -j DNAT ..                      only there
//! ```
//!
//! Rules do not end with their process. So each packet asks for a lease: entries of a set that the kernel removes after a
//! second, unless a thread of the agent adds them again. Places are entries of sets (`sets.rs`), so the
//! number of rules is constant (`text.rs`).

mod sets;
mod text;

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use kplane_model::{Cidr, Family};
use kplane_netlink::Errno;
use kplane_netlink::ipset::{self, Command, Entry, IpSets, destroy_set};
use kplane_netlink::{NetlinkError, Refusal};

use self::sets::{SetId, entries, item};
use self::text::{CHAIN, Found, TABLE, rules};
use super::lease::{Alive, Lease};
use crate::backend::iptables::{Flavour, Tool};
use crate::backend::nftables::{CaptureSettings, Place};
use crate::process::RunError;

/// Largest share of the time for checks, as 1/n.
const READ_SHARE: u32 = 10;

/// Longest wait for rules that are gone to give a set back. Legacy iptables does that at once.
const GIVEN_BACK: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The chain of one family with its sets. All of it is removed with this object.
#[derive(Debug)]
pub(super) struct LeasedChain {
    family: Family,
    tool: Tool,
    settings: CaptureSettings,
    sets: IpSets,
    alive: Alive,
    /// `None` after an error that leaves doubt about the sets.
    lease: Option<Lease>,
    /// The entries of the sets, without the lease.
    held: BTreeSet<(SetId, Entry)>,
    /// The lines of the chain as the program lists them.
    lines: Vec<String>,
    /// Duration of the last check.
    reading: Duration,
}

impl LeasedChain {
    /// Creates the chain, in place of one that an earlier process left.
    ///
    /// # Errors
    /// The missing part, human-readable.
    pub(super) fn create(
        family: Family,
        settings: CaptureSettings,
        alive: Alive,
    ) -> Result<Self, String> {
        let (tool, _) = Tool::choose_for(family, &[]).map_err(|error| error.to_string())?;
        let sets = IpSets::open().map_err(|error| error.to_string())?;
        let mut chain = Self {
            family,
            tool,
            settings,
            sets,
            alive,
            lease: None,
            held: BTreeSet::new(),
            lines: Vec::new(),
            reading: Duration::ZERO,
        };
        remove_chain(&chain.tool).map_err(|error| chain.failed(&error))?;
        chain.make_sets()?;
        chain.write()?;
        chain.lease = Some(chain.start_lease()?);
        Ok(chain)
    }

    fn start_lease(&self) -> Result<Lease, String> {
        let family = self.family;
        let mut sets = IpSets::open().map_err(|error| error.to_string())?;
        Lease::start(family, self.alive.clone(), move || renew(&mut sets, family))
    }

    /// Returns the name of the program that writes the rules.
    pub(super) fn program(&self) -> &str {
        self.tool.name()
    }

    /// Deletes places, and adds others.
    ///
    /// # Errors
    /// The kernel's refusal; what the sets hold is not known then.
    pub(super) fn change(&mut self, delete: &[Place], add: &[Place]) -> Result<(), String> {
        if self.lease.is_none() {
            self.clear()?;
        }
        let items = |places: &[Place]| -> Vec<_> {
            let items = places.iter().filter_map(|place| item(*place));
            items.collect()
        };
        self.exchange(&items(delete), &items(add))
    }

    /// Replaces the addresses with node ports.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(super) fn set_nodes(&mut self, ranges: &[Cidr]) -> Result<(), String> {
        let wanted = ranges.iter().flat_map(|range| entries(*range));
        let wanted: BTreeSet<_> = wanted.map(|entry| (SetId::Nodes, entry)).collect();
        let held = self.held.iter().filter(|(set, _)| *set == SetId::Nodes);
        let held: BTreeSet<_> = held.copied().collect();
        let delete: Vec<_> = held.difference(&wanted).copied().collect();
        let add: Vec<_> = wanted.difference(&held).copied().collect();
        self.exchange(&delete, &add)
    }

    /// Deletes all places, so that the kernel serves them. If that fails, the lease ends.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(super) fn clear(&mut self) -> Result<(), String> {
        self.held.retain(|(set, _)| *set == SetId::Nodes);
        let flush = SetId::OF_PLACES.map(|set| Command::Flush(set.name(self.family)));
        let cleared = perform(&mut self.sets, &flush);
        match (&cleared, &self.lease) {
            (Ok(()), None) => self.lease = Some(self.start_lease()?),
            (Ok(()), Some(_)) => {}
            (Err(_), _) => self.lease = None,
        }
        cleared
    }

    fn exchange(
        &mut self,
        delete: &[(SetId, Entry)],
        add: &[(SetId, Entry)],
    ) -> Result<(), String> {
        let name = |set: &SetId| set.name(self.family);
        let deletes = delete
            .iter()
            .map(|(set, entry)| Command::Delete(name(set), *entry));
        let adds = add
            .iter()
            .map(|(set, entry)| Command::Add(name(set), *entry));
        perform(&mut self.sets, &deletes.chain(adds).collect::<Vec<_>>())?;
        for item in delete {
            self.held.remove(item);
        }
        self.held.extend(add.iter().copied());
        Ok(())
    }

    /// Compares chain and sets with what they should be, and repairs them. Returns what was wrong.
    ///
    /// # Errors
    /// The chain or the sets cannot be read or repaired.
    pub(super) fn repair(&mut self) -> Result<Option<String>, String> {
        let started = Instant::now();
        let mut wrong = Vec::new();
        for set in SetId::ALL {
            if self.repair_set(set)? {
                wrong.push(format!("IP set {}", set.name(self.family)));
            }
        }
        if self.repair_chain()? {
            wrong.push(format!("{} chain {CHAIN}", self.tool.name()));
        }
        self.reading = started.elapsed();
        Ok((!wrong.is_empty())
            .then(|| format!("another program had changed {}", wrong.join(" and "))))
    }

    /// Writes the chain anew if it is changed, or not before the kernel's rules. Returns whether it did.
    ///
    /// # Errors
    /// The programs' failure.
    pub(super) fn repair_chain(&mut self) -> Result<bool, String> {
        let found = self.read()?;
        let is_right = found.is_first && found.chain.as_ref() == Some(&self.lines);
        if !is_right {
            self.write()?;
        }
        Ok(!is_right)
    }

    fn repair_set(&mut self, set: SetId) -> Result<bool, String> {
        let name = set.name(self.family);
        let found = self.sets.list(name).map_err(|error| error.to_string())?;
        let is_new = found.is_none();
        let found = match found {
            Some(found) if !found.is(set.kind(), self.family) => {
                return Err(format!(
                    "IP set {name} is of type {}: run `ipset destroy {name}`",
                    found.kind
                ));
            }
            Some(found) => found.entries,
            None => {
                perform(&mut self.sets, &[set.create(self.family)])?;
                Vec::new()
            }
        };
        if set == SetId::Lease {
            return Ok(is_new);
        }
        let held = self.held.iter().filter(|(of, _)| *of == set);
        let held: BTreeSet<Entry> = held.map(|(_, entry)| *entry).collect();
        let found: BTreeSet<Entry> = found.into_iter().collect();
        let deletes = found.difference(&held);
        let deletes = deletes.map(|entry| Command::Delete(name, *entry));
        let adds = held
            .difference(&found)
            .map(|entry| Command::Add(name, *entry));
        let commands: Vec<_> = deletes.chain(adds).collect();
        perform(&mut self.sets, &commands)?;
        Ok(is_new || !commands.is_empty())
    }

    /// Returns how often to check, if the least time between two checks is `interval`.
    pub(super) fn interval(&self, interval: Duration) -> Duration {
        interval.max(self.reading * READ_SHARE)
    }

    /// Creates the sets, or empties those that an earlier process left.
    fn make_sets(&mut self) -> Result<(), String> {
        for set in SetId::ALL {
            let (refused, _) = self
                .sets
                .perform(&[set.create(self.family)])
                .map_err(|error| lacking(set, &error))?;
            match refused.into_iter().next() {
                None => {}
                Some(refusal) if refusal.errno == Errno::EEXIST => {
                    perform(&mut self.sets, &[Command::Flush(set.name(self.family))])?;
                }
                Some(refusal) => return Err(lacking(set, &refusal.into_error(&[]))),
            }
        }
        Ok(())
    }

    fn read(&self) -> Result<Found, String> {
        let listed = self.tool.list_table(TABLE);
        listed
            .map(|text| Found::parse(&text))
            .map_err(|error| self.failed(&error))
    }

    fn write(&mut self) -> Result<(), String> {
        let rules = rules(self.family, self.settings);
        let text = self.read()?.writing(&rules);
        self.tool
            .restore(&text)
            .map_err(|error| self.failed(&error))?;
        let lines = self.read()?.chain.unwrap_or_default();
        if lines.len() != rules.len() {
            return Err(format!(
                "another program changes chain {CHAIN} at the same time"
            ));
        }
        self.lines = lines;
        Ok(())
    }

    fn failed(&self, error: &RunError) -> String {
        format!("{}: {error}", self.tool.name())
    }
}

impl Drop for LeasedChain {
    fn drop(&mut self) {
        let family = self.family;
        self.lease = None;
        // From here on, the kernel serves.
        let _ = perform(&mut self.sets, &[Command::Flush(SetId::Lease.name(family))]);
        let mut problems: Vec<String> = Vec::new();
        problems.extend(remove_chain(&self.tool).err().map(|e| self.failed(&e)));
        for set in SetId::ALL {
            let name = set.name(family);
            problems.extend(
                remove_set(name)
                    .err()
                    .map(|e| format!("IP set {name}: {e}")),
            );
        }
        if !problems.is_empty() {
            tracing::warn!(
                %family,
                problem = problems.join("; "),
                "cannot remove all rules of the userspace proxy; they do nothing, and `kp-nodeagent --cleanup` removes them"
            );
        }
    }
}

fn renew(sets: &mut IpSets, family: Family) -> Result<(), String> {
    let name = SetId::Lease.name(family);
    let all: Vec<Entry> = entries(Cidr::everything(family));
    let add: Vec<Command<'_>> = all.iter().map(|entry| Command::Add(name, *entry)).collect();
    perform(sets, &add)
}

fn lacking(set: SetId, error: &NetlinkError) -> String {
    let (kind, module) = (set.kind().as_str(), set.kind().module());
    format!("no IP set of type {kind}: {error}; load the kernel module {module}")
}

/// Executes commands, all of which must succeed.
fn perform(sets: &mut IpSets, commands: &[Command<'_>]) -> Result<(), String> {
    if commands.is_empty() {
        return Ok(());
    }
    let (refused, _) = sets.perform(commands).map_err(|error| error.to_string())?;
    match refused.into_iter().next() {
        None => Ok(()),
        Some(Refusal {
            code: ipset::code::HASH_FULL,
            ..
        }) => Err("the IP set is full".to_owned()),
        Some(refusal) => Err(format!("IP sets: {}", refusal.into_error(&[]))),
    }
}

/// Returns the programs of iptables in whose tables an earlier process left its chain. Creates nothing.
pub(crate) fn left_chains(family: Family) -> Vec<Tool> {
    let kinds = [Flavour::Legacy, Flavour::Nft].into_iter();
    let tools = kinds
        .filter(|flavour| flavour.may_have_rules(family))
        .filter_map(|flavour| Tool::find(flavour, family));
    // If a chain cannot be listed, its sets cannot be removed, and are named.
    tools
        .filter(|tool| {
            let listed = tool.list().ok();
            listed.is_some_and(|text| Found::parse(&text).chain.is_some())
        })
        .collect()
}

/// Removes the chain; a missing chain is no error.
///
/// # Errors
/// The programs' failure.
pub(crate) fn remove_chain(tool: &Tool) -> Result<(), RunError> {
    match Found::parse(&tool.list_table(TABLE)?).removal() {
        Some(text) => tool.restore(&text),
        None => Ok(()),
    }
}

/// Returns whether an IP set has the name of one of this chain's sets.
pub(crate) fn is_set_name(name: &str) -> bool {
    let mut all = SetId::ALL.into_iter();
    all.any(|set| Family::ALL.iter().any(|family| set.name(*family) == name))
}

/// Removes a set, for which rules that are gone may wait a moment; a missing set is no error.
///
/// # Errors
/// [`NetlinkError`].
pub(crate) fn remove_set(name: &str) -> Result<(), NetlinkError> {
    let until = Instant::now() + GIVEN_BACK;
    loop {
        match destroy_set(name) {
            Err(error) if error.errno() == Some(Errno::ENOENT) => return Ok(()),
            Err(_) if Instant::now() < until => thread::sleep(LOOK_AGAIN),
            result => return result,
        }
    }
}
