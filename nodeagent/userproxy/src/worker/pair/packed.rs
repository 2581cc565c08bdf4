//! A pair on its way from one proxy to the next.

use std::sync::Arc;

use rustix::event::epoll::EventFlags;

use super::{HALF_OPEN, Held, Pair, State, Way};
use crate::handover::{Connection, Unsent, WayState};
use crate::port::Port;
use crate::shares::Kind;
use crate::worker::Owner;
use crate::worker::core::{Core, Next};
use crate::worker::pipes::Pipe;
use crate::worker::token::Token;

impl Pair {
    /// Takes the connections out. Nothing is closed.
    pub(in crate::worker) fn pack(self, core: &Core) -> Connection {
        for end in &self.ends {
            // Both still belong to this thread's epoll instance.
            let _ = core.unwatch(end);
        }
        self.port.closed(self.endpoint);
        core.leave();
        Connection {
            key: self.port.key.clone(),
            endpoint: self.endpoint,
            ends: self.ends,
            ways: self.ways.map(Way::pack),
        }
    }

    /// Continues with the connections of an earlier proxy.
    pub(in crate::worker) fn unpack(connection: Connection, port: Arc<Port>, core: &Core) -> Self {
        port.inherited(connection.endpoint);
        let seat = port.owners.force(Kind::Connections);
        Self {
            ends: connection.ends,
            ways: connection.ways.map(|way| Way::unpack(way, core)),
            port,
            endpoint: connection.endpoint,
            began: None,
            touched: core.now,
            _places: (Some(seat), None),
        }
    }

    /// Has both connections report changes, and moves what has come meanwhile.
    pub(in crate::worker) fn begin(&mut self, core: &mut Core, token: Token) -> Next<Owner> {
        for (side, end) in (0..).zip(&self.ends) {
            if let Err(error) = core.watch(end, token.side(side)) {
                tracing::warn!(%error, "a connection of the earlier proxy ends: it cannot be watched");
                return self.end(core, true);
            }
        }
        let most = if self.half_open() { HALF_OPEN } else { core.shared.tcp_idle };
        core.timers.add(core.now + most, token);
        self.again(core, token)
    }
}

impl Way {
    fn pack(self) -> WayState {
        WayState {
            // An end that the receiver has not learnt shows up again.
            has_ended: self.state == State::Ended,
            is_plain: self.plain,
            unsent: match self.held {
                Held::None => Unsent::None,
                Held::Bytes(bytes, at) => Unsent::Bytes(bytes[at..].into()),
                Held::Pipe(pipe) => {
                    let (ends, held) = pipe.into_parts();
                    Unsent::Pipe(ends, held)
                }
            },
        }
    }

    fn unpack(state: WayState, core: &Core) -> Self {
        let held = match state.unsent {
            Unsent::None => Held::None,
            Unsent::Bytes(bytes) => Held::Bytes(bytes, 0),
            Unsent::Pipe(ends, held) => Held::Pipe(Pipe::inherited(ends, held, &core.pipes.places)),
        };
        // What the sender did meanwhile is not known.
        let mut way = Self::new(held, EventFlags::IN);
        way.careful = true;
        way.plain = state.is_plain;
        if state.has_ended {
            way.state = State::Ended;
        }
        way
    }
}
