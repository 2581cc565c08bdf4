//! Kernel settings of connection tracking (behaviour F6): what to set, and setting it.
//!
//! As in kube-proxy, sizes are raised and never lowered, because another program on the node may
//! need more. The other values are set as configured, since the kernel's own are often higher (TCP:
//! 5 days). Settings that this mode does not need are left alone:
//! `net.ipv4.conf.all.route_localnet` (node ports are not served on loopback, A21) and
//! `net.ipv4.ip_forward` (the network plugin's).

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kplane_dataplane::kernel_setting;

/// Most entries that are requested, whatever the number of processors (kube-proxy 1.36).
const MAX_ENTRIES: u64 = 1 << 20;
/// Number of entries in one bucket of the hash table when it is full.
const ENTRIES_PER_BUCKET: u64 = 4;

/// Directory of the settings below the root.
const NETFILTER: &str = "proc/sys/net/netfilter";
/// The file with the maximum number of entries.
const MAX: &str = "nf_conntrack_max";
/// The file with the list of processors, such as `0-3,6`.
const CORES: &str = "sys/devices/system/cpu/online";
/// The file with the number of buckets of the hash table. It belongs to the machine, not to a
/// network namespace.
const HASHSIZE: &str = "sys/module/nf_conntrack/parameters/hashsize";

/// `conntrack` of the configuration file, with kube-proxy's defaults. 0 leaves the kernel's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConntrackSettings {
    /// Entries per processor (`maxPerCore`).
    pub max_per_core: u32,
    /// Least number of entries, if `max_per_core` is not 0 (`min`).
    pub min: u32,
    /// Time after which idle TCP connections are forgotten, in whole seconds
    /// (`tcpEstablishedTimeout`).
    pub tcp_established_timeout: Duration,
    /// Time after which half-closed TCP connections are forgotten, in whole seconds
    /// (`tcpCloseWaitTimeout`).
    pub tcp_close_wait_timeout: Duration,
    /// Whether packets outside the TCP window are not marked invalid (`tcpBeLiberal`).
    pub tcp_be_liberal: bool,
    /// Time after which UDP flows without an answer are forgotten, in whole seconds (`udpTimeout`).
    pub udp_timeout: Duration,
    /// Time after which UDP flows with answers are forgotten, in whole seconds
    /// (`udpStreamTimeout`).
    pub udp_stream_timeout: Duration,
}

impl Default for ConntrackSettings {
    fn default() -> Self {
        Self {
            max_per_core: 32_768,
            min: 131_072,
            tcp_established_timeout: Duration::from_secs(24 * 60 * 60),
            tcp_close_wait_timeout: Duration::from_secs(60 * 60),
            tcp_be_liberal: false,
            udp_timeout: Duration::ZERO,
            udp_stream_timeout: Duration::ZERO,
        }
    }
}

/// A file that must hold a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The file, below the root.
    file: File,
    /// The number.
    pub value: u64,
    /// Whether a larger number is fine too.
    pub or_more: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum File {
    /// A file in [`NETFILTER`].
    Netfilter(&'static str),
    Hashsize,
}

impl File {
    fn path(self) -> PathBuf {
        match self {
            Self::Netfilter(name) => Path::new(NETFILTER).join(name),
            Self::Hashsize => HASHSIZE.into(),
        }
    }
}

impl Wanted {
    /// Returns the file, relative to the root of the file system.
    pub fn path(&self) -> PathBuf {
        self.file.path()
    }

    /// Returns whether this value is as wanted.
    fn is_met(&self, now: u64) -> bool {
        now == self.value || (self.or_more && now > self.value)
    }
}

impl ConntrackSettings {
    /// Returns the values that the kernel must hold on a machine with this number of processors, in
    /// the order in which they are written.
    pub fn wanted(&self, cores: usize) -> Vec<Wanted> {
        let max = self.max_entries(cores);
        let liberal = u64::from(self.tcp_be_liberal);
        let values = [
            (File::Netfilter(MAX), max),
            (File::Hashsize, max / ENTRIES_PER_BUCKET),
            (
                File::Netfilter("nf_conntrack_tcp_timeout_established"),
                self.tcp_established_timeout.as_secs(),
            ),
            (
                File::Netfilter("nf_conntrack_tcp_timeout_close_wait"),
                self.tcp_close_wait_timeout.as_secs(),
            ),
            (File::Netfilter("nf_conntrack_tcp_be_liberal"), liberal),
            (
                File::Netfilter("nf_conntrack_udp_timeout"),
                self.udp_timeout.as_secs(),
            ),
            (
                File::Netfilter("nf_conntrack_udp_timeout_stream"),
                self.udp_stream_timeout.as_secs(),
            ),
        ];
        values
            .into_iter()
            .filter(|(_, value)| *value != 0)
            .map(|(file, value)| Wanted {
                file,
                value,
                or_more: matches!(file, File::Hashsize | File::Netfilter(MAX)),
            })
            .collect()
    }

    /// Returns the maximum number of entries; 0 = leave the kernel's.
    fn max_entries(&self, cores: usize) -> u64 {
        if self.max_per_core == 0 {
            return 0;
        }
        let scaled = u64::from(self.max_per_core).saturating_mul(cores as u64);
        scaled.max(self.min.into()).min(MAX_ENTRIES)
    }
}

/// The reason why a setting is not as wanted. The agent works all the same.
#[derive(Debug, thiserror::Error)]
pub enum SettingError {
    /// The file could not be read.
    #[error("cannot read {}: {source} (is the kernel module nf_conntrack loaded?)", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file does not hold a number.
    #[error("{} holds {text:?}, not a number", path.display())]
    NoNumber {
        /// The file.
        path: PathBuf,
        /// The content of the file, cut.
        text: String,
    },
    /// The file could not be written.
    #[error(
        "cannot set {} from {from} to {to}: {source} ({})",
        path.display(),
        what_to_do(path, source)
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// The number that the file holds.
        from: u64,
        /// The number that the file should hold.
        to: u64,
        /// The cause.
        source: io::Error,
    },
}

fn what_to_do(path: &Path, error: &io::Error) -> &'static str {
    let hash = path.ends_with(HASHSIZE);
    match error.kind() {
        ErrorKind::ReadOnlyFilesystem if hash => "mount /sys writable, or set it on the host",
        ErrorKind::ReadOnlyFilesystem => "mount /proc/sys writable, or set it on the host",
        // The kernel allows this in the initial network namespace only.
        _ if hash => "run privileged on the host's network, or set it on the host",
        _ => "run privileged, or set it on the host, or set the conntrack option to 0",
    }
}

/// The limits that are not as wanted.
#[derive(Debug, Default)]
pub(crate) struct ComparedLimits {
    /// Those with another value, which stands beside them.
    pub(crate) differ: Vec<(Wanted, u64)>,
    /// Those that cannot be read.
    pub(crate) unread: Vec<Wanted>,
}

/// Compares the kernel's values below `root` with those wanted.
pub(crate) fn compare(root: &Path, settings: &ConntrackSettings) -> ComparedLimits {
    let mut compared = ComparedLimits::default();
    for wanted in settings.wanted(cores(root)) {
        let text = fs::read_to_string(root.join(wanted.path())).unwrap_or_default();
        match text.trim().parse() {
            Ok(now) if wanted.is_met(now) => {}
            Ok(now) => compared.differ.push((wanted, now)),
            Err(_) => compared.unread.push(wanted),
        }
    }
    compared
}

/// The result of applying the settings.
#[derive(Debug, Default)]
pub struct SysctlOutcome {
    /// The settings that were written.
    pub written: Vec<Wanted>,
    /// The settings that are not as wanted.
    pub errors: Vec<SettingError>,
}

/// Writes the settings that are not as wanted, below `root` (`/` but in tests). An error with one
/// setting does not keep the others from being set.
pub fn apply(root: &Path, settings: &ConntrackSettings, cores: usize) -> SysctlOutcome {
    let mut outcome = SysctlOutcome::default();
    for wanted in settings.wanted(cores) {
        match set(root, wanted) {
            Ok(true) => outcome.written.push(wanted),
            Ok(false) => {}
            Err(error) => outcome.errors.push(error),
        }
    }
    outcome
}

/// Applies the settings to this machine, or to the calling thread's network namespace as far as
/// they belong to it, and logs the result. Never fatal.
pub fn apply_and_log(settings: &ConntrackSettings) {
    let root = Path::new("/");
    let outcome = apply(root, settings, cores(root));
    for written in &outcome.written {
        tracing::info!(path = %written.path().display(), value = written.value, "changed a kernel \
            setting");
    }
    for error in &outcome.errors {
        tracing::warn!("{error}; continuing with the kernel's value");
    }
}

/// Returns the number of the machine's processors, whatever share of them this process may use.
pub(crate) fn cores(root: &Path) -> usize {
    let online = fs::read_to_string(root.join(CORES))
        .ok()
        .and_then(|text| count_list(text.trim()));
    online.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Returns the number of items in a list such as `0-3,6`.
fn count_list(text: &str) -> Option<usize> {
    let count = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    text.split(',').try_fold(0_usize, |sum, part| sum.checked_add(count(part)?))
}

/// Writes a value if the file holds another one; returns `false` when there was nothing to do.
fn set(root: &Path, wanted: Wanted) -> Result<bool, SettingError> {
    /// The number of characters shown: longer than any number.
    const SHOWN: usize = 40;
    let path = root.join(wanted.path());
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(source) => return Err(SettingError::Read { path, source }),
    };
    let Ok(from) = text.trim().parse::<u64>() else {
        let text = text[..text.floor_char_boundary(SHOWN)].to_owned();
        return Err(SettingError::NoNumber { path, text });
    };
    let to = wanted.value;
    if wanted.is_met(from) {
        return Ok(false);
    }
    match kernel_setting::change(root, &wanted.path(), &to.to_string()) {
        Ok(()) => Ok(true),
        Err(source) => Err(SettingError::Write {
            path,
            from,
            to,
            source,
        }),
    }
}

#[cfg(test)]
mod tests;
