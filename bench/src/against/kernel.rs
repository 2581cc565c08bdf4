//! The moment at which the kernel holds a changed endpoint: its own notifications say so, whoever wrote the rules.
//!
//! nf_tables tells the group `NFNLGRP_NFTABLES` of every rule and element of a transaction after it
//! has been committed. An endpoint's address is in there as four bytes, as a rule's constant
//! (kube-proxy, also by way of iptables-nft) or as part of an element (kplane). Nothing is asked of
//! the kernel, so nobody is disturbed by the measuring beyond the making of the notifications.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use kplane_tests::netns::NetNs;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, setsockopt,
    socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike as _};

use crate::objects::Programmed;

/// `1 << (NFNLGRP_NFTABLES - 1)` (linux/netfilter/nfnetlink.h).
const NFTABLES_GROUP: u32 = 1 << 6;
/// Notifications of many changes.
const RECEIVE_BUFFER_BYTES: usize = 1 << 26;
/// How soon the thread sees that it is to end.
const PATIENCE_MS: i64 = 100;
/// Longest message.
const MESSAGE_BYTES: usize = 256 << 10;
/// All endpoints are in 10.128.0.0/13, and nothing else is.
const FIRST: u8 = 10;
const SECOND: std::ops::RangeInclusive<u8> = 128..=135;

/// Follows what is committed in a namespace.
pub(crate) struct Kernel {
    seen: Arc<Seen>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Seen {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// When each endpoint was named first.
    first: HashMap<Ipv4Addr, Instant>,
    failed: Option<Errno>,
}

impl Kernel {
    pub(crate) fn follow(ns: &NetNs) -> Result<Self> {
        let socket = ns.run(open)?;
        let seen = Arc::<Seen>::default();
        let stop = Arc::<AtomicBool>::default();
        let (theirs, until) = (Arc::clone(&seen), Arc::clone(&stop));
        let thread = std::thread::spawn(move || theirs.listen(&socket, &until));
        Ok(Self {
            seen,
            stop,
            thread: Some(thread),
        })
    }

    /// Forgets an endpoint, since other bytes of the first transaction may look like its address.
    pub(crate) fn forget(&self, endpoint: Ipv4Addr) {
        self.seen.lock().first.remove(&endpoint);
    }

    /// Waits until each of the endpoints has been committed; returns when the last one was.
    pub(crate) fn holds(&self, endpoints: &[Programmed], deadline: Duration) -> Result<Instant> {
        let started = Instant::now();
        let mut state = self.seen.lock();
        loop {
            if let Some(errno) = state.failed {
                bail!("notifications of the kernel were lost: {errno}");
            }
            if state.first.len() >= endpoints.len() {
                let times: Option<Vec<_>> =
                    endpoints.iter().map(|e| state.first.get(&e.endpoint)).collect();
                if let Some(last) = times.and_then(|times| times.into_iter().max().copied()) {
                    return Ok(last);
                }
            }
            let Some(rest) = deadline.checked_sub(started.elapsed()) else {
                let missing = endpoints.iter().find(|e| !state.first.contains_key(&e.endpoint));
                bail!(
                    "the kernel does not hold {missing:?} within {deadline:?}, but {} others",
                    state.first.len()
                );
            };
            let waited = self.seen.changed.wait_timeout(state, rest);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed.
            let _ = thread.join();
        }
    }
}

impl Seen {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self, socket: &OwnedFd, stop: &AtomicBool) {
        let mut message = vec![0; MESSAGE_BYTES];
        while !stop.load(Ordering::Relaxed) {
            match recv(socket.as_raw_fd(), &mut message, MsgFlags::empty()) {
                Ok(length) => self.note(&message[..length], Instant::now()),
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(errno) => {
                    self.lock().failed = Some(errno);
                    self.changed.notify_all();
                    return;
                }
            }
        }
    }

    fn note(&self, message: &[u8], at: Instant) {
        let mut state = self.lock();
        each_endpoint(message, |endpoint| {
            state.first.entry(endpoint).or_insert(at);
        });
        drop(state);
        self.changed.notify_all();
    }
}

/// Calls a function with what looks like the address of an endpoint.
pub(crate) fn each_endpoint(message: &[u8], mut call: impl FnMut(Ipv4Addr)) {
    for bytes in message.windows(4) {
        if let [FIRST, second, third, fourth] = *bytes
            && SECOND.contains(&second)
        {
            call(Ipv4Addr::new(FIRST, second, third, fourth));
        }
    }
}

fn open() -> Result<OwnedFd> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )
    .context("open a netfilter socket")?;
    setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER_BYTES)
        .context("enlarge its buffer")?;
    let timeouts = TimeVal::milliseconds(PATIENCE_MS);
    setsockopt(&socket, sockopt::ReceiveTimeout, &timeouts).context("set its patience")?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, NFTABLES_GROUP))
        .context("join the group of nf_tables")?;
    Ok(socket)
}
