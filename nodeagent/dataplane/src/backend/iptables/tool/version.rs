//! Versions of the programs.

use std::fmt;

/// Oldest supported version, of 2018: it has `iptables-restore --wait` and `--random-fully`.
pub(super) const OLDEST: Version = Version([1, 6, 2]);

/// A version of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version([u32; 3]);

impl Version {
    /// Parses the output `iptables-restore v1.8.9 (nf_tables)`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let number = text.split_whitespace().find_map(|word| word.strip_prefix('v'))?;
        let mut version = [0; 3];
        for (to, from) in version.iter_mut().zip(number.split('.')) {
            *to = from.parse().ok()?;
        }
        Some(Self(version))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self([major, minor, patch]) = self;
        write!(f, "{major}.{minor}.{patch}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        let read = |text| Version::parse(text).map(|v| v.to_string());
        let nft = read("iptables-restore v1.8.9 (nf_tables)\n");
        assert_eq!(nft.as_deref(), Some("1.8.9"));
        assert_eq!(read("iptables-restore v1.8\n").as_deref(), Some("1.8.0"));
        assert_eq!(read("bash: not found"), None);
        assert_eq!(read("iptables-restore v1.x"), None);
        assert!(Version([1, 6, 1]) < OLDEST && Version([1, 10, 0]) > OLDEST);
    }
}
