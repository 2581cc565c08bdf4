//! Kernel settings that IPVS mode needs (D6).

use std::fs;
use std::path::Path;

use super::IpvsSettings;
use crate::kernel_setting;

/// Files below `/proc/sys/net`, each with the required content.
const ALWAYS: [(&str, &str); 4] = [
    // Packets to virtual servers get conntrack entries, so that they can be masqueraded.
    ("ipv4/vs/conntrack", "1"),
    // A connection whose real server is gone ends with its next packet.
    ("ipv4/vs/expire_nodest_conn", "1"),
    // A client's persistence to a draining real server is forgotten.
    ("ipv4/vs/expire_quiescent_template", "1"),
    ("ipv4/ip_forward", "1"),
];
const STRICT_ARP: [(&str, &str); 2] = [
    ("ipv4/conf/all/arp_ignore", "1"),
    ("ipv4/conf/all/arp_announce", "2"),
];
/// Setting about reused source ports of clients: 0 does not treat them as new connections. Older kernels need
/// 0, because a new connection makes the client wait for a second there.
const REUSE: (&str, &str) = ("ipv4/vs/conn_reuse_mode", "0");
const REUSE_FIXED: (u32, u32) = (5, 9);

/// Applies the settings that differ. Returns the failures, human-readable.
pub(super) fn apply(settings: &IpvsSettings) -> Vec<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let reuse = version(&release).is_some_and(|version| version < REUSE_FIXED);
    let strict = STRICT_ARP.iter().filter(|_| settings.strict_arp);
    ALWAYS
        .iter()
        .chain(reuse.then_some(&REUSE))
        .chain(strict)
        .filter_map(|(file, value)| ensure(file, value).err())
        .collect()
}

fn ensure(file: &str, value: &str) -> Result<(), String> {
    let root = Path::new("/");
    let path = Path::new("proc/sys/net").join(file);
    let now = fs::read_to_string(root.join(&path)).unwrap_or_default();
    if now.trim() == value {
        return Ok(());
    }
    let name = format!("net/{file}").replace('/', ".");
    kernel_setting::change(root, &path, value)
        .map_err(|error| format!("{name} cannot be set to {value}: {error}"))
}

/// Parses a release such as `6.1.0-56-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let (major, rest) = release.split_once('.')?;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((major.parse().ok()?, digits.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// D6: only kernels that need it.
    #[test]
    fn d6_kernels_are_told_by_their_version() {
        assert_eq!(version("6.1.0-56-amd64\n"), Some((6, 1)));
        assert!(version("5.8.18").is_some_and(|v| v < REUSE_FIXED));
        assert!(version("5.10").is_some_and(|v| v > REUSE_FIXED));
        assert_eq!(version("linux"), None);
    }
}
