//! What a session wants its agent to get, until the stream has room.
//!
//! The mailbox has room for one message of each kind, and the latest counts. Only answers about Pods wait in a bounded
//! row. So a session never waits for an agent that does not read, and such an agent costs little memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use kplane_proto::v1 as pb;
use kplane_proto::v1::server_message;
use parking_lot::Mutex;
use tonic::Status;

use super::updates::Updates;

/// Maximum number of answers about Pods that wait to end.
const ANSWERS: usize = 1_024;

/// The next thing for the stream to do.
#[derive(Debug)]
pub(super) enum Item {
    /// Send the welcome, and then desired state.
    Open(Box<(pb::Welcome, Updates)>),
    /// Send a message.
    Send(server_message::Kind),
    /// Send how fresh this control plane is.
    Heartbeat,
    /// Send what the agent lacks by these digests of its ranges.
    Compared(Vec<u8>),
    /// End, after a last message if there is one.
    End(Result<Option<server_message::Kind>, Status>),
}

#[derive(Debug, Default)]
struct Waiting {
    open: Option<Box<(pb::Welcome, Updates)>>,
    pong: Option<pb::Pong>,
    inspect: Option<pb::Inspect>,
    left: VecDeque<pb::Left>,
    compared: Option<Vec<u8>>,
    heartbeat: bool,
    ping: Option<pb::Ping>,
    end: Option<Result<Option<server_message::Kind>, Status>>,
    reader: Option<Waker>,
}

/// The reader's side, which belongs to the stream.
#[derive(Debug)]
pub(super) struct Mailbox(Arc<Mutex<Waiting>>);

/// The writer's side, which belongs to the session. When it is dropped, the stream ends.
#[derive(Debug)]
pub(super) struct Postman(Arc<Mutex<Waiting>>);

/// Creates a mailbox.
pub(super) fn mailbox() -> (Postman, Mailbox) {
    let waiting = Arc::<Mutex<Waiting>>::default();
    (Postman(Arc::clone(&waiting)), Mailbox(waiting))
}

impl Mailbox {
    /// Takes the next item; without one, the task is woken when there is one.
    pub(super) fn poll(&self, cx: &Context<'_>) -> Poll<Item> {
        let mut waiting = self.0.lock();
        if let Some(item) = waiting.next() {
            return Poll::Ready(item);
        }
        match &mut waiting.reader {
            Some(reader) => reader.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

impl Waiting {
    fn beat(&mut self, token: u64) {
        self.heartbeat = true;
        self.ping = Some(pb::Ping { token });
    }

    fn next(&mut self) -> Option<Item> {
        use server_message::Kind;
        if let Some(open) = self.open.take() {
            return Some(Item::Open(open));
        }
        if let Some(pong) = self.pong.take() {
            return Some(Item::Send(Kind::Pong(pong)));
        }
        if let Some(inspect) = self.inspect.take() {
            return Some(Item::Send(Kind::Inspect(inspect)));
        }
        if let Some(left) = self.left.pop_front() {
            return Some(Item::Send(Kind::Left(left)));
        }
        if let Some(digests) = self.compared.take() {
            return Some(Item::Compared(digests));
        }
        if std::mem::take(&mut self.heartbeat) {
            return Some(Item::Heartbeat);
        }
        if let Some(ping) = self.ping.take() {
            return Some(Item::Send(Kind::Ping(ping)));
        }
        self.end.take().map(Item::End)
    }
}

impl Postman {
    /// Opens the stream: the agent gets the welcome, a heartbeat and a ping, and then desired state. So it learns how
    /// fresh this replica is before it gets any data.
    pub(super) fn open(&self, welcome: pb::Welcome, updates: Updates, token: u64) {
        self.put(|waiting| {
            waiting.open = Some(Box::new((welcome, updates)));
            waiting.beat(token);
        });
    }

    pub(super) fn pong(&self, token: u64) {
        self.put(|waiting| waiting.pong = Some(pb::Pong { token }));
    }

    pub(super) fn inspect(&self, inspect: pb::Inspect) {
        self.put(|waiting| waiting.inspect = Some(inspect));
    }

    /// Answers a question about a Pod; drops the answer if the agent does not read.
    pub(super) fn left(&self, left: pb::Left) {
        self.put(|waiting| {
            if waiting.left.len() < ANSWERS {
                waiting.left.push_back(left);
            }
        });
    }

    /// Hands over the digests of the agent's ranges.
    pub(super) fn compared(&self, digests: Vec<u8>) {
        self.put(|waiting| waiting.compared = Some(digests));
    }

    /// Lets the stream look again for something to send.
    pub(super) fn look_again(&self) {
        self.put(|_| ());
    }

    /// Sends a heartbeat.
    pub(super) fn heartbeat(&self) {
        self.put(|waiting| waiting.heartbeat = true);
    }

    /// Sends a heartbeat and a ping.
    pub(super) fn beat(&self, token: u64) {
        self.put(|waiting| waiting.beat(token));
    }

    /// Ends the stream, after a last message if there is one.
    pub(super) fn end(self, end: Result<Option<server_message::Kind>, Status>) {
        self.put(|waiting| waiting.end = Some(end));
    }

    fn put(&self, put: impl FnOnce(&mut Waiting)) {
        let mut waiting = self.0.lock();
        put(&mut waiting);
        let reader = waiting.reader.take();
        drop(waiting);
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

impl Drop for Postman {
    fn drop(&mut self) {
        self.put(|waiting| {
            let ended = || Err(Status::unavailable("the session has ended"));
            waiting.end.get_or_insert_with(ended);
        });
    }
}
