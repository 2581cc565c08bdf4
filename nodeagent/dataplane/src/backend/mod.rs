//! Backends: what puts a plan into the data path.
//!
//! A backend owns what it last put there (or found there) and works out the difference itself, so
//! that every backend gets the same plans. How to add one: implement [`Backend`], add a variant to
//! [`Kind`] and an arm to [`Kind::open`].

mod description;
pub mod iptables;
pub mod ipvs;
pub mod nftables;
pub mod noop;
mod servers;

use std::os::fd::OwnedFd;
use std::time::Duration;

use kplane_model::OWN_MARK;
use kplane_model::{Family, ServiceKey, ServiceName};

pub use self::description::{Description, Failures, ModeMetrics};
pub use self::servers::{Connections, Drain, Inspection, RealServer, ServerCounts, VirtualServer};
use crate::plan::{NodePlan, ServicePlan};
use kplane_netlink::{Errno, NfSocket};

/// What an engine asks of a backend, for one family.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    /// The family; plans of the other one are not in here.
    pub family: Family,
    /// The node's own settings.
    pub node: &'a NodePlan,
    /// ServicePorts that are new or changed, or gone (`None`).
    pub services: &'a [(ServiceKey, Option<ServicePlan>)],
    /// `services` is everything there is: whatever else the data path holds goes away. Only a
    /// complete snapshot leads to this (design invariant 3).
    pub complete: bool,
}

/// What became of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Operations that the kernel was sent; 0 when it already held everything.
    pub operations: u64,
    /// Bytes that the kernel was sent.
    pub bytes: u64,
    /// Time for comparing with what the data path holds.
    pub plan: Duration,
    /// Time for encoding.
    pub encode: Duration,
    /// Time until the kernel acknowledged.
    pub kernel: Duration,
    /// ServicePorts of the change that are not (or not fully) programmed; all others are.
    pub failures: Vec<Failure>,
    /// Rules there are now, in backends whose rules grow with the number of Services.
    pub rules: Option<RuleCounts>,
    /// What others had changed and was put right before the change, and by whom, for people.
    pub repaired: Option<String>,
}

/// Rules in the tables filter and nat of iptables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleCounts {
    /// All that are ours.
    pub total: [u64; 2],
    /// Those that the last change wrote.
    pub last: [u64; 2],
    /// How long the way to a Service is.
    pub lookups: Lookups,
}

/// How many rules a new connection to a Service's address passes at most until its Service is found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    /// In one list of all addresses, as kube-proxy has it.
    pub list: u64,
    /// As the rules are.
    pub now: u64,
}

impl RuleCounts {
    /// The tables.
    pub const TABLES: [&str; 2] = ["filter", "nat"];
}

/// Why one ServicePort is not in the data path as planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The ServicePort.
    pub key: ServiceKey,
    /// What is wrong, for people.
    pub reason: String,
    /// It is served, but not in every respect.
    pub degraded: bool,
}

/// A change that was not applied. The data path holds what it held before, or it is not known what
/// it holds; either way the engine retries with everything (`Change::complete`).
#[derive(Debug, thiserror::Error)]
#[error("{family}: {source}")]
pub struct ApplyError {
    /// The family concerned; the other one goes on.
    pub family: Family,
    /// The step that failed.
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl ApplyError {
    pub(in crate::backend) fn new(
        family: Family,
        step: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self {
            family,
            source: Box::new(step),
        }
    }
}

/// A backend that cannot start on this machine: says what is missing, in one line.
#[derive(Debug, thiserror::Error)]
#[error("backend {backend}: {reason}")]
pub struct OpenError {
    /// Name of the backend.
    pub backend: &'static str,
    /// What is missing and what to do about it.
    pub reason: String,
}

/// Checks that this process may change rules at all: without that, everything else looks as if it were missing.
///
/// # Errors
/// [`OpenError`].
pub(in crate::backend) fn check_privilege(backend: &'static str) -> Result<(), OpenError> {
    let asked = NfSocket::open().and_then(|mut socket| socket.generation());
    match asked.err().and_then(|error| error.errno()) {
        Some(Errno::EPERM) => Err(OpenError {
            backend,
            reason: "not permitted to change rules: CAP_NET_ADMIN is missing in the user namespace that \
                     owns this network namespace"
                .to_owned(),
        }),
        // Whatever else it is, the backend finds out.
        _ => Ok(()),
    }
}

/// Says which families cannot be programmed, and why; one of them is enough for a backend.
///
/// # Errors
/// [`OpenError`] when there is none.
pub(in crate::backend) fn check_sides<S>(
    backend: &'static str,
    sides: &[Result<S, String>; 2],
) -> Result<(), OpenError> {
    if let [Err(v4), Err(v6)] = sides {
        let reason = format!("neither IPv4 nor IPv6 can be programmed: {v4}; {v6}");
        return Err(OpenError { backend, reason });
    }
    for (family, side) in Family::ALL.into_iter().zip(sides) {
        match (family, side) {
            (_, Ok(_)) => {}
            // Most nodes without IPv6 need none: a Service that does is told of by name.
            (Family::V6, Err(reason)) => {
                tracing::info!(%family, reason, "this family cannot be programmed; the other goes on");
            }
            (Family::V4, Err(reason)) => {
                tracing::warn!(%family, reason, "this family cannot be programmed; the other goes on");
            }
        }
    }
    Ok(())
}

/// Result of reading the data path back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verification {
    /// It holds exactly what was applied.
    Equal,
    /// It holds what was applied, but on this machine that is not right any more: what became different, for
    /// people. A complete change is due.
    Outdated(String),
    /// Somebody else had changed it, and it holds what was applied again: what was different, and as far as
    /// the kernel tells by whom, for people.
    Repaired(String),
    /// Somebody else changed it: what differs, for people. The backend has taken note of what is
    /// really there; a complete change repairs it.
    Drifted(String),
}

/// Puts plans into a data path. All calls come from one thread and may block it.
pub trait Backend: Send {
    /// What is true of it on every machine.
    fn describe(&self) -> &'static Description;

    /// Applies a change: all of it in one transaction where the data path has transactions. The
    /// first change of a family is a complete one; what the data path already holds of ours is
    /// adopted then, not rewritten.
    ///
    /// # Errors
    /// [`ApplyError`]: nothing of the change counts as applied.
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError>;

    /// Reads the data path of a family back and compares it with what was applied.
    ///
    /// # Errors
    /// [`ApplyError`] when it cannot be read.
    fn verify(&mut self, family: Family) -> Result<Verification, ApplyError>;

    /// Whether the data path has Services that an earlier process put there. Called before the first
    /// change only; may read all of it. Backends that cannot tell say no.
    fn has_services(&mut self, _family: Family) -> bool {
        false
    }

    /// A descriptor that is readable when the kernel has something to tell of what others changed:
    /// [`Backend::listen`]. `None` for backends that are not told; those have a
    /// [`Backend::probe_interval`].
    fn readiness(&self) -> Option<OwnedFd> {
        None
    }

    /// Listens to the kernel: whether somebody else changed what is ours, by family. Costs next to nothing
    /// if nobody did.
    fn listen(&mut self) -> [bool; 2] {
        [false, false]
    }

    /// Puts right what others changed by what the kernel told of it, without reading everything back where
    /// that can be done.
    ///
    /// # Errors
    /// As [`Backend::verify`].
    fn mend(&mut self, family: Family) -> Result<Verification, ApplyError> {
        self.verify(family)
    }

    /// What it has in the data path that programs may take for left over by kube-proxy (I4); `None`
    /// if what kube-proxy left is not in its way.
    fn serving(&self) -> Option<Serving> {
        None
    }

    /// How often [`Backend::verify`] must be called even if nothing was applied: backends that
    /// are not told of changes by others, and for which looking is cheap enough.
    fn probe_interval(&self) -> Option<Duration> {
        None
    }

    /// The virtual servers of a family by the last look at them, in backends that have some: a
    /// look is [`Backend::verify`], or a complete change. Costs nothing.
    fn servers(&self, _family: Family) -> Option<ServerCounts> {
        None
    }

    /// What there is for one Service, in backends that have virtual servers. Does not ask the
    /// kernel.
    fn inspect(&self, _service: &ServiceName) -> Option<Inspection> {
        None
    }
}

/// Which backend of ours serves: what it has is not left over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// The one with nftables tables of its own: all chains of iptables that have kube-proxy's names
    /// are left over.
    Nftables,
    /// The one with such chains, by family in the kind of iptables that the node uses.
    Iptables([Option<iptables::Flavour>; 2]),
    /// The one with virtual servers, IP sets, a device, and chains about these, by family in the
    /// kind of iptables that the node uses.
    Ipvs([Option<iptables::Flavour>; 2]),
}

/// The backends there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// nf_tables, spoken to directly over netlink.
    Nftables,
    /// kube-proxy's chains, written by `iptables-restore`.
    Iptables,
    /// kube-proxy's virtual servers, IP sets and rules about these.
    Ipvs,
    /// Accepts everything and does nothing: for tests and dry runs.
    Noop,
}

/// What backends need to know when they start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bit of the packet mark that asks for masquerading, 0..=31 (C5; default 14).
    pub masquerade_bit: u8,
    /// nftables and iptables: mark of our own connections, which the rules leave alone; 0 = none.
    pub own_mark: u32,
    /// Packets that come in there count as from pods, besides those from the plan's pod sources.
    pub pod_interface: Option<PodInterface>,
    /// iptables: node ports are served on IPv4 loopback addresses too (C8).
    pub localhost_nodeports: bool,
    /// iptables: how Services are found by their addresses.
    pub iptables_layout: iptables::Layout,
    /// iptables and ipvs: what others changed is put right within so long.
    pub probe_interval: Duration,
    /// ipvs alone.
    pub ipvs: ipvs::Settings,
}

impl Settings {
    /// [`Settings::probe_interval`] by default.
    pub const PROBE_INTERVAL: Duration = Duration::from_secs(2);
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            masquerade_bit: 14,
            own_mark: OWN_MARK,
            pod_interface: None,
            localhost_nodeports: true,
            iptables_layout: iptables::Layout::default(),
            probe_interval: Self::PROBE_INTERVAL,
            ipvs: ipvs::Settings::default(),
        }
    }
}

/// The interfaces behind which pods are (`detectLocalMode` `BridgeInterface` and
/// `InterfaceNamePrefix`): one by name, or all whose names begin alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodInterface {
    /// Padded with zeros: `IFNAMSIZ` (linux/if.h).
    name: [u8; 16],
    /// How many bytes of `name` count: all 16 for one by name.
    len: u8,
}

impl PodInterface {
    /// Bytes of an interface's name, at most: `IFNAMSIZ` less the zero at its end.
    pub const MAX_NAME: usize = 15;

    /// One interface, or all whose names begin with `name` if `prefix`; `None` for what the kernel
    /// forbids in names, and for quotes, `\` and `*`, which are a mistake then.
    #[must_use]
    pub fn new(name: &str, prefix: bool) -> Option<Self> {
        let allowed = |b: u8| b.is_ascii_graphic() && !b"/:*\"'`\\".contains(&b);
        let fits = (1..=Self::MAX_NAME).contains(&name.len());
        if !fits || !name.bytes().all(allowed) || name == "." || name == ".." {
            return None;
        }
        let mut padded = [0; 16];
        padded[..name.len()].copy_from_slice(name.as_bytes());
        let len = if prefix { name.len() } else { padded.len() };
        Some(Self {
            name: padded,
            len: u8::try_from(len).ok()?,
        })
    }

    /// The name, and whether all count whose names begin with it.
    fn pattern(&self) -> (&str, bool) {
        let prefix = usize::from(self.len) < self.name.len();
        let end = self.name.iter().position(|b| *b == 0);
        let name = &self.name[..end.unwrap_or(self.name.len())];
        // The constructor takes ASCII only.
        (std::str::from_utf8(name).unwrap_or_default(), prefix)
    }

    /// What an interface's name, padded with zeros, must begin with.
    fn bytes(&self) -> &[u8] {
        &self.name[..usize::from(self.len)]
    }
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Nftables, Self::Iptables, Self::Ipvs, Self::Noop];

    /// What is true of the backend on every machine.
    #[must_use]
    pub const fn describe(self) -> &'static Description {
        match self {
            Self::Nftables => &nftables::DESCRIPTION,
            Self::Iptables => &iptables::DESCRIPTION,
            Self::Ipvs => &ipvs::DESCRIPTION,
            Self::Noop => &noop::DESCRIPTION,
        }
    }

    /// Opens a backend, having checked that this machine can run it.
    ///
    /// # Errors
    /// [`OpenError`] says what is missing.
    pub fn open(self, settings: &Settings) -> Result<Box<dyn Backend>, OpenError> {
        match self {
            Self::Nftables => {
                let settings = nftables::Settings {
                    masquerade_bit: settings.masquerade_bit,
                    own_mark: settings.own_mark,
                    pod_interface: settings.pod_interface,
                };
                nftables::open(settings)
            }
            Self::Iptables => iptables::open(settings),
            Self::Ipvs => ipvs::open(settings),
            Self::Noop => Ok(Box::new(noop::Noop::default())),
        }
    }
}
