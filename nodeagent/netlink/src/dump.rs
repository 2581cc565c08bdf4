//! Lists of objects: many messages for one question.

use nix::sys::socket::MsgFlags;

use super::error::NetlinkError;
use super::message::{Message, Messages, NLM_F_DUMP, NLM_F_DUMP_INTR, NLMSG_DONE, Request};
use super::socket::{NfSocket, refusal};

/// How often a dump is begun again when the rules changed meanwhile.
const DUMP_ATTEMPTS: u32 = 10;

impl NfSocket {
    /// Asks once for all objects of a kind and returns their messages, and whether some rules changed
    /// meanwhile: for a caller who can tell whether they were those that it asked for.
    ///
    /// # Errors
    /// [`NetlinkError`]; `ENOENT` when the table or set to look in is not there.
    pub fn dump_through(&mut self, mut request: Request) -> Result<(Vec<u8>, bool), NetlinkError> {
        let mut messages = Vec::new();
        let whole = self.dump_once(&mut request, |datagram| {
            messages.extend_from_slice(datagram);
        })?;
        Ok((messages, !whole))
    }

    /// Asks for all objects of a kind and returns their messages. Begins again, a bounded number
    /// of times, when the rules change meanwhile.
    ///
    /// The kernel notices changes between two chunks of a dump only (about 32 KiB), so an answer
    /// may be half old, half new unless the generation is the same before and after; a commit
    /// guarded with the generation from before is refused in that case.
    ///
    /// # Errors
    /// [`NetlinkError`]; `ENOENT` when the table or set to look in is not there.
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

    /// Asks for all objects of a kind and hands each message over as it comes, so that a list of
    /// any length takes no memory. Begins again, a bounded number of times, when the kernel says
    /// that the list changed under way: messages may come more than once.
    ///
    /// # Errors
    /// [`NetlinkError`]; what was handed over before it is part of the list.
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

    /// One dump; `false` when the rules changed meanwhile.
    fn dump_once(
        &mut self,
        request: &mut Request,
        mut each: impl FnMut(&[u8]),
    ) -> Result<bool, NetlinkError> {
        let what = request.what;
        let sequence = self.ask(request, NLM_F_DUMP)?;
        let mut changed = false;
        loop {
            self.receive(MsgFlags::empty())
                .map_err(|errno| NetlinkError::Socket { what, errno })?;
            let (mut listed, mut done) = (0, false);
            for message in Messages(&self.datagram) {
                if message.sequence == sequence {
                    changed |= message.flags & NLM_F_DUMP_INTR != 0;
                    refusal(what, message)?;
                    done |= message.kind == NLMSG_DONE;
                }
                if done {
                    break;
                }
                listed += message.aligned_len();
            }
            // Newer kernels (seen with 6.18) put the end behind the last objects.
            each(self.datagram.get(..listed).unwrap_or(&self.datagram));
            if done {
                return Ok(!changed);
            }
        }
    }
}

fn keeps_changing(request: &Request) -> NetlinkError {
    NetlinkError::KeepsChanging {
        what: request.what,
        attempts: DUMP_ATTEMPTS,
    }
}
