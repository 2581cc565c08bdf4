//! Plays packets in a world and looks what becomes of them.
//!
//! Whoever answers is asked often enough to know all who may answer. Of packets without an answer
//! captures tell whether an endpoint got them (its answer may take another way), whether the node
//! passed them on, or whether nobody saw them.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kplane_model::Protocol;
use kplane_rig::capture::{self, Capture};
use kplane_rig::netns::NetNs;
use socket2::{Domain, Socket, Type};

use super::fate::{End, Ends, Packet, Source, asked_by_node};
use super::world::{Client, Net};

/// How often and how long to ask.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Connections made to learn all endpoints.
    tries: usize,
    /// How long an answer is waited for.
    timeouts: Duration,
    /// Refusals may come after a second packet.
    late: bool,
}

impl Effort {
    /// For a backend whose refusals come at once.
    pub fn refused_at_once(self) -> Self {
        Self {
            late: false,
            ..self
        }
    }
}

/// For a first look at everything.
pub const QUICK: Effort = Effort {
    tries: 10,
    timeouts: Duration::from_millis(250),
    late: true,
};
/// Where the first look said different things: an endpoint may have stayed unseen by chance, a packet
/// been lost or late on a busy machine.
pub const THOROUGH: Effort = Effort {
    tries: 60,
    timeouts: Duration::from_millis(1_200),
    late: true,
};
/// Where even that said different things, one after another: what differs by chance does not twice.
pub const ALONE: Effort = Effort {
    tries: 60,
    timeouts: Duration::from_millis(2_500),
    late: true,
};
/// One packet of so many may be lost among answers: on a busy machine some are, while an endpoint that
/// is never reached (of four at most) loses a quarter.
const LOSS: usize = 10;
/// Packets played at the same time: most of them wait.
const THREADS: usize = 32;
/// Packets without an answer that are looked for at the same time. All of them wait for [`SECOND_TRY`].
const CHUNK: usize = 1_024;
/// Until then TCP has asked once.
const FIRST_TRY: Duration = Duration::from_millis(900);
/// Until then TCP has asked twice.
const SECOND_TRY: Duration = Duration::from_millis(1_600);
/// Most connections whose packets are only captured.
const CAPTURED_TRIES: usize = 20;

/// Where packets are played.
#[derive(Clone, Copy)]
pub struct Scene<'a> {
    pub net: &'a Net,
    /// The bridge between hosts.
    pub fabric: &'a NetNs,
}

/// Plays all packets, many times each if they are answered; their fates in the same order.
pub fn play(scene: &Scene<'_>, packets: &[Packet], effort: Effort) -> Result<Vec<Ends>> {
    let fates: Vec<Mutex<Ends>> = packets.iter().map(|_| Mutex::default()).collect();
    // SCTP is seen by captures, which must not overflow with other packets.
    for sctp in [false, true] {
        let is_ours = |p: &Packet| (p.question.protocol == Protocol::Sctp) == sctp;
        let ours: Vec<usize> = (0..packets.len()).filter(|n| is_ours(&packets[*n])).collect();
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            while let Some(n) = ours.get(next.fetch_add(1, Ordering::Relaxed)) {
                let fate = ask(scene.net, &packets[*n], effort)?;
                *fates[*n].lock().unwrap_or_else(PoisonError::into_inner) = fate;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| {
                thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
            })
        })?;
    }
    let unwrap = |fate: Mutex<Ends>| fate.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut fates: Vec<Ends> = fates.into_iter().map(unwrap).collect();
    look_for_the_silent(scene, packets, effort, &mut fates)?;
    Ok(fates)
}

/// Asks until something else than an answer comes, or often enough.
fn ask(net: &Net, packet: &Packet, effort: Effort) -> Result<Ends> {
    let mut fate = Ends::new();
    let mut tried = 0;
    let mut lost = 0;
    let question = packet.question.timeout(effort.timeouts);
    question.repeat(net, |seen| {
        tried += 1;
        let end = packet.end(seen);
        if end == End::Silent && !fate.is_empty() && lost < effort.tries / LOSS {
            lost += 1;
            return tried < effort.tries;
        }
        let go_on = matches!(end, End::Hit { .. }) && tried < effort.tries;
        fate.insert(end);
        go_on
    })?;
    Ok(fate)
}

/// Replaces silence in fates by what captures say.
fn look_for_the_silent(
    scene: &Scene<'_>,
    packets: &[Packet],
    effort: Effort,
    fates: &mut [Ends],
) -> Result<()> {
    let is_silent = |n: &usize| {
        fates[*n].contains(&End::Silent) && packets[*n].question.protocol != Protocol::Sctp
    };
    let mut silent: Vec<usize> = (0..packets.len()).filter(is_silent).collect();
    for n in &silent {
        fates[*n].remove(&End::Silent);
    }
    let captures = Captures::open(scene)?;
    let tries = effort.tries.min(CAPTURED_TRIES);
    let mut lost: BTreeMap<usize, usize> = BTreeMap::new();
    for round in 0..tries {
        if silent.is_empty() {
            break;
        }
        let mut found = Vec::new();
        for some in silent.chunks(CHUNK) {
            let some: Vec<_> = some.iter().map(|n| (*n, packets[*n])).collect();
            found.extend(captures.play(
                scene,
                &some,
                (effort.timeouts, effort.late && round == 0),
            )?);
        }
        let mut again = Vec::new();
        for (n, end) in found {
            let lost = lost.entry(n).or_default();
            let unseen = [End::Silent, End::Passed].contains(&end);
            let is_lost = unseen && !fates[n].is_empty() && *lost < tries / LOSS;
            if is_lost || matches!(end, End::Hit { .. }) {
                again.push(n);
            }
            if is_lost {
                *lost += 1;
            } else {
                fates[n].insert(end);
            }
        }
        silent = again;
    }
    Ok(())
}

/// A look at what arrives at pods, and at what passes between hosts.
struct Captures {
    pods: Vec<Capture>,
    fabric: Capture,
}

/// A packet that was sent, with the socket it was sent from: a closed socket's port may be
/// another's.
struct Sent {
    n: usize,
    packet: Packet,
    socket: Socket,
    from: SocketAddr,
    at: Instant,
    /// The endpoint that it reached.
    endpoint: Option<SocketAddr>,
    /// How often it came into the bridge between hosts.
    passed: usize,
}

impl Captures {
    fn open(scene: &Scene<'_>) -> Result<Self> {
        let pod = |name: &str| Capture::open(scene.net.pod(name)?);
        Ok(Self {
            pods: ["a", "b", "c"].into_iter().map(pod).collect::<Result<_>>()?,
            fabric: Capture::open(scene.fabric)?,
        })
    }

    /// Sends each once. Where the source is changed it counts as lost.
    fn play(
        &self,
        scene: &Scene<'_>,
        packets: &[(usize, Packet)],
        (timeouts, first): (Duration, bool),
    ) -> Result<Vec<(usize, End)>> {
        let mut sent = Vec::new();
        self.drain(&mut [])?;
        for (n, packet) in packets {
            let (socket, from) = send(scene.net.ns(packet.question.client)?, (*n, packet))?;
            sent.push(Sent {
                n: *n,
                packet: *packet,
                socket,
                from,
                at: Instant::now(),
                endpoint: None,
                passed: 0,
            });
            self.drain(&mut sent)?;
        }
        let last = Instant::now();
        while last.elapsed() < timeouts && sent.iter().any(|sent| sent.endpoint.is_none()) {
            self.drain(&mut sent)?;
            thread::sleep(Duration::from_millis(5));
        }
        // However long this thread had to wait for the processor.
        self.drain(&mut sent)?;
        let late = |sent: &Sent| {
            let tcp = sent.packet.question.protocol == Protocol::Tcp;
            tcp && sent.endpoint.is_none() && asked_by_node(&sent.packet)
        };
        if first && sent.iter().any(late) {
            while last.elapsed() < SECOND_TRY {
                self.drain(&mut sent)?;
                thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(sent.into_iter().map(|sent| (sent.n, sent.end())).collect())
    }

    /// Takes note of what was captured.
    fn drain(&self, sent: &mut [Sent]) -> Result<()> {
        for (capture, is_pod) in
            self.pods.iter().map(|pod| (pod, true)).chain([(&self.fabric, false)])
        {
            for packet in capture.drain()?.into_iter().filter(|packet| !packet.outgoing) {
                let Some(sent) = sent.iter_mut().find(|sent| sent.is(&packet)) else {
                    continue;
                };
                if is_pod {
                    sent.endpoint = Some(packet.dst);
                } else if packet.dst == sent.packet.question.to {
                    // What comes again is not what a node passed on.
                    sent.passed += usize::from(sent.at.elapsed() < FIRST_TRY);
                }
            }
        }
        Ok(())
    }
}

impl Sent {
    /// Whether this is what was sent. Datagrams say who they are: a node may have had to change the
    /// port, because another flow of the same client to the same endpoint has it.
    fn is(&self, packet: &capture::Packet) -> bool {
        const UDP_HEADER: usize = 8;
        if self.packet.question.protocol.number() != packet.protocol {
            return false;
        }
        match self.packet.question.protocol {
            Protocol::Udp => packet.payload.get(UDP_HEADER..) == Some(&datagram(self.n)[..]),
            Protocol::Tcp | Protocol::Sctp => self.from == packet.src,
        }
    }

    fn end(self) -> End {
        let outside = self.packet.question.client == Client::Outside;
        let refused = || matches!(self.socket.take_error(), Ok(Some(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused);
        match self.endpoint {
            Some(endpoint) => End::Hit {
                endpoint,
                source: Source::Client,
            },
            None if refused() => End::RefusedLate,
            // On its way to a node it was seen once already.
            None if self.passed > usize::from(outside) => End::Passed,
            None => End::Silent,
        }
    }
}

/// What is sent for a packet.
fn datagram(n: usize) -> [u8; 8] {
    n.to_be_bytes()
}

fn send(ns: &NetNs, (n, packet): (usize, &Packet)) -> Result<(Socket, SocketAddr)> {
    let question = packet.question;
    let source = SocketAddr::new(question.source, 0);
    ns.run(|| {
        let socket = match question.protocol {
            Protocol::Tcp => {
                let socket = Socket::new(Domain::for_address(question.to), Type::STREAM, None)?;
                socket.set_linger(Some(Duration::ZERO))?;
                socket.set_nonblocking(true)?;
                socket.bind(&source.into())?;
                // In progress; if it is not, nothing arrives.
                let _ = socket.connect(&question.to.into());
                socket
            }
            Protocol::Udp | Protocol::Sctp => {
                let socket = UdpSocket::bind(source)?;
                // The same.
                let _ = socket.send_to(&datagram(n), question.to);
                socket.into()
            }
        };
        let from = socket.local_addr()?.as_socket().context("no address")?;
        Ok((socket, from))
    })
}
