//! Kernel settings below `/proc/sys`; those of `net` belong to the calling thread's namespace.

use std::fs;
use std::io::ErrorKind;

use anyhow::{Context as _, Result};

/// Settings of every namespace: addresses usable at once, no redirects, no filter on asymmetric
/// paths, no limit on ICMP errors (tests count them), many local ports.
pub const BASE: &[(&str, &str)] = &[
    ("net.ipv6.conf.default.accept_dad", "0"),
    ("net.ipv6.conf.default.accept_ra", "0"),
    ("net.ipv6.conf.default.router_solicitations", "0"),
    ("net.ipv4.conf.all.rp_filter", "0"),
    ("net.ipv4.conf.default.rp_filter", "0"),
    ("net.ipv4.conf.all.send_redirects", "0"),
    ("net.ipv4.conf.default.send_redirects", "0"),
    ("net.ipv4.icmp_ratelimit", "0"),
    ("net.ipv4.icmp_msgs_per_sec", "1000000"),
    // The default is 50 within 20 ms, IPv6 included.
    ("net.ipv4.icmp_msgs_burst", "1000000"),
    ("net.ipv6.icmp.ratelimit", "0"),
    ("net.ipv4.ip_local_port_range", "1024 65535"),
    // Ports of kplane's programs: no client may have one of them when a program starts.
    ("net.ipv4.ip_local_reserved_ports", "7465-7665,10249,10256"),
];

/// Settings of nodes, which forward packets.
pub const FORWARDING: &[(&str, &str)] = &[
    ("net.ipv4.ip_forward", "1"),
    ("net.ipv6.conf.all.forwarding", "1"),
    // The kernel sets these again when forwarding is switched on.
    ("net.ipv4.conf.all.send_redirects", "0"),
    ("net.ipv4.conf.default.send_redirects", "0"),
];

/// Writes settings in order, for the calling thread's namespace. A setting that this kernel lacks
/// or keeps read-only is skipped; read it with [`get`].
///
/// # Errors
/// A value that the kernel refuses.
pub fn set_all(settings: &[(&str, &str)]) -> Result<()> {
    for (name, value) in settings {
        match fs::write(path(name), value) {
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::NotFound
                        | ErrorKind::PermissionDenied
                        | ErrorKind::ReadOnlyFilesystem
                ) => {}
            written => written.with_context(|| format!("set {name}={value}"))?,
        }
    }
    Ok(())
}

/// Reads a setting of the calling thread's namespace, without the end of the line.
///
/// # Errors
/// The setting does not exist or cannot be read.
pub fn get(name: &str) -> Result<String> {
    let text = fs::read_to_string(path(name)).with_context(|| format!("read {name}"))?;
    Ok(text.trim_end().to_owned())
}

fn path(name: &str) -> String {
    format!("/proc/sys/{}", name.replace('.', "/"))
}
