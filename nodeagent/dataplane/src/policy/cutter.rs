//! Cutting connections that policies no longer allow (NP13).
//!
//! ```text
//! commit -> addresses that lost something -> thread: lists their flows -> engine: judges them -> thread: cuts
//! ```
//!
//! Listing can take long, so a thread of its own does it, and never holds up the engine. A flow of TCP is deleted: the
//! table refuses segments from the midst of a connection. All others are marked ([`CUT`]), since each datagram of the
//! other side would begin the flow anew, the other way round. A mark lasts as long as its flow, and costs no memory; the
//! table takes it back when it allows a packet of the side that began. Each change is scanned for twice: a packet that
//! was in transit during the commit may have begun its flow by the old rules just after the first scan.

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use kplane_model::{Family, Protocol};
use kplane_netlink::conntrack::AnyFlow;
use kplane_netlink::{NetlinkError, NfSocket, Request};

use super::judge::Packet;
use crate::backend::nftables::CUT;
use crate::backoff::Backoff;

/// Time from the first scan to the second.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// First and longest wait after a failed scan.
const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// Scans take a tenth of the time, if each is short.
const PRICE: u32 = 10;
const MAX_REST: Duration = Duration::from_millis(500);

/// Most flows that are handed over, or cut, at once.
const LOT: usize = 4096;

/// A connection, or what the kernel takes for one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow(AnyFlow);

impl Flow {
    /// Returns the family.
    pub fn family(&self) -> Family {
        Family::of(self.0.source)
    }

    /// Returns the flow's first packet as it was forwarded.
    pub(super) fn packet(&self) -> Packet {
        Packet {
            source: self.0.source,
            destination: self.0.destination,
            port: self.0.port,
        }
    }

    fn cut(&self) -> Request {
        match self.0.port {
            Some((Protocol::Tcp, _)) => self.0.delete(),
            _ => self.0.set_mark(CUT),
        }
    }
}

/// The function that gets flows to judge.
pub type Hand = Box<dyn Fn(Vec<Flow>) + Send>;

#[derive(Debug)]
enum Message {
    Scan(Family, HashSet<IpAddr>),
    Cut(Vec<Flow>),
}

/// A handle to the thread, which ends some time after it is dropped.
#[derive(Debug)]
pub(super) struct Cutter(Sender<Message>);

impl Cutter {
    /// Starts the thread in the calling thread's network namespace.
    pub(super) fn start(hand: Hand) -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        let run = move || run(&receiver, &hand);
        std::thread::Builder::new().name("cutter".to_owned()).spawn(run)?;
        Ok(Self(sender))
    }

    /// Has the flows of these addresses judged.
    pub(super) fn scan(&self, family: Family, addresses: HashSet<IpAddr>) {
        if !addresses.is_empty() {
            // The thread only ends after this handle.
            let _ = self.0.send(Message::Scan(family, addresses));
        }
    }

    /// Has flows cut.
    pub(super) fn cut(&self, flows: Vec<Flow>) {
        if !flows.is_empty() {
            let _ = self.0.send(Message::Cut(flows));
        }
    }
}

/// The addresses whose flows are to be listed.
#[derive(Debug, Default)]
struct Waiting {
    fresh: HashSet<IpAddr>,
    /// Those of second scans, each with its time, the next one first.
    second: VecDeque<(Instant, HashSet<IpAddr>)>,
}

impl Waiting {
    fn due(&self, now: Instant) -> Option<Instant> {
        if self.fresh.is_empty() {
            self.second.front().map(|(at, _)| *at)
        } else {
            Some(now)
        }
    }

    /// Returns all addresses that are due. They stay until [`Waiting::scanned`].
    fn addresses(&self, now: Instant) -> HashSet<IpAddr> {
        let second = self
            .second
            .iter()
            .take_while(|(at, _)| *at <= now)
            .flat_map(|(_, addresses)| addresses);
        self.fresh.iter().chain(second).copied().collect()
    }

    /// Records that the addresses of a time were scanned.
    fn scanned(&mut self, due: Instant, now: Instant) {
        while self.second.pop_front_if(|(at, _)| *at <= due).is_some() {}
        let fresh = std::mem::take(&mut self.fresh);
        if !fresh.is_empty() {
            self.second.push_back((now + SECOND_LOOK, fresh));
        }
    }
}

fn run(receiver: &Receiver<Message>, hand: &Hand) {
    let mut waiting: [Waiting; 2] = Default::default();
    let (mut socket, mut backoffs) = (None, [RETRY; 2]);
    let mut rest_until = Instant::now();
    loop {
        let now = Instant::now();
        let due = waiting.iter().filter_map(|waiting| waiting.due(now)).min();
        let message = match due.map(|due| due.max(rest_until)) {
            None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(due) => receiver.recv_timeout(due.saturating_duration_since(now)),
        };
        match message {
            Ok(Message::Scan(family, addresses)) => {
                waiting[family as usize].fresh.extend(addresses);
                continue;
            }
            Ok(Message::Cut(flows)) => {
                if let Err(error) = cut(&mut socket, &flows) {
                    tracing::warn!(%error, "cannot cut connections that policies deny; they are searched again");
                    socket = None;
                    let family = flows.first().map_or(Family::V4, Flow::family);
                    for flow in flows {
                        let Packet {
                            source,
                            destination,
                            ..
                        } = flow.packet();
                        let fresh = &mut waiting[flow.family() as usize].fresh;
                        fresh.extend([source, destination]);
                    }
                    let wait = backoffs[family as usize].half_jitter();
                    rest_until = rest_until.max(Instant::now() + wait);
                }
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {}
        }
        for family in Family::ALL {
            let waiting = &mut waiting[family as usize];
            let backoff = &mut backoffs[family as usize];
            match scan(&mut socket, family, waiting, hand) {
                Ok(None) => {}
                Ok(Some(took)) => {
                    let rest = (took * PRICE).min(MAX_REST);
                    rest_until = rest_until.max(Instant::now() + rest);
                    backoff.reset();
                }
                Err(error) => {
                    socket = None;
                    let wait = backoff.half_jitter();
                    rest_until = rest_until.max(Instant::now() + wait);
                    tracing::warn!(
                        %family, %error, ?wait,
                        "cannot list connections, so that those live on which policies deny; trying again"
                    );
                }
            }
        }
    }
}

/// Lists the flows of what is due. Returns how long that took; `None` = nothing is due.
fn scan(
    socket: &mut Option<NfSocket>,
    family: Family,
    waiting: &mut Waiting,
    hand: &Hand,
) -> Result<Option<Duration>, NetlinkError> {
    let now = Instant::now();
    if waiting.due(now).is_none_or(|due| due > now) {
        return Ok(None);
    }
    list(socket, family, &waiting.addresses(now), hand)?;
    waiting.scanned(now, Instant::now());
    Ok(Some(now.elapsed()))
}

fn open(socket: &mut Option<NfSocket>) -> Result<&mut NfSocket, NetlinkError> {
    Ok(match socket {
        Some(socket) => socket,
        closed => closed.insert(NfSocket::open()?),
    })
}

fn list(
    socket: &mut Option<NfSocket>,
    family: Family,
    addresses: &HashSet<IpAddr>,
    hand: &Hand,
) -> Result<(), NetlinkError> {
    let mut lot = Vec::new();
    open(socket)?.dump_each(AnyFlow::list(family), |message| {
        let Some(flow) = AnyFlow::parse(message).map(Flow) else {
            return;
        };
        let packet = flow.packet();
        let is_theirs =
            addresses.contains(&packet.source) || addresses.contains(&packet.destination);
        if is_theirs && flow.0.mark != CUT {
            lot.push(flow);
            if lot.len() == LOT {
                hand(std::mem::take(&mut lot));
            }
        }
    })?;
    if !lot.is_empty() {
        hand(lot);
    }
    Ok(())
}

fn cut(socket: &mut Option<NfSocket>, flows: &[Flow]) -> Result<(), NetlinkError> {
    let socket = open(socket)?;
    let mut count = 0;
    for lot in flows.chunks(LOT) {
        let requests: Vec<_> = lot.iter().map(Flow::cut).collect();
        count += lot.len() - socket.request_all(&requests)?;
    }
    tracing::info!(count, "cut connections that policies deny");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changes that never stop do not put a second scan off.
    #[test]
    fn every_address_is_scanned_again() {
        let start = Instant::now();
        let mut waiting = Waiting::default();
        let mut seen = Vec::new();
        for half in 0..6_u8 {
            let now = start + SECOND_LOOK / 2 * u32::from(half);
            waiting.fresh.insert([10, 0, 0, half].into());
            assert_eq!(waiting.due(now), Some(now));
            let addresses = waiting.addresses(now);
            seen.push(addresses.contains(&IpAddr::from([10, 0, 0, 0])));
            waiting.scanned(now, now);
        }
        assert_eq!(seen, [true, false, true, false, false, false]);
        assert_eq!(waiting.second.len(), 2);
        // A scan that failed changes nothing.
        let at = waiting.due(start).unwrap();
        assert_eq!(waiting.addresses(at), waiting.addresses(at));
    }
}
