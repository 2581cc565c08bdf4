//! The way from the kernel to the proxy: sockets at an address of this machine, and rules that lead there.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kplane_model::{Family, Protocol};
use kplane_netlink::conntrack::{Flow, Tuple, replied_by};
use kplane_netlink::{Links, Messages, NfSocket, Routes};
use kplane_userproxy::{Origins, Proxy, Role, Transparency};
use parking_lot::Mutex;

use super::super::OpenError;
use super::super::nftables::proxy_tables::CaptureSettings;
use super::capture::Capture;
use super::lease::Alive;
use super::transparent::{Transparent, deliver};
use super::{CAPTURE, ProxyHandle, UserspaceSettings, start};
use crate::proxy_address::{DELIVERY, LOOPBACK_LINK, proxy_address};

/// Attempts to find a port that is free for TCP and UDP.
const PORTS: usize = 16;

/// Longest time until the kernel delivers packets to a new address; it takes about a millisecond.
const ROUTED: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// The proxy of both families, which starts when one of them needs it.
pub(super) struct Starter {
    settings: UserspaceSettings,
    own_mark: u32,
    running: Mutex<Option<Arc<Proxy>>>,
    /// Whether answers to clients' addresses are delivered to the proxy, by family.
    delivers: Mutex<[bool; 2]>,
    pub(super) handle: ProxyHandle,
}

impl Starter {
    pub(super) fn new(settings: UserspaceSettings, own_mark: u32) -> Self {
        Self {
            settings,
            own_mark,
            running: Mutex::default(),
            delivers: Mutex::default(),
            handle: ProxyHandle::default(),
        }
    }

    /// Returns the proxy, which starts if it does not run yet.
    pub(super) fn proxy(&self) -> Result<Arc<Proxy>, OpenError> {
        let mut running = self.running.lock();
        if let Some(proxy) = &*running {
            return Ok(proxy.clone());
        }
        let transparency =
            self.transparency().map_err(|reason| OpenError::new(CAPTURE.name, reason))?;
        let extra = kplane_userproxy::Settings {
            transparency,
            mark: (self.own_mark != 0).then_some(self.own_mark),
            origins: Some(Box::new(Conntrack::default())),
            ..kplane_userproxy::Settings::default()
        };
        let proxy = start(&CAPTURE, &self.settings, extra)?;
        self.handle.set(&proxy);
        *running = Some(proxy.clone());
        Ok(proxy)
    }

    fn transparency(&self) -> Result<Option<Box<dyn Transparency>>, String> {
        if !self.settings.transparent {
            return Ok(None);
        }
        let transparent = Transparent::open(self.own_mark)?;
        let mut delivers = self.delivers.lock();
        *delivers = Family::ALL.map(|family| transparent.has(family));
        tracing::info!("endpoints on this node see the addresses of the userspace proxy's clients");
        Ok(Some(Box::new(transparent)))
    }

    /// Gives the kernel back what leads to the proxy beside tables, if another program has removed it. Returns what
    /// was gone.
    pub(super) fn restore(&self, family: Family) -> Result<Option<String>, String> {
        if ensure_address(family)? {
            return Ok(Some(format!("{} on lo was gone", proxy_address(family))));
        }
        let delivers = *self.delivers.lock();
        let is_new = delivers[family as usize] && deliver(family, self.own_mark)?;
        let gone = || format!("the rule for routing table {} was gone", DELIVERY.table);
        Ok(is_new.then(gone))
    }

    /// Starts the proxy at once if an earlier one left connections.
    pub(super) fn inherit(&self) {
        if self.settings.inheritance.is_there()
            && let Err(error) = self.proxy()
        {
            tracing::warn!(%error, "connections of the earlier agent end");
        }
    }

    /// Serves what an earlier proxy left for a family, whose ServicePorts the proxy has.
    pub(super) fn settle(&self, family: Family) {
        let running = self.running.lock();
        let proxy = running.clone();
        drop(running);
        if let Some(proxy) = proxy {
            proxy.settle(family);
        }
    }

    /// Opens the way of a family.
    pub(super) fn open(&self, family: Family) -> Result<Way, String> {
        let proxy = self.proxy().map_err(|error| error.reason)?;
        let ip = proxy_address(family);
        ensure_address(family)?;
        let socket = listen(&proxy, ip)
            .map_err(|error| format!("cannot open the proxy's sockets at {ip}: {error}"))?;
        let own_mark = self.own_mark;
        let settings = CaptureSettings { socket, own_mark };
        let capture = Capture::open(family, settings, Alive::of(&proxy, &self.handle))?;
        tracing::info!(%family, "rules can lead clients to the userspace proxy");
        Ok(Way { capture, proxy })
    }
}

/// The way of one family.
pub(super) struct Way {
    /// The rules, which end before the proxy does.
    pub(super) capture: Capture,
    pub(super) proxy: Arc<Proxy>,
}

/// Gives `lo` the address of the proxy's sockets, and waits until packets reach it; returns false if it has it already.
fn ensure_address(family: Family) -> Result<bool, String> {
    let ip = proxy_address(family);
    let failed = |error| format!("cannot add {ip} to lo, where the proxy listens: {error}");
    let mut links = Links::open().map_err(failed)?;
    let mut routes = Routes::open().map_err(failed)?;
    let is_new = links.add_of_host(LOOPBACK_LINK, ip).map_err(failed)?;
    let deadline = Instant::now() + ROUTED;
    while !routes.is_delivered(ip).map_err(failed)? {
        if Instant::now() > deadline {
            return Err(format!(
                "{ip} is on lo, but the kernel sends its packets elsewhere (see `ip route get {ip}`)"
            ));
        }
        thread::sleep(LOOK_AGAIN);
    }
    Ok(is_new)
}

/// Opens a socket for all connections and one for all datagrams, at the same port. Returns their address.
fn listen(proxy: &Proxy, ip: IpAddr) -> std::io::Result<SocketAddr> {
    let mut last = None;
    for _ in 0..PORTS {
        let (id, at) = proxy.listen(SocketAddr::new(ip, 0), Protocol::Tcp, Role::Captured)?;
        match proxy.listen(at, Protocol::Udp, Role::Captured) {
            Ok(_) => return Ok(at),
            Err(error) => last = Some(error),
        }
        proxy.close(id);
    }
    Err(last.unwrap_or_else(|| std::io::Error::other("no port is free")))
}

/// The kernel's table of connections, which knows where a client's datagram was going.
#[derive(Default)]
struct Conntrack(Mutex<Option<NfSocket>>);

impl Conntrack {
    /// Asks the kernel with one socket, which is opened again after an error.
    fn ask<T>(&self, ask: impl FnOnce(&mut NfSocket) -> Option<T>) -> Option<T> {
        let mut kept = self.0.lock();
        let mut socket = kept.take().or_else(|| NfSocket::open().ok())?;
        let answer = ask(&mut socket);
        *kept = Some(socket);
        answer
    }
}

fn flow(socket: &mut NfSocket, client: SocketAddr, local: SocketAddr) -> Option<Flow> {
    let reply = Tuple {
        source: local,
        destination: client,
    };
    let answer = socket.get(replied_by(reply)).ok()?;
    Messages(&answer).find_map(Flow::parse)
}

impl Origins for Conntrack {
    fn find(&self, client: SocketAddr, local: SocketAddr) -> Option<SocketAddr> {
        let flow = self.ask(|socket| flow(socket, client, local))?;
        Some(flow.original.destination)
    }

    fn forget(&self, client: SocketAddr, local: SocketAddr) {
        // Without an answer, the entry is gone already, or ends with the client's silence.
        self.ask(|socket| {
            let flow = flow(socket, client, local)?;
            socket.execute(flow.delete()).ok()
        });
    }
}
