//! Backends, which program a data path with the plans of Services.
//!
//! A [`Backend`] has one [`Side`] for each family. Every side gets the same plans, and works out the difference
//! to the objects that it last wrote (or found). `driver.rs` holds what all sides have in common. To add a
//! backend: implement `DataPath`, describe it, add a variant to [`Kind`] and an arm to [`Kind::open`].

mod affinity;
mod description;
mod driver;
mod failure;
mod frontends;
pub mod iptables;
pub mod ipvs;
mod kernel;
pub mod nftables;
pub mod noop;
mod pod_interface;
mod proxy;
mod remembered;
mod rights;
#[cfg_attr(not(feature = "userspace"), path = "backend/userspace/absent.rs")]
pub mod userspace;
mod virtual_servers;

use std::os::fd::OwnedFd;
use std::time::Duration;

use kplane_model::OWN_MARK;
use kplane_model::fate::LocalRule;
use kplane_model::{Family, ServiceKey, ServiceName};

pub use self::affinity::{AffinityClient, AffinityClients, AffinityPort};
pub use self::description::{Description, Failures, ModeMetrics, NeededSetting};
use self::driver::{DataPath, Driver, StepError, Unusable};
pub use self::failure::{Failure, OpenError};
pub use self::kernel::{KernelState, PacketTarget};
pub use self::nftables::PolicyTables;
pub use self::pod_interface::PodInterface;
pub use self::proxy::{Lapse, Proxy, ProxyHandle, Show, UserspaceSettings};
use self::rights::check_privilege;
pub use self::virtual_servers::{
    Connections, Drain, Inspection, RealServer, ServerCounts, VirtualServer,
};
use crate::error::chain;
use crate::plan::{NodePlan, ServicePlan};

/// A change of one family, as the engine hands it to a backend.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    /// The family. All plans in this change belong to it.
    pub family: Family,
    /// The node's own settings.
    pub node: &'a NodePlan,
    /// ServicePorts that are new or changed (`Some`), or gone (`None`).
    pub services: &'a [(ServiceKey, Option<ServicePlan>)],
    /// Whether `services` is the complete state, so that the backend removes everything else from the data
    /// path. Only a complete snapshot leads to this (invariant: absence).
    pub complete: bool,
}

/// The outcome of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Number of operations sent to the kernel; 0 when it already held everything.
    pub operations: u64,
    /// Number of bytes sent to the kernel.
    pub bytes: u64,
    /// Time for comparing with the content of the data path.
    pub plan: Duration,
    /// Time for encoding.
    pub encode: Duration,
    /// Time until the kernel's acknowledgement.
    pub kernel: Duration,
    /// ServicePorts of the change that are not (or not fully) programmed; all others are.
    pub failures: Vec<Failure>,
    /// Number of rules now, in backends whose rules grow with the number of Services.
    pub rules: Option<RuleCounts>,
    /// Changes by another program that the backend repaired before this change, and the program's name;
    /// human-readable.
    pub repaired: Option<String>,
}

/// Numbers of rules in the iptables tables filter and nat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleCounts {
    /// All of kplane's rules.
    pub total: [u64; 2],
    /// Rules that the last change wrote.
    pub last: [u64; 2],
    /// Number of rules on the way to a Service.
    pub lookups: Lookups,
}

/// Most rules that a new connection to a Service's address passes until its Service is found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    /// The number for one list of all addresses, as kube-proxy writes it.
    pub list: u64,
    /// The number for the rules as they are.
    pub now: u64,
}

impl RuleCounts {
    /// Names of the tables.
    pub const TABLES: [&str; 2] = ["filter", "nat"];
}

/// A change that was not applied. Afterwards, the data path holds what it held before, or its content is
/// unknown. Either way the engine retries with everything (`Change::complete`).
#[derive(Debug, thiserror::Error)]
#[error("{family}: {source}")]
pub struct ApplyError {
    /// The family concerned. The other family goes on.
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

    /// Returns whether this machine cannot program the family, whatever the change is.
    pub(crate) fn is_about_the_machine(&self) -> bool {
        matches!(self.source.downcast_ref(), Some(StepError::Unusable(_)))
    }

    /// Returns the error of a partial change that came while a complete one was due.
    pub(crate) fn unknown(family: Family) -> Self {
        Self::new(family, StepError::Unknown)
    }
}

/// Opens the data paths of both families, and logs why a family cannot be programmed. One working family is
/// enough for a backend.
///
/// # Errors
/// [`OpenError`] when no family works.
fn open_sides<D: DataPath + 'static>(
    backend: &'static str,
    open: impl FnMut(Family) -> Result<D, String>,
) -> Result<[Box<dyn Side>; 2], OpenError> {
    let [v4, v6] = Family::ALL.map(open);
    if let (Err(v4), Err(v6)) = (&v4, &v6) {
        let reason = format!("neither IPv4 nor IPv6 can be programmed: {v4}; {v6}");
        return Err(OpenError::new(backend, reason));
    }
    Ok([(Family::V4, v4), (Family::V6, v6)].map(|(family, side)| match side {
        Ok(path) => Box::new(Driver::new(path)) as Box<dyn Side>,
        Err(reason) => {
            // Most nodes without IPv6 need none. A Service that needs IPv6 gets an error of its own.
            if family == Family::V6 {
                tracing::info!(%family, reason, "this family cannot be programmed; the other goes on");
            } else {
                tracing::warn!(%family, reason, "this family cannot be programmed; the other goes on");
            }
            Box::new(Unusable { family, reason })
        }
    }))
}

/// Result of reading the data path back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verification {
    /// The data path holds exactly what was applied.
    Equal,
    /// A slice of the data path was read, and nothing is wrong so far. The next call reads the next one.
    Unfinished,
    /// The data path holds what was applied, but a fact of this machine has changed since, so that this is no
    /// longer right. The text names the fact, human-readable. A complete change is due.
    Outdated(String),
    /// Another program had changed the data path, and the backend has repaired it. The text, human-readable,
    /// names the difference and, if the kernel reported it, the program.
    Repaired(String),
    /// Another program changed the data path; the text names the difference, human-readable. The backend has
    /// recorded the actual content, and a complete change repairs it.
    Drifted(String),
}

impl Verification {
    /// Reads slices up to the last one.
    ///
    /// # Errors
    /// The error of the first slice that fails.
    pub fn of_all<E>(mut slice: impl FnMut() -> Result<Self, E>) -> Result<Self, E> {
        loop {
            match slice()? {
                Self::Unfinished => {}
                last => return Ok(last),
            }
        }
    }
}

/// An opened backend: the data paths of both families, which do not wait for each other.
pub struct Backend {
    /// The facts that hold for this backend on every machine.
    pub description: &'static Description,
    /// The data paths, IPv4 first.
    pub sides: [Box<dyn Side>; 2],
    /// The kernel's reports of changes by other programs. `None` for backends without such reports; these
    /// have a [`Side::probe_interval`].
    pub notifications: Option<Box<dyn Notifications>>,
    /// What the backend has in the data path, if it has objects that could be taken for kube-proxy's
    /// leftovers (I4).
    pub serving: Option<Serving>,
    /// Whether Pods are known by their interfaces (A16).
    pub knows_pods: bool,
    /// The clients for which policy Local counts.
    pub local_rule: LocalRule,
    /// The userspace proxy, which ends with the sides.
    pub proxy: ProxyHandle,
    /// The way to the tables of NetworkPolicies.
    pub policies: PolicyTables,
    /// Whether connections end that NetworkPolicies no longer allow (NP13).
    pub cuts_denied: bool,
}

impl Backend {
    /// Returns a backend whose kernel reports nothing, and which leaves nothing that could be taken for
    /// kube-proxy's.
    pub fn new(description: &'static Description, sides: [Box<dyn Side>; 2]) -> Self {
        Self {
            description,
            sides,
            notifications: None,
            serving: None,
            knows_pods: false,
            local_rule: LocalRule::default(),
            proxy: ProxyHandle::default(),
            policies: PolicyTables::refused(description.name),
            cuts_denied: false,
        }
    }

    /// Returns the data path of a family.
    pub fn side(&mut self, family: Family) -> &mut dyn Side {
        &mut *self.sides[family as usize]
    }
}

/// One family's data path, which can be programmed with plans. All calls come from one thread and may block
/// it.
pub trait Side: Send {
    /// Applies a change: all of it in one transaction where the data path has transactions. The first change
    /// is a complete one. It adopts kplane's objects that the data path already holds, instead of writing
    /// them again.
    ///
    /// # Errors
    /// [`ApplyError`]: no part of the change counts as applied.
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError>;

    /// Reads the data path back, or the next slice of it, and compares it with what was applied.
    ///
    /// # Errors
    /// [`ApplyError`] when it cannot be read.
    fn verify(&mut self) -> Result<Verification, ApplyError>;

    /// Repairs changes by other programs, as the kernel reported them, if possible without reading everything
    /// back.
    ///
    /// # Errors
    /// As [`Side::verify`].
    fn repair(&mut self) -> Result<Verification, ApplyError> {
        self.verify()
    }

    /// Returns whether the data path has Services that an earlier process wrote. Called only before the first
    /// change; may read the whole data path. Backends that cannot find out return false.
    fn has_services(&mut self) -> bool {
        false
    }

    /// Returns how often to call [`Side::verify`] even if nothing was applied. This is for backends to which
    /// the kernel does not report changes by other programs, and whose check is cheap enough.
    fn probe_interval(&self) -> Option<Duration> {
        None
    }

    /// Returns the virtual servers as of the last [`Side::verify`] or complete change, in backends that have
    /// some. Costs nothing.
    fn servers(&self) -> Option<ServerCounts> {
        None
    }

    /// Returns the virtual servers of one Service, in backends that have some. Does not ask the kernel.
    fn inspect(&self, _service: &ServiceName) -> Option<Inspection> {
        None
    }
}

/// The kernel's reports of changes by other programs.
pub trait Notifications: Send {
    /// Returns a descriptor that is readable when there are reports to read.
    fn readiness(&self) -> Option<OwnedFd>;

    /// Reads the reports. Returns, by family, whether another program changed kplane's objects, which
    /// [`Side::repair`] repairs. Costs next to nothing if none did.
    fn read(&mut self) -> [bool; 2];
}

/// The kplane backend that serves. Its objects are no leftovers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Serving {
    /// The backend.
    pub description: &'static Description,
    /// The kind of iptables in which each family's chains of kube-proxy's names are; `None` = there are none.
    pub flavours: [Option<iptables::Flavour>; 2],
}

/// All backends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// nf_tables, programmed directly over netlink.
    #[default]
    Nftables,
    /// kube-proxy's chains, written by `iptables-restore`.
    Iptables,
    /// kube-proxy's virtual servers and IP sets, and rules for them.
    Ipvs,
    /// A proxy in the agent, and nftables behind it.
    Userspace,
    /// Sockets of the agent on loopback addresses and node ports, without any right.
    UserspaceLoopback,
    /// No data path: accepts everything and does nothing, for tests and dry runs.
    Noop,
}

/// Settings that backends need when they start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bit of the packet mark that asks for masquerading, 0..=31 (C5; default 14).
    pub masquerade_bit: u8,
    /// nftables and iptables: mark of kplane's own connections, which the rules leave alone; 0 = none.
    pub own_mark: u32,
    /// Interface of the pods: packets that arrive on it count as coming from pods, in addition to the plan's
    /// pod sources.
    pub pod_interface: Option<PodInterface>,
    /// iptables: whether node ports are served on IPv4 loopback addresses too (C8).
    pub localhost_nodeports: bool,
    /// nftables: whether node ports on loopback addresses are refused and counted, unless the agent's proxy serves them
    /// (K6).
    pub refuse_loopback: bool,
    /// iptables: how a rule finds the Service of an address.
    pub iptables_layout: iptables::Layout,
    /// iptables and ipvs: time between two checks for changes by other programs; longer where a check takes long.
    pub probe_interval: Duration,
    /// Whether connections end that NetworkPolicies no longer allow (NP13).
    pub cut_denied: bool,
    /// Settings of ipvs alone.
    pub ipvs: ipvs::IpvsSettings,
    /// Settings of the userspace backend alone.
    pub userspace: UserspaceSettings,
}

impl Settings {
    /// Default of [`Settings::probe_interval`].
    pub const PROBE_INTERVAL: Duration = Duration::from_secs(2);
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            masquerade_bit: 14,
            own_mark: OWN_MARK,
            pod_interface: None,
            localhost_nodeports: true,
            refuse_loopback: true,
            iptables_layout: iptables::Layout::default(),
            probe_interval: Self::PROBE_INTERVAL,
            cut_denied: true,
            ipvs: ipvs::IpvsSettings::default(),
            userspace: UserspaceSettings::default(),
        }
    }
}

impl Kind {
    /// Reads what the kernel of the calling thread's network namespace has for a destination. Changes nothing.
    ///
    /// # Errors
    /// The reason why that cannot be known.
    pub fn look_up(self, target: PacketTarget) -> Result<KernelState, String> {
        match self {
            Self::Nftables | Self::Userspace => {
                nftables::look_up(target).map_err(|error| chain(&error))
            }
            Self::Iptables => iptables::look_up(target).map_err(|error| chain(&error)),
            Self::Ipvs => ipvs::look_up(target).map_err(|error| chain(&error)),
            Self::UserspaceLoopback | Self::Noop => Err("the agent programs no kernel".to_owned()),
        }
    }

    /// All backends.
    pub const ALL: [Self; 6] = [
        Self::Nftables,
        Self::Iptables,
        Self::Ipvs,
        Self::Userspace,
        Self::UserspaceLoopback,
        Self::Noop,
    ];

    /// Returns the backend of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.describe().name == name)
    }

    /// Returns the facts that hold for the backend on every machine.
    pub const fn describe(self) -> &'static Description {
        match self {
            Self::Nftables => &nftables::DESCRIPTION,
            Self::Iptables => &iptables::DESCRIPTION,
            Self::Ipvs => &ipvs::DESCRIPTION,
            Self::Userspace => &proxy::CAPTURE,
            Self::UserspaceLoopback => &proxy::LOOPBACK,
            Self::Noop => &noop::DESCRIPTION,
        }
    }

    /// Returns the backend as one that serves, with the kind of iptables in which each family's chains are.
    pub const fn serving(self, flavours: [Option<iptables::Flavour>; 2]) -> Serving {
        let description = self.describe();
        Serving {
            description,
            flavours,
        }
    }

    /// Returns the clients for which policy Local counts.
    fn local_rule(self, settings: &Settings) -> LocalRule {
        match self {
            Self::Ipvs if settings.ipvs.strict_local => LocalRule::Strict,
            Self::Ipvs => LocalRule::FallsBack,
            Self::Nftables
            | Self::Iptables
            | Self::Userspace
            | Self::UserspaceLoopback
            | Self::Noop => LocalRule::BySender,
        }
    }

    /// Opens a backend after a check that this machine can run it.
    ///
    /// # Errors
    /// [`OpenError`] names the missing part.
    pub fn open(self, settings: &Settings) -> Result<Backend, OpenError> {
        let backend = match self {
            Self::Nftables => nftables::open(settings)?,
            Self::Iptables => Backend {
                policies: PolicyTables::own(false),
                ..iptables::open(settings)?
            },
            Self::Ipvs => Backend {
                // IPVS sends what it leads to Pods from the node itself.
                policies: PolicyTables::own(true),
                ..ipvs::open(settings)?
            },
            Self::Userspace | Self::UserspaceLoopback => {
                userspace::open(self.describe(), settings)?
            }
            Self::Noop => {
                // Connections of an earlier backend end.
                #[cfg(feature = "userspace")]
                drop(settings.userspace.inheritance.take());
                noop::open()
            }
        };
        let backend = if self.describe().serves_in_kernel() {
            userspace::on_request(backend, settings)
        } else {
            backend
        };
        Ok(Backend {
            knows_pods: settings.pod_interface.is_some(),
            cuts_denied: settings.cut_denied && self.describe().serves_in_kernel(),
            local_rule: self.local_rule(settings),
            ..backend
        })
    }
}
