//! How IPVS spreads connections.

use std::fmt;

/// How a virtual server of IPVS spreads connections: the name of a scheduler of the kernel's (D7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IpvsScheduler(&'static str);

impl IpvsScheduler {
    /// Those that the kernel has. The modules are called `ip_vs_` and the name.
    const ALL: [&str; 14] = [
        "rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh", "fo", "ovf",
        "twos",
    ];

    /// Round robin.
    pub const ROUND_ROBIN: Self = Self("rr");

    /// The scheduler of a name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| *known == name).map(Self)
    }

    /// Its name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.0
    }

    /// All names, for people.
    #[must_use]
    pub fn names() -> String {
        Self::ALL.join(", ")
    }
}

impl fmt::Display for IpvsScheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}
