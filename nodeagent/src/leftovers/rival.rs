//! Another proxy at work in the same network.

use std::fs;
use std::path::Path;

/// What kube-proxy's process is called (`/proc/PID/comm`).
const NAME: &str = "kube-proxy";

/// The process number of a kube-proxy that works in the calling thread's network namespace, as far
/// as it can be seen from this process namespace.
pub(super) fn running() -> Option<u32> {
    let here = fs::read_link("/proc/thread-self/ns/net").ok();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        let folder = Path::new("/proc").join(pid.to_string());
        let name = fs::read_to_string(folder.join("comm")).unwrap_or_default();
        // A namespace that may not be looked at is taken for this one.
        let there = || fs::read_link(folder.join("ns/net")).ok();
        name.trim_end() == NAME && there().is_none_or(|there| Some(there) == here)
    })
}
