//! When packets reach an endpoint: for x_tables, which tells nobody of a change.
//!
//! A SYN to the Service every millisecond or so, until one arrives where the pods are. Of a start only
//! some Services are asked, and then a listing of all rules must have every endpoint.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_tests::capture::Capture;
use kplane_tests::netns::NetNs;
use socket2::{Domain, Socket, Type};

use crate::objects::{Programmed, address};

/// Endpoints that packets look for at a start.
const SAMPLE: usize = 64;
/// Between two rounds of packets: it must leave the processor to who is measured.
const PAUSE: Duration = Duration::from_millis(1);
/// Between two listings.
const LISTING_PAUSE: Duration = Duration::from_millis(200);

/// Sends packets from a node.
pub(crate) struct Packets {
    node: NetNs,
    arrivals: Capture,
}

impl Packets {
    /// Sends packets from `node`; those to pods arrive in `pods`.
    pub(crate) fn from(node: &NetNs, pods: &NetNs) -> Result<Self> {
        Ok(Self {
            node: node.clone(),
            arrivals: Capture::open(pods)?,
        })
    }

    /// Waits until packets reach each of the endpoints, or of many some, and all are in rules; returns
    /// when the last one was reached.
    pub(crate) fn holds(&self, wanted: &[Programmed], deadline: Duration) -> Result<Instant> {
        let started = Instant::now();
        let step = wanted.len().div_ceil(SAMPLE).max(1);
        let mut missing: Vec<Programmed> = wanted.iter().step_by(step).copied().collect();
        let mut last = started;
        while !missing.is_empty() {
            ensure!(
                started.elapsed() < deadline,
                "no packet reaches {:?} within {deadline:?}, and {} others",
                missing[0],
                missing.len() - 1
            );
            self.ask(&missing)?;
            let reached = self.reached()?;
            if !reached.is_empty() {
                missing.retain(|wanted| !reached.contains(&wanted.endpoint));
                last = Instant::now();
            }
            thread::sleep(PAUSE);
        }
        if step > 1 {
            last = last.max(self.listed(wanted, deadline.saturating_sub(started.elapsed()))?);
        }
        Ok(last)
    }

    fn ask(&self, missing: &[Programmed]) -> Result<()> {
        let _inside = self.node.enter()?;
        for wanted in missing {
            connect(&new_socket(None)?, address(wanted.service));
        }
        Ok(())
    }

    fn reached(&self) -> Result<BTreeSet<Ipv4Addr>> {
        let packets = self.arrivals.drain()?.into_iter();
        let v4 = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(_) => None,
        };
        Ok(packets.filter_map(|packet| v4(packet.dst.ip())).collect())
    }

    /// Waits until a listing has every endpoint; returns when it was asked for, or the beginning if the
    /// first one had.
    fn listed(&self, wanted: &[Programmed], deadline: Duration) -> Result<Instant> {
        let started = Instant::now();
        let mut asked = None;
        loop {
            let mut command = Command::new("/usr/sbin/iptables-legacy-save");
            command.args(["-t", "nat"]);
            let text = self.node.output(command)?;
            let targets: BTreeSet<Ipv4Addr> = text
                .lines()
                .filter_map(|line| {
                    let (_, target) = line.split_once("--to-destination ")?;
                    target.split(':').next()?.parse().ok()
                })
                .collect();
            let missing = wanted.iter().find(|wanted| !targets.contains(&wanted.endpoint));
            let Some(missing) = missing else {
                return Ok(asked.unwrap_or(started));
            };
            ensure!(
                started.elapsed() < deadline,
                "no rule has {missing:?} within {deadline:?}"
            );
            thread::sleep(LISTING_PAUSE);
            asked = Some(Instant::now());
        }
    }
}

/// A TCP socket that waits for nothing.
pub(crate) fn new_socket(source: Option<Ipv4Addr>) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    if let Some(source) = source {
        let source = SocketAddr::new(source.into(), 0);
        socket.bind(&source.into()).context("bind")?;
    }
    Ok(socket)
}

/// Sends a SYN.
pub(crate) fn connect(socket: &Socket, to: SocketAddr) {
    // In progress, or refused by the node: what arrives is looked at elsewhere.
    let _ = socket.connect(&to.into());
}
