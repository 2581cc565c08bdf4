//! What the first packet of a connection costs on the node, over one to a pod from where no rules are.
//!
//! The time that connect(2) takes to send a SYN, from a pod's address (so nothing is masqueraded), until
//! it is where the pods are. Targets alternate, so that a busy machine is busy for all of them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kplane_tests::netns::NetNs;

use super::percentile;
use crate::against::packets::{connect, new_socket};
use crate::objects::{Each, address};

/// The pod from which packets come.
pub(crate) const POD: Ipv4Addr = Ipv4Addr::new(10, 255, 255, 1);
/// Services that are asked, all over the list.
const SERVICES: u32 = 250;
/// Connections to each.
const CONNECTIONS: u32 = 21;
/// Most Services that are asked in turn, each once: nothing of them is in a cache of the processor.
const IN_TURN: u32 = 10_000;

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstPacket {
    /// To a pod's own address, from a node without rules, median.
    pub(crate) direct: Duration,
    /// To a Service, median of all.
    pub(crate) service: Duration,
    /// To the Service that takes longest, median.
    pub(crate) slowest: Duration,
    /// To Services that were not asked just before, median.
    pub(crate) in_turn: Duration,
}

impl FirstPacket {
    /// How much longer a Service takes than a pod without rules: the median of Services, the slowest, and the median where
    /// all are asked in turn.
    pub(crate) fn more(&self) -> [Duration; 3] {
        [self.service, self.slowest, self.in_turn].map(|time| time.saturating_sub(self.direct))
    }

    pub(crate) fn measure(node: &NetNs, bare: &NetNs, services: u32, each: Each) -> Result<Self> {
        let asked: Vec<u32> = (0..SERVICES).map(|n| n.wrapping_mul(7_919) % services).collect();
        let mut direct = Vec::new();
        let mut times: Vec<Vec<Duration>> = vec![Vec::new(); asked.len()];
        for _ in 0..CONNECTIONS {
            let inside = bare.enter()?;
            for service in &asked {
                let pod: IpAddr = each.first(*service).into();
                direct.push(time(SocketAddr::new(pod, 8080))?);
            }
            drop(inside);
            let _inside = node.enter()?;
            for (service, times) in asked.iter().zip(&mut times) {
                times.push(time(address(*service))?);
            }
        }
        direct.sort();
        let mut medians: Vec<Duration> = times
            .iter_mut()
            .map(|times| {
                times.sort();
                percentile(times, 50)
            })
            .collect();
        medians.sort();
        Ok(Self {
            direct: percentile(&direct, 50),
            service: percentile(&medians, 50),
            slowest: medians.last().copied().context("no Services")?,
            in_turn: in_turn(node, services)?,
        })
    }
}

/// Returns the median of connections to all Services, one after the other.
fn in_turn(node: &NetNs, services: u32) -> Result<Duration> {
    let _inside = node.enter()?;
    let all = 0..services.min(IN_TURN);
    let mut times = all.map(|service| time(address(service))).collect::<Result<Vec<_>>>()?;
    times.sort();
    Ok(percentile(&times, 50))
}

fn time(to: SocketAddr) -> Result<Duration> {
    let socket = new_socket(Some(POD))?;
    let started = Instant::now();
    connect(&socket, to);
    Ok(started.elapsed())
}
