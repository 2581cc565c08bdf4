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
mod frontends;
mod hosts;
mod lease;
mod localhost;
mod loopback;
mod own;
mod refused;
mod spec;
mod staged;
mod transparent;
mod way;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

pub use kplane_userproxy::{Bundle, HandoverError, HandoverListener, Proxy, Successor, ask};

use super::proxy::{self, CAPTURE, LOOPBACK, ProxyHandle, UserspaceSettings};
use super::{Backend, Description, OpenError};
use kplane_model::{EndpointAddr, ProxyCounts, ProxyPort, ServiceKey};

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
    proxy
        .map(Arc::new)
        .map_err(|error| OpenError::new(description.name, error.to_string()))
}

/// Opens the way with the right to change rules, or the one that needs none.
///
/// # Errors
/// [`OpenError`] names the missing part.
pub(super) fn open(
    description: &Description,
    settings: &super::Settings,
) -> Result<Backend, OpenError> {
    if description.programs_kernel {
        captured::open(settings)
    } else {
        loopback::open(&settings.userspace)
    }
}

/// Puts the proxy in front of a backend of the kernel, for the Services that ask for it.
pub(super) fn on_request(backend: Backend, settings: &super::Settings) -> Backend {
    captured::on_request(backend, settings)
}

impl proxy::Proxy for Proxy {
    fn open(&self) -> [usize; 2] {
        self.open()
    }

    fn is_alive(&self, within: Duration) -> bool {
        self.is_alive(within)
    }

    fn totals(&self) -> (ProxyCounts, usize) {
        self.table().totals()
    }

    fn listed(&self, most: usize) -> Vec<(ServiceKey, ProxyCounts)> {
        self.table().listed(most)
    }

    fn limited(&self) -> Vec<(ServiceKey, u64)> {
        self.table().limited()
    }

    fn avoided(&self, most: usize) -> Vec<(ServiceKey, EndpointAddr)> {
        self.table().avoided(most)
    }

    fn state(&self, key: &ServiceKey) -> Option<ProxyPort> {
        self.table().state(key)
    }

    fn show(&self, keys: Vec<ServiceKey>, within: Duration, each: proxy::Show) -> bool {
        self.show(keys, within, each)
    }

    fn remembered(&self, key: &ServiceKey) -> Vec<(IpAddr, EndpointAddr, Duration)> {
        self.table().remembered(key)
    }
}
