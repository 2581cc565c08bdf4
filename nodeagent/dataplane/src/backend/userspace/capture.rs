//! The rules that lead clients to the proxy: a table of nf_tables, or a chain of iptables.

use std::io;
use std::net::UdpSocket;
use std::time::Duration;

use kplane_model::{Cidr, Family};
use nix::sys::socket::{setsockopt, sockopt::Mark};

use super::super::nftables::{self, CaptureSettings, CaptureTable, Place};
use super::super::{Backend, OpenError, Settings, iptables};
use super::CAPTURE;
use super::lease::{Alive, Lease};
use super::leased::LeasedChain;
use crate::chain;

/// The kinds of rules that may lead clients to the proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptureBy {
    /// nf_tables; iptables if the kernel has no nf_tables, or does not let this process use it.
    #[default]
    Auto,
    /// nf_tables only.
    Nftables,
    /// iptables only.
    Iptables,
}

impl CaptureBy {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Nftables, Self::Iptables];

    /// Returns the name in flags.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
        }
    }

    /// Returns the value of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|by| by.name() == name)
    }

    /// Returns the kinds that work in front of a backend. Both kinds of table nat come at the same time as table kplane, so
    /// iptables cannot be in front of nftables.
    ///
    /// # Errors
    /// The kind that was asked for is not one of them.
    fn before(self, backend: &str) -> Result<Self, String> {
        match self {
            Self::Iptables if backend == nftables::DESCRIPTION.name => Err(format!(
                "--userspace-capture iptables cannot come before mode {backend}: set it to auto or nftables"
            )),
            Self::Auto if backend == nftables::DESCRIPTION.name => Ok(Self::Nftables),
            other => Ok(other),
        }
    }
}

/// Without a mark of its own, the proxy's connection to a Service's address would come back to the proxy: anyone who may
/// write EndpointSlices could make it connect to itself without end.
fn needs_mark(own_mark: u32) -> Result<(), String> {
    match own_mark {
        0 => Err(
            "the userspace proxy needs a mark of its own connections: set --own-mark to another number than 0"
                .to_owned(),
        ),
        _ => Ok(()),
    }
}

/// Opens the backend behind the proxy: nftables, or iptables if the kernel has no nf_tables.
pub(super) fn behind(settings: &Settings) -> Result<Backend, OpenError> {
    let by = settings.userspace.capture;
    let by_nftables = match by {
        CaptureBy::Auto | CaptureBy::Nftables => nftables::open(settings),
        CaptureBy::Iptables => return iptables::open(settings),
    };
    match (by_nftables, by) {
        (Err(error), CaptureBy::Auto) => {
            tracing::info!(%error, "iptables is behind the userspace proxy");
            iptables::open(settings).map_err(|further| OpenError {
                backend: CAPTURE.name,
                reason: format!("{error}; {further}"),
            })
        }
        (opened, _) => opened,
    }
}

/// The rules of one family, which end with this object.
#[derive(Debug)]
pub(super) enum Capture {
    Nftables(
        CaptureTable,
        #[expect(dead_code, reason = "it holds until it is dropped")] Lease,
    ),
    Iptables(Box<LeasedChain>),
}

impl Capture {
    /// Creates the rules in front of a backend.
    ///
    /// # Errors
    /// The missing part, human-readable.
    pub(super) fn open(
        family: Family,
        settings: CaptureSettings,
        by: CaptureBy,
        backend: &str,
        alive: &Alive,
    ) -> Result<Self, String> {
        needs_mark(settings.own_mark)?;
        let by = by.before(backend)?;
        let leased = || {
            let chain = LeasedChain::create(family, settings, alive.clone());
            chain.map(|chain| Self::Iptables(chain.into()))
        };
        if by == CaptureBy::Iptables {
            return leased();
        }
        match CaptureTable::create(family, settings) {
            Ok(table) => {
                let renew = datagrams(settings)?;
                let lease = Lease::start(family, alive.clone(), renew)?;
                Ok(Self::Nftables(table, lease))
            }
            Err(error) if by == CaptureBy::Auto && error.is_missing() => {
                leased().map_err(|reason| {
                    format!(
                        "neither by nf_tables: {}; nor by iptables: {reason}",
                        chain(&error)
                    )
                })
            }
            Err(error) => Err(chain(&error)),
        }
    }

    /// Returns the name of the kind.
    pub(super) fn kind(&self) -> &str {
        match self {
            Self::Nftables(..) => "nf_tables",
            Self::Iptables(leased) => leased.program(),
        }
    }

    /// Returns whether nf_tables leads to the proxy.
    pub(super) fn is_nftables(&self) -> bool {
        matches!(self, Self::Nftables(..))
    }

    /// Deletes places, and adds others, which are not there yet.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(super) fn change(&mut self, delete: &[Place], add: &[Place]) -> Result<(), String> {
        match self {
            Self::Nftables(table, _) => table.change(delete, add).map_err(|error| chain(&error)),
            Self::Iptables(leased) => leased.change(delete, add),
        }
    }

    /// Deletes all places, so that the kernel serves them.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(super) fn clear(&mut self) -> Result<(), String> {
        match self {
            Self::Nftables(table, _) => table.clear().map_err(|error| chain(&error)),
            Self::Iptables(leased) => leased.clear(),
        }
    }

    /// Replaces the addresses with node ports.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(super) fn set_nodes(&mut self, ranges: &[Cidr]) -> Result<(), String> {
        match self {
            Self::Nftables(table, _) => table.set_nodes(ranges).map_err(|error| chain(&error)),
            Self::Iptables(leased) => leased.set_nodes(ranges),
        }
    }

    /// Comes before the rules of the backend, which may just have been written.
    ///
    /// # Errors
    /// The programs' failure.
    pub(super) fn come_first(&mut self) -> Result<(), String> {
        match self {
            // Its priority does that.
            Self::Nftables(..) => Ok(()),
            Self::Iptables(leased) => leased.repair_chain().map(drop),
        }
    }

    /// Repairs what another program changed, and returns what that was.
    ///
    /// # Errors
    /// The rules cannot be read or repaired.
    pub(super) fn repair(&mut self) -> Result<Option<String>, String> {
        match self {
            // No other program may change a table that has an owner.
            Self::Nftables(..) => Ok(None),
            Self::Iptables(leased) => leased.repair(),
        }
    }

    /// Returns how often to call [`Self::repair`], if the least time between two calls is `interval`.
    pub(super) fn probe_interval(&self, interval: Duration) -> Option<Duration> {
        match self {
            Self::Nftables(..) => None,
            Self::Iptables(leased) => Some(leased.interval(interval)),
        }
    }
}

/// Returns what renews the lease of a table of nf_tables: a datagram to the proxy's address, which a rule of the table sees as
/// it leaves this process. It takes no transaction.
fn datagrams(settings: CaptureSettings) -> Result<impl FnMut() -> Result<(), String>, String> {
    let ip = settings.socket.ip();
    let failed = move |error: io::Error| format!("cannot send datagrams to {ip}: {error}");
    let socket = UdpSocket::bind((ip, 0)).map_err(failed)?;
    let to = socket.local_addr().map_err(failed)?;
    setsockopt(&socket, Mark, &settings.own_mark).map_err(|errno| failed(errno.into()))?;
    socket.connect(to).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    Ok(move || {
        // What came back is not needed.
        while socket.recv(&mut [0; 1]).is_ok() {}
        match socket.send(&[0]) {
            // Another program's rule drops it, but behind that of the table.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            sent => sent.map(drop).map_err(failed),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_mark_the_proxy_would_meet_its_own_connections() {
        assert!(needs_mark(0).is_err_and(|reason| reason.contains("--own-mark")));
        assert_eq!(needs_mark(0x50), Ok(()));
    }

    #[test]
    fn u51_iptables_never_comes_before_mode_nftables() {
        use CaptureBy::{Auto, Iptables, Nftables};
        for by in CaptureBy::ALL {
            assert_eq!(CaptureBy::named(by.name()), Some(by));
            assert_eq!(by.before("iptables"), Ok(by));
            assert_eq!(by.before("ipvs"), Ok(by));
        }
        assert_eq!(Auto.before("nftables"), Ok(Nftables));
        assert_eq!(Nftables.before("nftables"), Ok(Nftables));
        assert!(Iptables.before("nftables").is_err());
    }
}
