//! What streams send, without connections.

use futures_util::{FutureExt as _, StreamExt as _};
use kplane_desired_state::publish::{Publication, Published};
use kplane_model::{RangeDigests, ServiceKey, ServicePort};
use kplane_proto::convert::decode_object;
use kplane_proto::v1::{Update, server_message::Kind};
use prost::Message as _;

use super::super::mailbox::{Postman, mailbox};
use super::super::outbound::Outbound;
use super::*;
use crate::fleet::Session;
use crate::overrides::{Backend, Scope, Wish};

const NODE: &str = "n1";

/// A control plane with so many Services.
fn control_plane(epoch: u64, services: usize) -> Arc<Hub> {
    let hub = Hub::sample(epoch, "test");
    (0..services).for_each(|number| publish(&hub, &format!("s{number}")));
    hub.store().set_synced();
    hub
}

fn publish(hub: &Hub, name: &str) {
    let port = ServicePort::sample(ServiceKey::sample("shop", name));
    let service = (port.key.clone(), Some(Published::new(port, &[])));
    hub.store().publish(Publication::sample(vec![service], vec![]));
}

/// A stream of an agent that is welcome; its session lives as long as the postman.
struct Stream {
    postman: Option<Postman>,
    outbound: Outbound,
    session: Session,
}

impl Stream {
    fn open(hub: &Arc<Hub>, resume: Option<pb::ResumeToken>, compares: bool) -> Self {
        let claim = HeldState {
            resume,
            compares,
            unpacks: false,
        };
        Self::with(hub, claim)
    }

    fn with(hub: &Arc<Hub>, claim: HeldState) -> Self {
        let session = Session::sample(hub, NODE);
        let (postman, mailbox) = mailbox();
        let (announced, dispatch) = (hub.store().freshness(), session.dispatch());
        let updates = Updates::new(hub, NODE.into(), false, claim, announced, dispatch);
        postman.open(pb::Welcome::default(), updates, 1);
        Self {
            postman: Some(postman),
            outbound: Outbound::new(mailbox, Arc::clone(&hub.streams().traffic)).0,
            session,
        }
    }

    /// Returns the next message about desired state, if there is one now.
    fn now(&mut self) -> Option<Kind> {
        loop {
            let message = self.outbound.next().now_or_never()??.unwrap();
            let kind = ServerMessage::decode(&message[5..]).unwrap().kind;
            match kind.unwrap() {
                Kind::Welcome(_) | Kind::Heartbeat(_) | Kind::Ping(_) => {}
                kind => return Some(kind),
            }
        }
    }

    fn compare(&mut self) -> u32 {
        match self.now() {
            Some(Kind::Compare(compare)) => compare.ranges,
            other => panic!("{other:?}"),
        }
    }

    /// Returns all pieces until the end of an update.
    fn pieces(&mut self) -> Vec<Update> {
        let mut pieces = Vec::new();
        loop {
            let Some(Kind::Update(piece)) = self.now() else {
                panic!("no end after {pieces:?}");
            };
            let last = piece.end.is_some();
            pieces.push(piece);
            if last {
                return pieces;
            }
        }
    }

    /// Returns whether the next message is a heartbeat that says whether the node is frozen; `None` if there is none now.
    fn beat(&mut self) -> Option<bool> {
        let message = self.outbound.next().now_or_never()??.unwrap();
        match ServerMessage::decode(&message[5..]).unwrap().kind.unwrap() {
            Kind::Heartbeat(beat) => Some(beat.frozen.is_some()),
            other => panic!("{other:?}"),
        }
    }

    fn postman(&self) -> &Postman {
        self.postman.as_ref().unwrap()
    }
}

/// Returns the token of an agent that holds all of a control plane, and the digests of its ranges.
fn held(hub: &Arc<Hub>, ranges: u16) -> (Option<pb::ResumeToken>, Vec<u8>) {
    let mut digests = RangeDigests::new(ranges);
    let mut cursor = Cursor::at(0);
    for bytes in hub.store().collect(NODE, &mut cursor).objects {
        let object = decode_object(bytes.clone()).unwrap().unwrap();
        if let key @ kplane_model::DesiredKey::Service(_) = object.key() {
            digests.add(&key, kplane_model::ObjectHash::of(&bytes));
        }
    }
    let token = pb::ResumeToken {
        schema: kplane_proto::DIGEST_SCHEMA,
        epoch: hub.store().epoch(),
        revision: cursor.base(),
        digest: hub.store().digest(NODE).to_bytes().to_vec(),
    };
    (Some(token), digests.to_bytes())
}

#[test]
fn an_agent_of_another_replica_gets_the_ranges_that_differ() {
    let [here, there] = [1, 2].map(|epoch| control_plane(epoch, 100));
    publish(&there, "only-there");
    publish(&here, "only-here");
    let (token, digests) = held(&there, 16);
    let mut stream = Stream::open(&here, token, true);
    assert_eq!(stream.compare(), 16);
    assert!(stream.now().is_none(), "nothing before the agent's answer");
    publish(&here, "meanwhile");
    assert!(stream.now().is_none(), "not even a change");
    stream.postman().compared(digests);
    let pieces = stream.pieces();
    assert!(!pieces[0].ranges.is_empty() && !pieces[0].snapshot);
    let objects: usize = pieces.iter().map(|piece| piece.objects.len()).sum();
    assert!((3..50).contains(&objects), "{objects}");
    let end = pieces.last().unwrap().end.as_ref().unwrap();
    assert_eq!(end.digest, here.store().digest(NODE).to_bytes());
    let counts = here.streams().snapshots.counts();
    assert_eq!((counts.ranges, counts.begun), (1, 0));
    // From now on, differences.
    publish(&here, "later");
    assert_eq!(stream.pieces()[0].objects.len(), 1);
    stream.postman().compared(vec![0; 64]);
    assert!(stream.now().is_none(), "digests that nobody asked for");
}

#[test]
fn an_agent_that_cannot_compare_or_differs_too_much_gets_a_snapshot() {
    let [here, there] = [1, 2].map(|epoch| control_plane(epoch, 2_000));
    publish(&there, "only-there");
    let (token, _) = held(&there, 16);
    let mut old = Stream::open(&here, token.clone(), false);
    assert!(old.pieces()[0].snapshot);
    for digests in [Vec::new(), vec![7; 63], vec![7; 256]] {
        let mut stream = Stream::open(&here, token.clone(), true);
        assert_eq!(stream.compare(), 64);
        stream.postman().compared(digests);
        assert!(stream.pieces()[0].snapshot);
    }
    assert_eq!(here.streams().snapshots.counts().begun, 4);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_does_not_answer_gets_a_snapshot() {
    let [here, there] = [1, 2].map(|epoch| control_plane(epoch, 10));
    publish(&there, "only-there");
    let mut stream = Stream::open(&here, held(&there, 16).0, true);
    stream.compare();
    tokio::time::advance(ANSWER_WITHIN / 2).await;
    stream.postman().beat(1);
    assert!(stream.now().is_none());
    tokio::time::advance(ANSWER_WITHIN).await;
    stream.postman().beat(2);
    assert!(stream.pieces()[0].snapshot);
}

#[test]
fn what_a_replica_remembers_needs_no_comparison() {
    let [here, there] = [1, 2].map(|epoch| control_plane(epoch, 10));
    let (token, _) = held(&there, 16);
    let mut equal = Stream::open(&here, token.clone(), true);
    let pieces = equal.pieces();
    assert_eq!((pieces.len(), pieces[0].objects.len()), (1, 0));
    publish(&here, "new");
    let mut behind = Stream::open(&here, token, true);
    let pieces = behind.pieces();
    assert_eq!((pieces.len(), pieces[0].objects.len()), (1, 1));
    let counts = here.streams().snapshots.counts();
    assert_eq!((counts.equal, counts.changes, counts.begun), (1, 1, 0));
}

/// The messages of an agent that does not read: one of each kind.
#[test]
fn a_stream_keeps_the_latest_of_what_waits_and_ends_with_its_session() {
    let hub = control_plane(1, 1);
    let mut stream = Stream::open(&hub, None, false);
    stream.pieces();
    (0..1_000).for_each(|token| stream.postman().pong(token));
    assert_eq!(stream.now(), Some(Kind::Pong(pb::Pong { token: 999 })));
    assert!(stream.now().is_none());
    let later = pb::ComeBackLater::default();
    let postman = stream.postman.take().unwrap();
    postman.end(Ok(Some(Kind::ComeBackLater(later.clone()))));
    publish(&hub, "late");
    assert_eq!(stream.now(), Some(Kind::ComeBackLater(later)));
    let end = stream.outbound.next().now_or_never();
    assert!(matches!(end, Some(None)), "{end:?}");
    // A session that is gone without a word, for example because it panicked.
    let mut stream = Stream::open(&hub, None, false);
    stream.pieces();
    stream.postman = None;
    let end = stream.outbound.next().now_or_never().unwrap();
    assert_eq!(end.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
}

/// An agent that can read compressed pieces gets the same objects in fewer bytes; they are compressed once.
#[test]
fn snapshots_are_compressed_once_for_agents_that_can_read_them() {
    let hub = control_plane(1, 2_000);
    let pieces = |unpacks| {
        let claim = HeldState {
            resume: None,
            compares: true,
            unpacks,
        };
        Stream::with(&hub, claim).pieces()
    };
    let (plain, packed) = (pieces(false), pieces(true));
    let size = |pieces: &[Update]| pieces.iter().map(Update::encoded_len).sum::<usize>();
    assert!(
        size(&packed) * 3 < size(&plain),
        "{} and {}",
        size(&packed),
        size(&plain)
    );
    let objects = |pieces: Vec<Update>| {
        pieces
            .into_iter()
            .flat_map(|piece| {
                if piece.packed.is_empty() {
                    piece.objects
                } else {
                    kplane_proto::packed::unpack(&piece.packed).unwrap()
                }
            })
            .collect::<Vec<_>>()
    };
    assert!(packed[0].snapshot && packed.len() == plain.len());
    let again = pieces(true);
    let first = |pieces: &[Update]| pieces[0].packed.clone();
    assert_eq!(first(&again), first(&packed));
    assert_eq!(objects(plain), objects(packed));
}

/// An agent learns at once that its node is frozen, and that it is not any more. It gets nothing between.
#[tokio::test]
async fn a_frozen_agent_is_told_at_once_and_gets_nothing_until_it_is_thawed() {
    let hub = control_plane(1, 10);
    let folder = tempfile::tempdir().unwrap();
    let order = |frozen| Wish {
        scopes: vec![Scope::Node(NODE.to_owned())],
        frozen,
        by: String::new(),
        at_ms: 1,
        reason: String::new(),
    };
    let (token, _) = held(&hub, 16);
    let mut stream = Stream::open(&hub, token.clone(), true);
    assert_eq!(stream.pieces().len(), 1);
    hub.overrides().keep_in(Backend::SharedFile(folder.path().join("orders")));
    publish(&hub, "before-the-orders-are-known");
    let mut early = Stream::open(&hub, token.clone(), true);
    assert!(early.now().is_none() && stream.now().is_none());
    hub.overrides().order(&order(true)).await.unwrap();
    assert_eq!((stream.beat(), early.beat()), (Some(true), Some(true)));
    publish(&hub, "while-it-is-frozen");
    let mut later = Stream::open(&hub, token, true);
    for stream in [&mut stream, &mut early, &mut later] {
        assert!(stream.now().is_none());
    }
    let mut new = Stream::open(&hub, None, true);
    assert!(new.pieces()[0].snapshot, "an agent without anything");
    publish(&hub, "it-holds-something-now");
    assert!(new.now().is_none());
    hub.overrides().order(&order(false)).await.unwrap();
    for (stream, missed) in [
        (&mut stream, 3),
        (&mut early, 3),
        (&mut later, 3),
        (&mut new, 1),
    ] {
        assert_eq!(stream.beat(), Some(false));
        let pieces = stream.pieces();
        assert_eq!((pieces.len(), pieces[0].objects.len()), (1, missed));
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_joins_changes_while_an_old_update_is_under_way() {
    let hub = control_plane(1, 1);
    let mut stream = Stream::open(&hub, None, false);
    let report = |stream: &Stream, revision| {
        stream.session.report(pb::Report {
            epoch: 1,
            received_revision: revision,
            ..pb::Report::default()
        })
    };
    let first = stream.pieces();
    let received = first.last().unwrap().end.as_ref().unwrap().revision;
    publish(&hub, "at-once");
    assert_eq!(stream.pieces().len(), 1, "nothing is old yet");

    tokio::time::advance(Duration::from_secs(2)).await;
    publish(&hub, "later");
    assert!(stream.now().is_none(), "an update is two seconds old");
    publish(&hub, "later-still");
    assert!(!report(&stream, received - 1), "the agent says nothing new");
    assert!(report(&stream, received), "the agent has it");
    let joined = stream.pieces();
    assert_eq!((joined.len(), joined[0].objects.len()), (1, 2));

    tokio::time::advance(Duration::from_secs(12)).await;
    publish(&hub, "at-last");
    assert_eq!(stream.pieces().len(), 1, "silence does not stop a stream");
}

/// Returns the messages and bytes of a kind that were sent.
fn sent(hub: &Hub, kind: &str) -> (u64, u64) {
    let all = hub.streams().traffic.volumes();
    let found = all.iter().find(|(name, _)| *name == kind).unwrap().1;
    (found.messages, found.bytes)
}

#[test]
fn messages_and_bytes_are_counted_by_kind() {
    let hub = control_plane(1, 3);
    let mut stream = Stream::open(&hub, None, false);
    let mut bytes = 0;
    let mut take = |stream: &mut Stream| {
        while let Some(Some(message)) = stream.outbound.next().now_or_never() {
            bytes += u64::try_from(message.unwrap().len()).unwrap();
        }
    };
    take(&mut stream);
    publish(&hub, "new");
    hub.store().announce();
    take(&mut stream);
    assert_eq!(sent(&hub, "update"), (0, 0), "not added yet");
    drop(stream);
    let kinds = ["snapshot", "update", "heartbeat", "other"].map(|kind| sent(&hub, kind));
    let messages = kinds.map(|(messages, _)| messages);
    // A greeting and a ping come first.
    assert_eq!(messages, [2, 1, 1, 2]);
    assert_eq!(kinds.iter().map(|(_, bytes)| bytes).sum::<u64>(), bytes);
}
