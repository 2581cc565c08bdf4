//! The moment at which the kernel holds everything after a start, found without listening to it.
//!
//! For each element of a transaction, the kernel makes a notification if anybody listens to nf_tables: a third of
//! what a first transaction takes. So a thread only watches the generation, which grows with each transaction, and what it
//! leads to is read when it has grown.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_netlink::{AttributeWriter, Messages, NfSocket, Request};
use kplane_tests::netns::NetNs;

use crate::against::kernel::each_endpoint;
use crate::objects::Programmed;

/// Between two looks at the generation.
const LOOK: Duration = Duration::from_micros(500);
/// Between two readings, so that they leave the processor to who is measured.
const PAUSE: Duration = Duration::from_millis(20);
/// `NFNL_SUBSYS_NFTABLES << 8` (linux/netfilter/nfnetlink.h).
const SUBSYSTEM: u16 = 10 << 8;
/// `NFT_MSG_GETRULE`, `NFT_MSG_GETSET`, `NFT_MSG_GETSETELEM` (linux/netfilter/nf_tables.h).
const GET: [u16; 3] = [SUBSYSTEM | 7, SUBSYSTEM | 10, SUBSYSTEM | 13];
/// `NFTA_SET_TABLE` and `NFTA_SET_NAME`, which `NFTA_SET_ELEM_LIST_TABLE` and `_SET` equal.
const TABLE_AND_NAME: [u16; 2] = [1, 2];

/// A generation, and the moment when it was seen first.
type Seen = (u32, Instant);

/// Waits until the kernel holds each of the endpoints; returns when the last one came.
pub(crate) fn holds(node: &NetNs, wanted: &[Programmed], deadline: Duration) -> Result<Instant> {
    let (tell, seen) = mpsc::channel();
    let stop = &AtomicBool::default();
    thread::scope(|scope| {
        // If it fails, nobody tells of generations any more, which is an error below.
        scope.spawn(move || node.run(move || look(&tell, stop)));
        let held = node.run(move || read_until(wanted, &seen, deadline));
        stop.store(true, Ordering::Relaxed);
        held
    })
}

fn look(tell: &Sender<Seen>, stop: &AtomicBool) -> Result<()> {
    let mut socket = NfSocket::open()?;
    let mut last = None;
    while !stop.load(Ordering::Relaxed) {
        let now = socket.generation()?;
        if last.replace(now) != Some(now) {
            tell.send((now, Instant::now()))?;
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

fn read_until(wanted: &[Programmed], seen: &Receiver<Seen>, deadline: Duration) -> Result<Instant> {
    let mut socket = NfSocket::open()?;
    let (started, mut read) = (Instant::now(), None);
    loop {
        let before = socket.generation()?;
        if read.replace(before) != Some(before) {
            let found = endpoints(&mut socket)?;
            if wanted.iter().all(|wanted| found.contains(&wanted.endpoint)) {
                return moment(socket.generation()?, seen, deadline);
            }
        }
        ensure!(
            started.elapsed() < deadline,
            "the kernel does not hold all endpoints within {deadline:?}"
        );
        thread::sleep(PAUSE);
    }
}

/// Returns when a generation, or one after it, was seen first.
fn moment(generation: u32, seen: &Receiver<Seen>, deadline: Duration) -> Result<Instant> {
    loop {
        let next = seen.recv_timeout(deadline);
        let (now, at) = next.context("the generation of nf_tables cannot be followed")?;
        // Generations are 32 bits wide and begin anew.
        if now.wrapping_sub(generation) <= u32::MAX / 2 {
            return Ok(at);
        }
    }
}

/// Reads the addresses of all endpoints in rules and elements of all tables.
fn endpoints(socket: &mut NfSocket) -> Result<HashSet<Ipv4Addr>> {
    let [rules, sets, elements] = GET;
    let mut found = HashSet::new();
    let mut take = |bytes: &[u8]| {
        each_endpoint(bytes, |endpoint| {
            found.insert(endpoint);
        });
    };
    let everywhere = |_: &mut AttributeWriter<'_>| {};
    let (bytes, _) = socket.dump_through(Request::new("read rules", rules, 0, everywhere))?;
    take(&bytes);
    let (sets, _) = socket.dump_through(Request::new("read sets", sets, 0, everywhere))?;
    for set in Messages(&sets) {
        let names = TABLE_AND_NAME.map(|kind| set.attributes().get(kind)?.as_str());
        let [Some(table), Some(name)] = names else {
            continue;
        };
        let request = Request::new("read elements", elements, set.family(), |w| {
            w.str(TABLE_AND_NAME[0], table);
            w.str(TABLE_AND_NAME[1], name);
        });
        // A set may go meanwhile; the next reading has what took its place.
        if let Ok((bytes, _)) = socket.dump_through(request) {
            take(&bytes);
        }
    }
    Ok(found)
}
