//! Dumps: lists of objects that the kernel sends as many messages for one request.

use std::ops::ControlFlow;

use nix::sys::socket::MsgFlags;

use super::error::NetlinkError;
use super::message::{Message, Messages, NLM_F_DUMP, NLM_F_DUMP_INTR, NLMSG_DONE, Request};
use super::socket::{NfSocket, refusal};

/// Most attempts of a dump when the rules change meanwhile.
const DUMP_ATTEMPTS: u32 = 10;

impl NfSocket {
    /// Dumps all objects of a kind once. Returns their messages, and whether any rules changed
    /// meanwhile. The caller must be able to find out whether the change concerns these objects.
    ///
    /// # Errors
    /// [`NetlinkError`]; `ENOENT` when the table or set does not exist.
    pub fn dump_through(&mut self, mut request: Request) -> Result<(Vec<u8>, bool), NetlinkError> {
        let mut messages = Vec::new();
        let whole = self.dump_once(&mut request, |datagram| {
            messages.extend_from_slice(datagram);
        })?;
        Ok((messages, !whole))
    }

    /// Dumps all objects of a kind and returns their messages. Starts again, a bounded number of
    /// times, when the rules change meanwhile.
    ///
    /// The kernel notices changes only between two chunks of a dump (about 32 KiB). An answer may
    /// therefore be half old, half new unless the generation is the same before and after. A commit
    /// guarded with the earlier generation is refused in that case.
    ///
    /// # Errors
    /// [`NetlinkError`]; `ENOENT` when the table or set does not exist.
    pub fn dump(&mut self, mut request: Request) -> Result<Vec<u8>, NetlinkError> {
        for _ in 0..DUMP_ATTEMPTS {
            let mut messages = Vec::new();
            if self.dump_once(&mut request, |datagram| {
                messages.extend_from_slice(datagram);
            })? {
                return Ok(messages);
            }
        }
        Err(keeps_changing(&request))
    }

    /// Dumps all objects of a kind and passes each message on as it comes, so that a list of any
    /// length takes no memory. Starts again, a bounded number of times, when the kernel reports that
    /// the list changed meanwhile. Messages may therefore come more than once.
    ///
    /// # Errors
    /// [`NetlinkError`]; the messages passed on before the error are part of the list.
    pub fn dump_each(
        &mut self,
        mut request: Request,
        mut each: impl FnMut(Message<'_>),
    ) -> Result<(), NetlinkError> {
        for _ in 0..DUMP_ATTEMPTS {
            if self.dump_once(&mut request, |datagram| {
                Messages(datagram).for_each(&mut each);
            })? {
                return Ok(());
            }
        }
        Err(keeps_changing(&request))
    }

    /// Dumps all objects of a kind once, whatever changes meanwhile, and passes each message on as it comes, until
    /// `each` breaks the dump off. Returns whether the list came to its end. The kernel goes on with a dump that was
    /// broken off only while the socket is open: drop it.
    ///
    /// # Errors
    /// [`NetlinkError`]; the messages passed on before the error are part of the list.
    pub fn dump_until(
        &mut self,
        mut request: Request,
        mut each: impl FnMut(Message<'_>) -> ControlFlow<()>,
    ) -> Result<bool, NetlinkError> {
        let what = request.what;
        let sequence = self.ask(&mut request, NLM_F_DUMP)?;
        loop {
            let chunk = self.next_chunk(what, sequence)?;
            let listed = self.datagram.get(..chunk.listed).unwrap_or(&self.datagram);
            if Messages(listed).try_for_each(&mut each).is_break() {
                return Ok(false);
            }
            if chunk.done {
                return Ok(true);
            }
        }
    }

    /// Runs one dump; returns `false` when the rules changed meanwhile.
    fn dump_once(
        &mut self,
        request: &mut Request,
        mut each: impl FnMut(&[u8]),
    ) -> Result<bool, NetlinkError> {
        let what = request.what;
        let sequence = self.ask(request, NLM_F_DUMP)?;
        let mut changed = false;
        loop {
            let chunk = self.next_chunk(what, sequence)?;
            changed |= chunk.changed;
            // Newer kernels (seen with 6.18) put the end behind the last objects.
            each(self.datagram.get(..chunk.listed).unwrap_or(&self.datagram));
            if chunk.done {
                return Ok(!changed);
            }
        }
    }

    /// Receives the next datagram of a dump.
    fn next_chunk(&mut self, what: &'static str, sequence: u32) -> Result<Chunk, NetlinkError> {
        self.receive(MsgFlags::empty())
            .map_err(|errno| NetlinkError::Socket { what, errno })?;
        let mut chunk = Chunk::default();
        for message in Messages(&self.datagram) {
            if message.sequence == sequence {
                chunk.changed |= message.flags & NLM_F_DUMP_INTR != 0;
                refusal(what, message)?;
                chunk.done |= message.kind == NLMSG_DONE;
            }
            if chunk.done {
                break;
            }
            chunk.listed = chunk.listed.saturating_add(message.aligned_len());
        }
        Ok(chunk)
    }
}

/// A datagram of a dump.
#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    /// Bytes of objects.
    listed: usize,
    /// Whether the rules changed since the one before.
    changed: bool,
    /// Whether it is the last one.
    done: bool,
}

/// A dump that the caller reads piece by piece, on a socket of its own. The kernel goes on with it only while it is read.
#[derive(Debug)]
pub struct PausedDump {
    socket: NfSocket,
    what: &'static str,
    sequence: u32,
}

impl PausedDump {
    /// Begins a dump in this thread's network namespace.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn begin(mut request: Request) -> Result<Self, NetlinkError> {
        let mut socket = NfSocket::open()?;
        let (what, sequence) = (request.what, socket.ask(&mut request, NLM_F_DUMP)?);
        Ok(Self {
            socket,
            what,
            sequence,
        })
    }

    /// Passes on the messages of the next piece, some 32 KiB. Returns whether it is the last one. Changes of the rules
    /// meanwhile may make the kernel leave objects out, or name them twice.
    ///
    /// # Errors
    /// [`NetlinkError`]; `ENOENT` when the table or set does not exist.
    pub fn next(&mut self, each: impl FnMut(Message<'_>)) -> Result<bool, NetlinkError> {
        let chunk = self.socket.next_chunk(self.what, self.sequence)?;
        let listed = self.socket.datagram.get(..chunk.listed);
        Messages(listed.unwrap_or_default()).for_each(each);
        Ok(chunk.done)
    }
}

fn keeps_changing(request: &Request) -> NetlinkError {
    NetlinkError::KeepsChanging {
        what: request.what,
        attempts: DUMP_ATTEMPTS,
    }
}
