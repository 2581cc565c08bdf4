//! Sending many small answers at once: those of flows whose clients came to the same socket (U55).

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustix::net::addr::SocketAddrArg;
use rustix::net::{MMsgHdr, SendAncillaryBuffer, SendFlags, SocketAddrAny, sendmmsg, sendto};

use crate::listening::Listening;
use crate::port::Port;

/// Most answers of one call.
const BATCH: usize = 32;

/// An answer that waits to be sent.
struct Reply {
    client: SocketAddrAny,
    port: Arc<Port>,
    /// The end of its bytes; they begin where those of the answer before end.
    end: usize,
}

/// Answers that wait to be sent, all by one socket. They wait only while the thread reads more answers.
#[derive(Default)]
pub(super) struct Replies {
    /// The listener, and the place of its socket for answers.
    socket: Option<(Arc<Listening>, usize)>,
    bytes: Vec<u8>,
    all: Vec<Reply>,
}

impl Replies {
    /// Adds an answer to a client of a listener's socket. Those that wait are sent if it does not go together with them.
    pub(super) fn add(
        &mut self,
        (listening, place): (&Arc<Listening>, usize),
        client: SocketAddr,
        port: &Arc<Port>,
        bytes: &[u8],
    ) {
        let is_same = |socket: &(Arc<Listening>, usize)| {
            Arc::ptr_eq(&socket.0, listening) && socket.1 == place
        };
        if !self.socket.as_ref().is_some_and(is_same) || self.all.len() == BATCH {
            self.flush();
            self.socket = Some((listening.clone(), place));
        }
        self.bytes.extend_from_slice(bytes);
        self.all.push(Reply {
            client: client.as_any(),
            port: port.clone(),
            end: self.bytes.len(),
        });
    }

    /// Sends all answers that wait. One that cannot be sent is lost, as any datagram may be.
    pub(super) fn flush(&mut self) {
        let Some((listening, place)) = self.socket.take() else {
            return;
        };
        let socket = listening.answer(place);
        let mut from = 0;
        while from < self.all.len() {
            let sent = self.send(socket, from);
            for index in from..from + sent {
                let counter = &self.all[index].port.counters.to_clients;
                counter.fetch_add(self.answer(index).len() as u64, Relaxed);
            }
            // The kernel stops before the first answer that it cannot send. It is left out.
            let is_left_out = from + sent < self.all.len();
            if is_left_out {
                let counter = &self.all[from + sent].port.counters.lost;
                counter.fetch_add(1, Relaxed);
            }
            from += sent + usize::from(is_left_out);
        }
        self.bytes.clear();
        self.all.clear();
    }

    fn answer(&self, index: usize) -> &[u8] {
        let before = index.checked_sub(1).map(|before| self.all[before].end);
        &self.bytes[before.unwrap_or(0)..self.all[index].end]
    }

    /// Sends the answers from one on; returns how many the kernel took.
    fn send(&self, socket: &OwnedFd, from: usize) -> usize {
        if let [only] = &self.all[from..] {
            let sent = sendto(socket, self.answer(from), SendFlags::NOSIGNAL, &only.client);
            return usize::from(sent.is_ok());
        }
        let numbers = from..self.all.len();
        let slices: Vec<_> = numbers.map(|index| [IoSlice::new(self.answer(index))]).collect();
        let mut controls: Vec<_> =
            slices.iter().map(|_| SendAncillaryBuffer::new(&mut [])).collect();
        let parts = self.all[from..].iter().zip(&slices).zip(&mut controls);
        let mut messages: Vec<_> = parts
            .map(|((reply, slice), control)| MMsgHdr::new_with_addr(&reply.client, slice, control))
            .collect();
        sendmmsg(socket, &mut messages, SendFlags::NOSIGNAL).unwrap_or(0)
    }
}
