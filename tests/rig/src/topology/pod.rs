//! Pods: namespaces behind a node, with echo servers.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;

use crate::client::Protocol;
use crate::echo::{Pool, Server};
use crate::netns::NetNs;

/// A pod with its own namespace, or in its node's (`hostNetwork`).
#[derive(Debug)]
pub struct Pod {
    pub(super) name: String,
    pub(super) node: String,
    pub(super) ns: NetNs,
    pub(super) ips: Vec<IpAddr>,
    /// The node's end of its link; `None` with `hostNetwork`.
    pub(super) link: Option<String>,
    pub(super) echo: Arc<Pool>,
    pub(super) servers: BTreeMap<(Protocol, u16), Vec<Server>>,
}

impl Pod {
    /// Returns the pod's name, which its servers send.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name of its node.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Returns the pod's namespace, for probes and captures.
    pub fn ns(&self) -> &NetNs {
        &self.ns
    }

    /// Returns the pod's addresses.
    pub fn ips(&self) -> &[IpAddr] {
        &self.ips
    }

    /// Returns the node's end of its link, such as `pod7`; `None` with `hostNetwork`.
    pub fn link(&self) -> Option<&str> {
        self.link.as_deref()
    }

    /// Returns the pod's first address of a family, with a port.
    ///
    /// # Errors
    /// The pod has no such address.
    pub fn address(&self, family: Family, port: u16) -> Result<SocketAddr> {
        let mut ips = self.ips.iter().copied();
        let ip = ips
            .find(|ip| Family::of(*ip) == family)
            .with_context(|| format!("{} has no {family:?} address", self.name))?;
        Ok(SocketAddr::new(ip, port))
    }

    /// Listens on a port of each of its addresses until stopped.
    ///
    /// # Errors
    /// The port is in use.
    pub fn serve(&mut self, protocol: Protocol, port: u16) -> Result<()> {
        let servers = self
            .ips
            .iter()
            .map(|ip| SocketAddr::new(*ip, port))
            .map(|address| self.echo.serve(&self.ns, &self.name, protocol, address))
            .collect::<Result<_>>()?;
        self.servers.insert((protocol, port), servers);
        Ok(())
    }

    /// Stops listening on a port. New connections are refused, and open ones live on for up to
    /// `grace`. Returns when the last is closed. Zero closes them at once.
    ///
    /// # Errors
    /// The pod does not listen there.
    pub fn stop(&mut self, protocol: Protocol, port: u16, grace: Duration) -> Result<()> {
        let servers = self.servers.remove(&(protocol, port)).unwrap_or_default();
        ensure!(
            !servers.is_empty(),
            "{} does not serve {protocol} port {port}",
            self.name
        );
        for server in servers {
            server.stop_gracefully(grace);
        }
        Ok(())
    }
}
