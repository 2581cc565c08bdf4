//! The userspace backend: sockets of this process instead of rules of the kernel (`userspace.md`).
//!
//! `kplane-userproxy` has the sockets and moves the data. This module turns plans into its ServicePorts (`spec.rs`), and
//! decides where clients arrive. On the way that needs no right (`loopback.rs`), each Service has an address of its own in
//! 127.64.0.0/10 (`addresses.rs`), which a file in the format of `/etc/hosts` lists (`hosts.rs`), and node ports are
//! sockets. On the other way (`captured.rs`, `way.rs`), rules of the kernel lead to the proxy: a table of nf_tables that works
//! while the proxy renews a lease (`capture.rs`, `lease.rs`).

mod address_watch;
mod addresses;
mod capture;
mod captured;
mod handle;
mod hosts;
mod lease;
mod loopback;
mod own;
mod places;
mod refused;
mod remembered;
mod spec;
mod staged;
mod transparent;
mod way;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use self::handle::{Lapse, ProxyHandle};
pub use kplane_userproxy::{
    Bundle, Counts, Door, EndpointState, Failure as ProxyFailure, HandoverError, Inheritance,
    PortState, Proxy, Visitor, ask,
};

use super::{Backend, Description, Failures, ModeMetrics, OpenError};
use kplane_model::ProxyEndpoints;

/// The facts that hold for the way without rights on every machine.
pub(super) const LOOPBACK: Description = Description {
    name: "userspace-loopback",
    summary: "Sockets on loopback addresses and node ports, without any right: for laptops, CI and sandboxes",
    deprecation: None,
    programs_kernel: false,
    shares_names: false,
    has_virtual_servers: false,
    is_proxy: true,
    needs: &[],
    leaves_conntrack_entries: false,
    metrics: ModeMetrics {
        full_and_partial: true,
        failures: Failures::Nftables,
        rules: false,
    },
};

/// The facts that hold for the way with the right to change rules on every machine.
pub(super) const CAPTURE: Description = Description {
    name: "userspace",
    summary: "A proxy in the agent that tries another endpoint when one does not answer, with nftables behind it",
    programs_kernel: true,
    leaves_conntrack_entries: true,
    ..LOOPBACK
};

/// Settings of this backend alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserspaceSettings {
    /// The file that lists the addresses of Services, in the format of `/etc/hosts`.
    pub hosts_file: Option<PathBuf>,
    /// Number of threads; `None` = one for each processor.
    pub threads: Option<usize>,
    /// Time without a datagram after which a UDP flow ends; `None` = the default.
    pub udp_idle: Option<Duration>,
    /// Whether endpoints on this node see the client's address.
    pub transparent: bool,
    /// The endpoints to which the proxy may connect in front of a backend of the kernel.
    pub endpoints: ProxyEndpoints,
    /// The folder of the socket at which the next agent asks for connections; `None` = none is handed over.
    pub run_dir: Option<PathBuf>,
    /// Longest time for which an agent that is stopped goes on with its connections; 0 = it ends at once.
    pub drain: Duration,
    /// What the proxy before had open, for the next one.
    pub inheritance: Inheritance,
}

/// Starts the proxy of a backend. `extra` has the settings that belong to its way in.
fn start(
    description: &'static Description,
    settings: &UserspaceSettings,
    extra: kplane_userproxy::Settings,
) -> Result<Arc<Proxy>, OpenError> {
    let proxy = Proxy::start(kplane_userproxy::Settings {
        threads: settings.threads,
        udp_idle: settings.udp_idle,
        inherited: settings.inheritance.take(),
        ..extra
    });
    proxy.map(Arc::new).map_err(|error| OpenError {
        backend: description.name,
        reason: error.to_string(),
    })
}

/// Opens the way that needs no right.
///
/// # Errors
/// [`OpenError`] when the kernel refuses threads or what these need.
pub(super) fn open_loopback(settings: &super::Settings) -> Result<Backend, OpenError> {
    loopback::open(&settings.userspace)
}

/// Opens the way with the right to change rules.
///
/// # Errors
/// [`OpenError`] names the missing part.
pub(super) fn open_captured(settings: &super::Settings) -> Result<Backend, OpenError> {
    captured::open(settings)
}

/// Puts the proxy in front of a backend of the kernel, for the Services that ask for it.
pub(super) fn on_request(backend: Backend, settings: &super::Settings) -> Backend {
    captured::on_request(backend, settings)
}
