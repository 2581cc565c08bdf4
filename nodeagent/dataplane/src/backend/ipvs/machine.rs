//! The driver's access to one family's data path, and its implementation for the real kernel.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::path::Path;

use kplane_model::{Family, IpvsScheduler};

use super::scheduler::{self, missing_scheduler};
use super::sets::{Entry, SetId, capacity_for};
use super::state::{Op, Snapshot};
use crate::backend::iptables::readback;
use crate::backend::iptables::restore::{Limits, parts};
use crate::backend::iptables::{ChainName, Flavour, FoundRules, TableChange, Tool};
use crate::process::RunError;
use kplane_netlink::ipset::{self, IpSets};
use kplane_netlink::ipvs::{self, Ipvs};
use kplane_netlink::{Errno, Links, NetlinkError, NfSocket, Refusal, link_index};

/// The device that holds Services' addresses (D2).
pub const LINK: &str = "kube-ipvs0";

/// Name of a set that is being filled, to replace another set.
const NEW_SET: [&str; 2] = ["KPLANE-GROWING", "KPLANE-6-GROWING"];

/// An operation that the kernel refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RefusedOp {
    /// Position of the operation.
    pub(super) index: usize,
    /// The reason, human-readable.
    pub(super) reason: String,
}

/// An error because of which a family cannot be programmed.
#[derive(Debug, thiserror::Error)]
pub(super) enum KernelError {
    /// A question failed, or it is not known which operations were done.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The device for Services' addresses is missing.
    #[error("no device {LINK}: {0}; load the kernel module dummy")]
    Link(NetlinkError),
    /// Another program has a set of this name and another type.
    #[error("IP set {name} of another program has type {kind}; run `ipset destroy {name}`")]
    OtherSet {
        /// The set.
        name: &'static str,
        /// The type of the set.
        kind: String,
    },
    /// The tables could not be listed.
    #[error("iptables-save {0}")]
    Save(RunError),
    /// The tables could not be written.
    #[error("iptables-restore {0}")]
    Restore(RunError),
    /// A test stops here.
    #[error("stopped")]
    Stopped,
}

/// Everything that was read, except the rules.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) snapshot: Snapshot,
    /// Capacity of each existing set; 0 = no limit.
    pub(super) capacities: HashMap<SetId, u32>,
    /// The node's addresses, without those of kplane's device.
    pub(super) node_ips: Vec<IpAddr>,
}

/// Access to one family's data path.
pub(super) trait Kernel: Send {
    /// Reads everything except the rules. Creates the device and the sets if they are missing, and nothing
    /// else.
    fn read(&mut self) -> Result<Reading, KernelError>;

    /// Reads the rules.
    fn rules(&mut self) -> Result<FoundRules, KernelError>;

    /// Returns whether the kernel has a scheduler. The kernel may load a module for the answer.
    fn has_scheduler(&mut self, scheduler: IpvsScheduler) -> Result<bool, KernelError>;

    /// Returns whether a scheduler's module is loaded. The question changes nothing.
    fn has_loaded(&self, scheduler: IpvsScheduler) -> bool;

    /// Returns a number that changes with each change of rules by any program; `None` if there is none.
    fn generation(&mut self) -> Option<u32>;

    /// Executes operations in order. A refused operation does not stop the others.
    fn perform(&mut self, ops: &[Op]) -> Result<(Vec<RefusedOp>, u64), KernelError>;

    /// Enlarges a set.
    fn grow(&mut self, set: SetId, held: &HashSet<Entry>, to: usize) -> Result<u32, KernelError>;

    /// Writes rules; returns their size in bytes.
    fn restore(&mut self, steps: &[TableChange]) -> Result<u64, KernelError>;

    /// Returns the kind of iptables.
    fn flavour(&self) -> Flavour;
}

/// Access to the real kernel.
#[derive(Debug)]
pub(super) struct Machine {
    family: Family,
    ipvs: Ipvs,
    sets: IpSets,
    links: Links,
    link: u32,
    tool: Tool,
    /// Socket for the generation of rules; legacy iptables has no generation.
    nftables: Option<NfSocket>,
}

impl Machine {
    pub(super) fn new(family: Family, tool: Tool) -> Result<Self, KernelError> {
        let mut links = Links::open()?;
        let nftables = match tool.flavour() {
            Flavour::Legacy => None,
            // Without the socket, the rules are read each time.
            Flavour::Nft => NfSocket::open().ok(),
        };
        Ok(Self {
            family,
            ipvs: Ipvs::open()?,
            sets: IpSets::open()?,
            link: ensure_link(&mut links)?,
            links,
            tool,
            nftables,
        })
    }

    /// Returns a set as it is, created if it was missing.
    fn ensure_set(&mut self, id: SetId) -> Result<ipset::Found, KernelError> {
        let (name, kind) = (id.name(self.family), id.kind());
        for _ in 0..2 {
            if let Some(found) = self.sets.list(name)? {
                if found.is(kind, self.family) {
                    return Ok(found);
                }
                let destroy = [ipset::SetCommand::Destroy(name)];
                if !self.sets.perform(&destroy)?.0.is_empty() {
                    let kind = found.kind;
                    return Err(KernelError::OtherSet { name, kind });
                }
            }
            self.create(name, id, capacity_for(0))?;
        }
        let what = "make an IP set";
        Err(NetlinkError::Unexpected { what }.into())
    }

    fn create(&mut self, name: &str, id: SetId, capacity: u32) -> Result<(), KernelError> {
        let create = ipset::SetCommand::Create {
            name,
            kind: id.kind(),
            family: self.family,
            capacity,
        };
        self.all(&[create])
    }

    /// Executes commands for sets, all of which must succeed.
    fn all(&mut self, commands: &[ipset::SetCommand<'_>]) -> Result<(), KernelError> {
        let (refused, _) = self.sets.perform(commands)?;
        match refused.into_iter().next() {
            None => Ok(()),
            Some(refusal) => Err(refusal.into_error(&[]).into()),
        }
    }

    fn entries(&mut self, ops: &[Op]) -> Result<(Vec<RefusedOp>, u64), KernelError> {
        let family = self.family;
        let commands = ops.iter().map(|op| match op {
            Op::Entry(set, entry, true) => ipset::SetCommand::Add(set.name(family), *entry),
            Op::Entry(set, entry, false) => ipset::SetCommand::Delete(set.name(family), *entry),
            // The operations of a run are of one kind, so these do not occur.
            Op::Ipvs(_) | Op::Address(..) => ipset::SetCommand::Destroy(""),
        });
        let (refused, bytes) = self.sets.perform(&commands.collect::<Vec<_>>())?;
        let refused = refused.into_iter().map(|refusal| RefusedOp {
            index: refusal.index,
            reason: match refusal.code {
                ipset::code::HASH_FULL => "the IP set is full".to_owned(),
                code => reported("IP set", &refusal, code),
            },
        });
        Ok((refused.collect(), bytes))
    }

    fn servers(&mut self, ops: &[Op]) -> Result<(Vec<RefusedOp>, u64), KernelError> {
        let commands: Vec<ipvs::Command> = ops
            .iter()
            .filter_map(|op| match op {
                Op::Ipvs(command) => Some(*command),
                Op::Entry(..) | Op::Address(..) => None,
            })
            .collect();
        let (refusals, mut bytes) = self.ipvs.perform(&commands)?;
        let mut refused = Vec::new();
        for refusal in refusals {
            let Some(command) = commands.get(refusal.index) else {
                continue;
            };
            let other = match (command, refusal.errno) {
                // Another program created the server first. It gets the wanted mode.
                (ipvs::Command::AddServer(key, mode), Errno::EEXIST) => {
                    Some(ipvs::Command::SetServer(*key, *mode))
                }
                (ipvs::Command::AddReal(key, real, weight), Errno::EEXIST) => {
                    Some(ipvs::Command::SetReal(*key, *real, *weight))
                }
                (ipvs::Command::SetReal(key, real, weight), Errno::ENOENT) => {
                    Some(ipvs::Command::AddReal(*key, *real, *weight))
                }
                // The object is gone already.
                (ipvs::Command::DeleteServer(_), Errno::ESRCH)
                | (ipvs::Command::DeleteReal(..), Errno::ESRCH | Errno::ENOENT) => continue,
                _ => None,
            };
            let mut last = Some(refusal.clone());
            if let Some(other) = other {
                let (again, more) = self.ipvs.perform(&[other])?;
                bytes += more;
                last = again.into_iter().next();
            }
            refused.extend(last.map(|last| RefusedOp {
                index: refusal.index,
                reason: reason(command, &last),
            }));
        }
        Ok((refused, bytes))
    }

    fn addresses(&mut self, ops: &[Op]) -> Result<(Vec<RefusedOp>, u64), KernelError> {
        let changes: Vec<(bool, IpAddr)> = ops
            .iter()
            .filter_map(|op| match op {
                Op::Address(ip, add) => Some((*add, *ip)),
                Op::Ipvs(_) | Op::Entry(..) => None,
            })
            .collect();
        let (refused, bytes) = self.links.perform(self.link, &changes)?;
        let wrong = refused
            .into_iter()
            .filter(|refusal| {
                let added = changes.get(refusal.index).is_some_and(|(add, _)| *add);
                let already = [Errno::EADDRNOTAVAIL, Errno::EEXIST][usize::from(added)];
                refusal.errno != already
            })
            .map(|refusal| RefusedOp {
                index: refusal.index,
                reason: reported(LINK, &refusal, refusal.code),
            });
        Ok((wrong.collect(), bytes))
    }
}

impl Kernel for Machine {
    fn read(&mut self) -> Result<Reading, KernelError> {
        self.link = ensure_link(&mut self.links)?;
        // An agent that was killed during this function may have left the set. A missing set is fine too.
        let _ = self
            .sets
            .perform(&[ipset::SetCommand::Destroy(NEW_SET[self.family as usize])])?;
        let mut snapshot = Snapshot::default();
        let mut capacities = HashMap::new();
        for id in SetId::ALL {
            let found = self.ensure_set(id)?;
            capacities.insert(id, found.capacity);
            let entries = found.entries.into_iter().collect();
            snapshot.entries.insert(id, entries);
        }
        snapshot.servers = self.ipvs.servers(self.family)?;
        snapshot.reals = self.ipvs.reals(&snapshot.servers, self.family)?;
        let mut node_ips = Vec::new();
        for address in self.links.addresses(self.family)? {
            if address.link == self.link {
                // The kernel creates link-local addresses itself if a program sets the device up.
                if !is_link_local(address.ip) {
                    snapshot.addresses.insert(address.ip);
                }
            } else if !address.is_of_host {
                node_ips.push(address.ip);
            }
        }
        Ok(Reading {
            snapshot,
            capacities,
            node_ips,
        })
    }

    fn rules(&mut self) -> Result<FoundRules, KernelError> {
        let text = self.tool.list().map_err(KernelError::Save)?;
        Ok(readback::parse(&text, ChainName::parse_ipvs).found)
    }

    fn generation(&mut self) -> Option<u32> {
        self.nftables.as_mut()?.generation().ok()
    }

    fn perform(&mut self, ops: &[Op]) -> Result<(Vec<RefusedOp>, u64), KernelError> {
        let (mut refused, mut bytes, mut start) = (Vec::new(), 0, 0);
        let same = |a: &Op, b: &Op| std::mem::discriminant(a) == std::mem::discriminant(b);
        for run in ops.chunk_by(same) {
            let (wrong, more) = match run.first() {
                Some(Op::Entry(..)) => self.entries(run)?,
                Some(Op::Ipvs(_)) => self.servers(run)?,
                Some(Op::Address(..)) => self.addresses(run)?,
                None => continue,
            };
            refused.extend(wrong.into_iter().map(|wrong| RefusedOp {
                index: wrong.index + start,
                ..wrong
            }));
            start += run.len();
            bytes += more;
        }
        Ok((refused, bytes))
    }

    fn grow(&mut self, id: SetId, held: &HashSet<Entry>, to: usize) -> Result<u32, KernelError> {
        let (name, new) = (id.name(self.family), NEW_SET[self.family as usize]);
        let capacity = capacity_for(to);
        self.create(new, id, capacity)?;
        let add = held.iter().map(|entry| ipset::SetCommand::Add(new, *entry));
        let mut commands: Vec<ipset::SetCommand<'_>> = add.collect();
        commands.push(ipset::SetCommand::Swap(new, name));
        commands.push(ipset::SetCommand::Destroy(new));
        self.all(&commands)?;
        Ok(capacity)
    }

    fn restore(&mut self, steps: &[TableChange]) -> Result<u64, KernelError> {
        let limits = match self.flavour() {
            Flavour::Legacy => Limits::LEGACY,
            Flavour::Nft => Limits::NFT,
        };
        let text: String = steps.iter().flat_map(|step| parts(step, limits)).collect();
        if !text.is_empty() {
            self.tool.restore(&text).map_err(KernelError::Restore)?;
        }
        Ok(text.len() as u64)
    }

    fn flavour(&self) -> Flavour {
        self.tool.flavour()
    }

    fn has_loaded(&self, scheduler: IpvsScheduler) -> bool {
        Path::new(&format!("/sys/module/ip_vs_{scheduler}")).exists()
    }

    fn has_scheduler(&mut self, scheduler: IpvsScheduler) -> Result<bool, KernelError> {
        Ok(scheduler::has_scheduler(&mut self.ipvs, scheduler)?)
    }
}

/// Returns the number of kplane's device, created if it was missing.
pub(super) fn ensure_link(links: &mut Links) -> Result<u32, KernelError> {
    if let Some(index) = link_index(LINK) {
        return Ok(index);
    }
    match links.add_dummy(LINK) {
        Ok(()) => {}
        Err(error) if error.errno() == Some(Errno::EEXIST) => {}
        Err(error) => return Err(KernelError::Link(error)),
    }
    let errno = Errno::ENODEV;
    let gone = || KernelError::Link(NetlinkError::Socket { what: LINK, errno });
    link_index(LINK).ok_or_else(gone)
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Returns the reason why IPVS refused a command.
fn reason(command: &ipvs::Command, refusal: &Refusal) -> String {
    match (command, refusal.errno) {
        (ipvs::Command::AddServer(_, mode) | ipvs::Command::SetServer(_, mode), Errno::ENOENT) => {
            missing_scheduler(mode.scheduler)
        }
        _ => reported("IPVS", refusal, refusal.code),
    }
}

fn reported(who: &str, refusal: &Refusal, code: i32) -> String {
    let words = refusal.reason.as_deref().unwrap_or_default();
    match refusal.errno {
        Errno::UnknownErrno => format!("{who}: error {code} {words}"),
        errno => format!("{who}: {errno} {words}"),
    }
    .trim_end()
    .to_owned()
}
