//! What an agent's stream sends.
//!
//! The connection asks for the next message when it has room for one. So a change wakes nothing but connections, the
//! latest state wins, and an agent that reads slowly costs others nothing.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::Stream;
use kplane_proto::v1::server_message;
use tokio::sync::oneshot;
use tonic::Status;

use super::mailbox::{Item, Mailbox};
use super::updates::{Next, Updates, encode};
use crate::traffic::{Sent, Tally, Traffic};

/// The messages of one agent's stream, encoded.
#[derive(Debug)]
pub struct Outbound {
    mailbox: Mailbox,
    /// Desired state, once the agent is welcome.
    updates: Option<Updates>,
    ended: bool,
    /// What this stream has sent.
    tally: Tally,
    /// The kind of the message that was sent last.
    sent: Sent,
    /// The session ends when this is dropped.
    _stream_lives: oneshot::Sender<()>,
}

impl Outbound {
    /// Creates a stream that counts in `traffic`, and a receiver that fails when the stream is gone.
    pub(super) fn new(mailbox: Mailbox, traffic: Arc<Traffic>) -> (Self, oneshot::Receiver<()>) {
        let (lives, gone) = oneshot::channel();
        let outbound = Self {
            mailbox,
            updates: None,
            ended: false,
            tally: Tally::new(traffic),
            sent: Sent::Other,
            _stream_lives: lives,
        };
        (outbound, gone)
    }

    /// Handles the session's next item; returns its message, if it has one.
    fn mail(&mut self, item: Item) -> Option<Result<Bytes, Status>> {
        self.sent = match item {
            Item::Heartbeat => Sent::Heartbeat,
            _ => Sent::Other,
        };
        let kind = match item {
            Item::Open(open) => {
                let (welcome, updates) = *open;
                self.updates = Some(updates);
                server_message::Kind::Welcome(welcome)
            }
            Item::Send(kind) => kind,
            Item::Heartbeat => server_message::Kind::Heartbeat(self.updates.as_mut()?.heartbeat()),
            Item::Compared(digests) => {
                self.updates.as_mut()?.answered(digests);
                return None;
            }
            Item::End(Ok(last)) => {
                self.ended = true;
                last?
            }
            Item::End(Err(status)) => {
                self.ended = true;
                return Some(Err(status));
            }
        };
        Some(Ok(encode(kind)))
    }
}

impl Stream for Outbound {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let outbound = &mut *self;
        // No other message may come between the two parts of one.
        if let Some(rest) = outbound.updates.as_mut().and_then(|updates| updates.rest.take()) {
            outbound.tally.add_bytes(outbound.sent, rest.len());
            return Poll::Ready(Some(Ok(rest)));
        }
        let message = ready!(outbound.poll_message(cx));
        if let Some(Ok(message)) = &message {
            outbound.tally.add(outbound.sent, message.len());
        }
        Poll::Ready(message)
    }
}

impl Outbound {
    /// Returns the next message, without the second part of one.
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        let outbound = self;
        if outbound.ended {
            return Poll::Ready(None);
        }
        while let Poll::Ready(item) = outbound.mailbox.poll(cx) {
            let message = outbound.mail(item);
            if message.is_some() || outbound.ended {
                return Poll::Ready(message);
            }
        }
        let Some(updates) = &mut outbound.updates else {
            return Poll::Pending;
        };
        let next = ready!(updates.poll_next(cx));
        outbound.sent = updates.sent;
        // An agent that was sent away, or is refused, gets nothing else.
        outbound.ended = !matches!(next, Ok(Next::Message(_)));
        Poll::Ready(Some(next.map(|next| match next {
            Next::Message(bytes) | Next::Last(bytes) => bytes,
        })))
    }
}
