//! Messages with descriptors, over a Unix socket that keeps the bounds of records.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::wire::{LARGEST, Message, decode, encode};

/// Most descriptors of one message (`SCM_MAX_FD` is 253).
pub(super) const MOST_FDS: usize = 250;

/// Longest wait for the other process to read a message.
const SENT: Duration = Duration::from_secs(10);

/// One end of the conversation.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

impl Channel {
    /// Uses a connected socket, which waits from now on.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, false)?;
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(SENT))?;
        sockopt::set_socket_send_buffer_size(&socket, LARGEST)?;
        Ok(Self {
            socket,
            buffer: vec![0; LARGEST],
        })
    }

    /// Sends a message with its descriptors.
    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = encode(message);
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::other("too many descriptors for one message"));
        }
        loop {
            let data = [IoSlice::new(&bytes)];
            match sendmsg(&self.socket, &data, &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Waits for a message, for at most `patience`.
    pub(super) fn receive(&mut self, patience: Duration) -> io::Result<(Message, Vec<OwnedFd>)> {
        sockopt::set_socket_timeout(&self.socket, Timeout::Recv, Some(patience))?;
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut data = [IoSliceMut::new(&mut self.buffer)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            match recvmsg(&self.socket, &mut data, &mut control, flags) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(errno) => return Err(errno.into()),
            }
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            let what = "descriptors were lost: this process may open too few files (RLIMIT_NOFILE)";
            return Err(io::Error::other(what));
        }
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let whole = !received.flags.contains(ReturnFlags::TRUNC);
        let message =
            whole.then(|| decode(&self.buffer[..received.bytes])).flatten().ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, "a message cannot be read")
            })?;
        Ok((message, fds))
    }
}
