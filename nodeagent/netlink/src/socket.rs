//! The netfilter netlink socket.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, getsockopt, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use super::batch::SealedBatch;
use super::error::{CommitError, NetlinkError, Refusal, Rejection};
use super::message::{self, Acknowledgement, Message, Messages, NLM_F_ACK, NLMSG_DONE, Request};

/// Requested send buffer; the kernel doubles it and refuses longer batches. The size is only a
/// limit, and reserves no memory. 100,000 Services take about 17 MB.
const SEND_BUFFER_BYTES: usize = 64 << 20;
/// Bytes of the send buffer that the kernel keeps for itself (`netlink_sendmsg`).
const SEND_OVERHEAD_BYTES: usize = 32;
/// Requested receive buffer: room for some 10,000 error messages of about 800 bytes each.
const RECEIVE_BUFFER_BYTES: usize = 8 << 20;
/// Longest datagram that is received. The kernel fills dumps in chunks of up to 32 KiB and silently
/// cuts them when the buffer is smaller: kernel.md 1.6.
pub(super) const DATAGRAM_BYTES: usize = 64 << 10;
/// Longest wait for an answer. The kernel answers before `sendto` returns, so this passes only when
/// an answer was lost.
const ANSWER_TIMEOUT_S: i64 = 5;

/// Most requests in one datagram. Even if all of them are refused, the answers fit into the
/// smallest receive buffer that a kernel gives (some 200 KiB, about 1 KiB each).
const REQUESTS_AT_ONCE: usize = 64;

/// `NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN` (linux/netfilter/nf_tables.h).
const GETGEN: u16 = 10 << 8 | 16;
/// `NFTA_GEN_ID`.
const NFTA_GEN_ID: u16 = 1;

/// Returns the generation that follows `generation` when exactly one transaction is committed.
pub fn generation_after(generation: u32) -> u32 {
    // The kernel skips 0 (nf_tables_commit).
    generation.checked_add(1).unwrap_or(1)
}

/// A blocking `NETLINK_NETFILTER` socket. It belongs to the network namespace of the thread that
/// opened it. Exchanges block for as long as the kernel works, so the socket must not be used on
/// the async runtime.
#[derive(Debug)]
pub struct NfSocket {
    socket: Socket,
    /// The sequence number of the next message. Numbers are never used twice, so that late answers
    /// are recognized.
    sequence: u32,
    max_batch_bytes: usize,
    pub(super) datagram: Vec<u8>,
}

impl NfSocket {
    /// Opens a socket in this thread's network namespace. Opening needs no privilege; requests do.
    ///
    /// # Errors
    /// [`NetlinkError::Open`].
    pub fn open() -> Result<Self, NetlinkError> {
        Self::open_for(NETLINK_NETFILTER)
    }

    /// Opens a socket for another subsystem of the kernel (`NETLINK_*`).
    pub(super) fn open_for(protocol: isize) -> Result<Self, NetlinkError> {
        let open = |error: io::Error| NetlinkError::Open(errno_of(&error));
        let socket = Socket::new(protocol).map_err(open)?;
        socket.connect(&SocketAddr::new(0, 0)).map_err(open)?;
        socket.set_ext_ack(true).map_err(open)?;
        socket.set_cap_ack(true).map_err(open)?;
        let max_batch_bytes = size_buffers(&socket).map_err(NetlinkError::Open)?;
        Ok(Self {
            socket,
            sequence: 1,
            max_batch_bytes,
            datagram: Vec::with_capacity(DATAGRAM_BYTES),
        })
    }

    /// Returns the longest batch that the kernel takes at once. Without `CAP_NET_ADMIN` in the
    /// initial user namespace that is twice `net.core.wmem_max`, 416 KiB unless an administrator
    /// raised it.
    pub fn max_batch_bytes(&self) -> usize {
        self.max_batch_bytes
    }

    /// Returns the socket's port, which identifies its transactions.
    ///
    /// # Errors
    /// [`NetlinkError::Open`].
    pub fn port(&self) -> Result<u32, NetlinkError> {
        let mut address = SocketAddr::new(0, 0);
        let asked = self.socket.get_address(&mut address);
        asked.map_err(|error| NetlinkError::Open(errno_of(&error)))?;
        Ok(address.port_number())
    }

    /// Returns the generation of all nf_tables rules in this network namespace.
    ///
    /// # Errors
    /// [`NetlinkError`]; `EPERM` without `CAP_NET_ADMIN`.
    pub fn generation(&mut self) -> Result<u32, NetlinkError> {
        let what = "get generation";
        let answer = self.get(Request::new(what, GETGEN, 0, |_| {}))?;
        Messages(&answer)
            .next()
            .and_then(|m| m.attributes().get(NFTA_GEN_ID)?.as_u32())
            .ok_or(NetlinkError::Unexpected { what })
    }

    /// Requests one object and returns the datagram that holds it.
    ///
    /// # Errors
    /// [`NetlinkError`]; `ENOENT` when the object does not exist.
    pub fn get(&mut self, mut request: Request) -> Result<Vec<u8>, NetlinkError> {
        let what = request.what;
        let sequence = self.ask(&mut request, 0)?;
        loop {
            self.receive(MsgFlags::empty())
                .map_err(|errno| NetlinkError::Socket { what, errno })?;
            if let Some(answer) = Messages(&self.datagram).find(|m| m.sequence == sequence) {
                refusal(what, answer)?;
                return Ok(self.datagram.clone());
            }
        }
    }

    /// Sends a request that is not part of a batch, and waits until the kernel has carried it out.
    ///
    /// # Errors
    /// [`NetlinkError`]; after a refusal nothing was changed.
    pub fn execute(&mut self, mut request: Request) -> Result<(), NetlinkError> {
        let what = request.what;
        let sequence = self.ask(&mut request, NLM_F_ACK)?;
        loop {
            self.receive(MsgFlags::empty())
                .map_err(|errno| NetlinkError::Socket { what, errno })?;
            let mut answers = Messages(&self.datagram).filter(|m| m.sequence == sequence);
            match answers.find_map(Message::acknowledgement) {
                None => {}
                Some(Acknowledgement { errno: None, .. }) => return Ok(()),
                Some(Acknowledgement {
                    errno: Some(errno),
                    reason,
                    ..
                }) => {
                    return Err(NetlinkError::Refused {
                        what,
                        errno,
                        reason,
                    });
                }
            }
        }
    }

    /// Sends requests that the kernel handles one by one. Returns how many it refused with
    /// `ENOENT`, because their objects are gone already.
    ///
    /// # Errors
    /// The first other refusal. All requests in the same datagram were tried, later ones were not.
    pub fn request_all(&mut self, requests: &[Request]) -> Result<usize, NetlinkError> {
        let mut missing = 0_usize;
        for lot in requests.chunks(REQUESTS_AT_ONCE) {
            let refusals = self.request_lot(lot)?;
            let others = |r: &Refusal| r.errno != Errno::ENOENT;
            let gone = refusals.iter().filter(|r| !others(r)).count();
            missing = missing.saturating_add(gone);
            if let Some(refusal) = refusals.into_iter().find(others) {
                return Err(refusal.into_error(lot));
            }
        }
        Ok(missing)
    }

    /// Sends requests that the kernel handles one by one, also after a refusal. Returns the
    /// refusals in order, and the number of bytes sent.
    ///
    /// # Errors
    /// [`NetlinkError::Socket`]: the outcome is unknown.
    pub fn perform(&mut self, requests: &[Request]) -> Result<(Vec<Refusal>, u64), NetlinkError> {
        let mut refused = Vec::new();
        let bytes = requests.iter().map(|r| r.bytes.len() as u64).sum();
        let starts = (0_usize..).step_by(REQUESTS_AT_ONCE);
        for (start, lot) in starts.zip(requests.chunks(REQUESTS_AT_ONCE)) {
            let refusals = self.request_lot(lot)?.into_iter();
            refused.extend(refusals.map(|refusal| Refusal {
                index: start.saturating_add(refusal.index),
                ..refusal
            }));
        }
        Ok((refused, bytes))
    }

    fn request_lot(&mut self, lot: &[Request]) -> Result<Vec<Refusal>, NetlinkError> {
        let Some(what) = lot.first().map(|request| request.what) else {
            return Ok(Vec::new());
        };
        let first = self.sequence;
        let mut bytes = Vec::with_capacity(lot.iter().map(|r| r.bytes.len()).sum());
        let mut last_start = 0;
        for request in lot {
            bytes.resize(super::attribute::aligned(bytes.len()), 0);
            last_start = bytes.len();
            bytes.extend_from_slice(&request.bytes);
            message::set_sequence(&mut bytes, last_start, self.sequence);
            self.sequence = self.sequence.wrapping_add(1);
        }
        // Only the last request asks for an acknowledgement. Refusals of the others come anyway,
        // and before it.
        message::add_flags(&mut bytes, last_start, NLM_F_ACK);
        let socket = |errno| NetlinkError::Socket { what, errno };
        self.socket.send(&bytes, 0).map_err(|error| socket(errno_of(&error)))?;
        let mut refused = Vec::new();
        loop {
            self.receive(MsgFlags::empty()).map_err(socket)?;
            for message in Messages(&self.datagram) {
                let index = message.sequence.wrapping_sub(first) as usize;
                if index >= lot.len() {
                    continue;
                }
                let Some(answer) = message.acknowledgement() else {
                    continue;
                };
                if let Some(errno) = answer.errno {
                    refused.push(Refusal {
                        index,
                        errno,
                        code: answer.code,
                        reason: answer.reason,
                    });
                }
                if index.saturating_add(1) == lot.len() {
                    return Ok(refused);
                }
            }
        }
    }

    /// Commits a batch: the kernel applies all of it or nothing. Blocks until the kernel has
    /// decided.
    ///
    /// # Errors
    /// [`CommitError`], whose variants state what is known about the outcome.
    pub fn commit(&mut self, mut batch: SealedBatch) -> Result<(), CommitError> {
        if batch.is_empty() {
            return Ok(());
        }
        let too_big = CommitError::TooBig {
            bytes: batch.as_bytes().len(),
            limit: self.max_batch_bytes,
        };
        if batch.as_bytes().len() > self.max_batch_bytes {
            return Err(too_big);
        }
        let begin = self.sequence;
        let last = batch.number(begin);
        self.sequence = last.wrapping_add(2);
        match self.socket.send(batch.as_bytes(), 0) {
            Ok(_) => self.await_decision(&batch, begin, last),
            Err(error) => Err(match errno_of(&error) {
                Errno::EMSGSIZE => too_big,
                errno => CommitError::OutcomeUnknown(errno),
            }),
        }
    }

    /// Reads acknowledgements up to that of the last operation. Errors come first, in the order of
    /// the operations; all are in the queue when `send` returns.
    fn await_decision(
        &mut self,
        batch: &SealedBatch,
        begin: u32,
        last: u32,
    ) -> Result<(), CommitError> {
        let mut rejections = Vec::new();
        let mut accepted = false;
        while !accepted {
            let wait =
                if rejections.is_empty() { MsgFlags::empty() } else { MsgFlags::MSG_DONTWAIT };
            match self.receive(wait) {
                Ok(()) => {}
                Err(errno) if rejections.is_empty() => {
                    return Err(CommitError::OutcomeUnknown(errno));
                }
                Err(_) => break,
            }
            for message in Messages(&self.datagram) {
                let Some(answer) = message.acknowledgement() else {
                    continue;
                };
                let distance = message.sequence.wrapping_sub(begin) as usize;
                match distance.checked_sub(1) {
                    None => {
                        if let Some(errno) = answer.errno {
                            self.discard_answers();
                            return Err(refused_as_a_whole(errno));
                        }
                    }
                    Some(index) if index < batch.len() => match answer.errno {
                        Some(_) => rejections.extend(rejection(batch, index, answer)),
                        None => accepted = message.sequence == last,
                    },
                    _ => {} // a late answer to something else
                }
            }
        }
        if rejections.is_empty() {
            Ok(())
        } else {
            Err(CommitError::Rejected {
                operations: batch.len(),
                rejections,
            })
        }
    }

    /// Empties the queue, so that it cannot fill up with unread answers.
    fn discard_answers(&mut self) {
        while self.receive(MsgFlags::MSG_DONTWAIT).is_ok() {}
    }

    /// Sends a request under a new sequence number.
    pub(super) fn ask(&mut self, request: &mut Request, flags: u16) -> Result<u32, NetlinkError> {
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(1);
        message::add_flags(&mut request.bytes, 0, flags);
        message::set_sequence(&mut request.bytes, 0, sequence);
        match self.socket.send(&request.bytes, 0) {
            Ok(_) => Ok(sequence),
            Err(error) => Err(NetlinkError::Socket {
                what: request.what,
                errno: errno_of(&error),
            }),
        }
    }

    /// Receives the next datagram of the kernel into `self.datagram`.
    pub(super) fn receive(&mut self, flags: MsgFlags) -> Result<(), Errno> {
        loop {
            self.datagram.clear();
            let flags = (flags | MsgFlags::MSG_TRUNC).bits();
            match self.socket.recv_from(&mut self.datagram, flags) {
                Ok((len, _)) if len > self.datagram.len() => return Err(Errno::EMSGSIZE),
                // Only the kernel has port 0; any program may send to this socket.
                Ok((_, sender)) if sender.port_number() != 0 => {}
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(errno_of(&error)),
            }
        }
    }
}

/// Converts an error message into an error.
pub(super) fn refusal(what: &'static str, message: Message<'_>) -> Result<(), NetlinkError> {
    let done = match message.kind {
        // A dump that fails at its end reports the error here.
        NLMSG_DONE => message.body.first_chunk().map(|b| i32::from_ne_bytes(*b)),
        _ => None,
    };
    if let Some(error) = done.filter(|error| *error < 0) {
        let errno = Errno::from_raw(error.wrapping_neg());
        let reason = None;
        return Err(NetlinkError::Refused {
            what,
            errno,
            reason,
        });
    }
    match message.acknowledgement() {
        None => Ok(()),
        Some(answer) => Err(match answer.errno {
            None => NetlinkError::Unexpected { what },
            Some(errno) => NetlinkError::Refused {
                what,
                errno,
                reason: answer.reason,
            },
        }),
    }
}

fn refused_as_a_whole(errno: Errno) -> CommitError {
    match errno {
        Errno::ERESTART => CommitError::GenerationMoved,
        errno => CommitError::Refused(errno),
    }
}

fn rejection(batch: &SealedBatch, index: usize, answer: Acknowledgement) -> Option<Rejection> {
    let attribute = answer.offset.and_then(|offset| batch.attribute_at(index, offset));
    Some(Rejection {
        index,
        what: batch.label(index)?,
        errno: answer.errno?,
        reason: answer.reason,
        attribute: attribute.map(<[u8]>::to_vec),
    })
}

/// Makes the buffers as large as allowed, and returns the longest batch that fits.
fn size_buffers(socket: &Socket) -> Result<usize, Errno> {
    if setsockopt(socket, sockopt::SndBufForce, &SEND_BUFFER_BYTES).is_err() {
        setsockopt(socket, sockopt::SndBuf, &SEND_BUFFER_BYTES)?;
    }
    if setsockopt(socket, sockopt::RcvBufForce, &RECEIVE_BUFFER_BYTES).is_err() {
        setsockopt(socket, sockopt::RcvBuf, &RECEIVE_BUFFER_BYTES)?;
    }
    let timeout = TimeVal::seconds(ANSWER_TIMEOUT_S);
    setsockopt(socket, sockopt::ReceiveTimeout, &timeout)?;
    let granted = getsockopt(socket, sockopt::SndBuf)?;
    Ok(granted.saturating_sub(SEND_OVERHEAD_BYTES))
}

pub(super) fn errno_of(error: &io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or_default())
}
