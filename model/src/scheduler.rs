//! Schedulers of IPVS.

use std::fmt;

/// The name of one of the kernel's IPVS schedulers, which spread connections over a virtual
/// server's real servers (D7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IpvsScheduler(&'static str);

impl IpvsScheduler {
    /// Schedulers of the kernel. Their modules are called `ip_vs_` plus the name.
    const ALL: [&str; 14] = [
        "rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh", "fo", "ovf",
        "twos",
    ];

    /// Round robin.
    pub const ROUND_ROBIN: Self = Self("rr");

    /// Returns the scheduler with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| *known == name).map(Self)
    }

    /// Returns the scheduler's name.
    pub fn as_str(self) -> &'static str {
        self.0
    }

    /// Returns all names, human-readable.
    pub fn names() -> String {
        Self::ALL.join(", ")
    }
}

impl fmt::Display for IpvsScheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}
