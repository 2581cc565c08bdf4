//! UDP: datagrams of clients, and a flow with a socket of its own for each client of a ServicePort (U14, U55).

mod flow;
mod queues;
mod receive;
mod replies;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use kplane_model::{Family, Protocol, ProxyConnection, ServiceKey, ServiceName};
use slab::Slab;

use self::flow::{Flow, Outcome};
use self::queues::Queues;
pub(super) use self::receive::Datagram;
use self::receive::{Receiver, Room};
use self::replies::Replies;
use super::core::Core;
use super::token::Token;
use crate::counters::Failure;
use crate::handover::FlowState;
use crate::listening::{ListenerId, Listening, Role};
use crate::port::Port;
use crate::shares::{Kind, Seat};
use crate::table::Route;

/// Flows of which the idlest ends when room for another is needed.
const SAMPLE: usize = 16;

/// A socket on which datagrams of clients arrive.
pub(super) struct UdpListener {
    listening: Arc<Listening>,
    thread: usize,
    receiver: Receiver,
}

impl UdpListener {
    /// Creates the listener for a socket of this number.
    pub(super) fn new(listening: Arc<Listening>, thread: usize) -> Self {
        Self {
            listening,
            thread,
            receiver: Receiver::default(),
        }
    }

    pub(super) fn listening(&self) -> &Arc<Listening> {
        &self.listening
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.listening.datagrams[self.thread]
    }
}

/// The identity of a flow: the client, and the address of this machine that the client wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FlowKey {
    listener: ListenerId,
    client: SocketAddr,
    local: Option<IpAddr>,
}

/// The flows of one thread.
#[derive(Default)]
pub(super) struct Flows {
    flows: Slab<Flow>,
    by_client: HashMap<FlowKey, usize>,
    /// When each flow was used, or later; the longest ago first.
    order: VecDeque<(Instant, Token)>,
    generation: u32,
    room: Option<Room>,
    replies: Replies,
    of_service: Queues<ServiceName>,
    of_namespace: Queues<Arc<str>>,
}

impl Flows {
    /// Reads datagrams of clients, and passes them on.
    pub(super) fn read(&mut self, core: &mut Core, listener: &mut UdpListener) {
        let mut room = self.room.take().unwrap_or_default();
        let socket = &listener.listening.datagrams[listener.thread];
        for datagram in listener.receiver.receive(socket, &mut room) {
            let key = FlowKey {
                listener: listener.listening.id,
                client: datagram.client,
                local: datagram.local,
            };
            self.pass(core, listener, key, &datagram);
        }
        self.room = Some(room);
    }

    fn pass(
        &mut self,
        core: &mut Core,
        listener: &UdpListener,
        key: FlowKey,
        datagram: &Datagram<'_>,
    ) {
        if let Some(place) = self.by_client.get(&key).copied() {
            let flow = &mut self.flows[place];
            let outcome =
                if flow.is_stale() { Outcome::End } else { flow.send(core, datagram.bytes) };
            match outcome {
                Outcome::Keep => return,
                // The datagram starts another flow.
                Outcome::End => self.end(core, place),
            }
        }
        self.open(core, listener, key, datagram);
    }

    /// Starts a flow with its first datagram.
    fn open(
        &mut self,
        core: &mut Core,
        listener: &UdpListener,
        key: FlowKey,
        datagram: &Datagram<'_>,
    ) {
        let Some(route) = find(core, &listener.listening, key) else {
            return forget(core, &listener.listening, key.client, key.local);
        };
        if !route.admits(key.client.ip()) {
            return route.port.fail(Failure::Source);
        }
        let Some(seat) = self.seat(core, &route.port) else {
            return route.port.fail(Failure::Limit);
        };
        core.shared.flows.force();
        self.generation = self.generation.wrapping_add(1) & Token::GENERATIONS;
        let token = Token::flow(self.flows.vacant_key(), self.generation);
        let Some(flow) = Flow::open(
            core,
            token,
            listener,
            (key.client, key.local),
            route,
            seat,
            datagram.bytes,
        ) else {
            core.shared.flows.leave();
            return;
        };
        self.insert(core, key, token, flow);
    }

    /// Returns a place for a flow of a ServicePort. If its Service has its share already, a flow of its own ends; if its
    /// namespace has, one of the namespace's.
    fn seat(&mut self, core: &Core, port: &Port) -> Option<Seat> {
        let free = || {
            let limit = core.shared.limits.flows;
            limit.saturating_sub(core.shared.flows.get())
        };
        port.owners.seat(Kind::Flows, free()).or_else(|| {
            let (flows, service) = (&self.flows, &port.key.service);
            let is_open = |token: &Token| is_at(flows, *token);
            let some = if port.owners.service_has_share(Kind::Flows, free()) {
                self.of_service.some_of(service, SAMPLE, is_open)
            } else {
                let namespace = &service.namespace;
                self.of_namespace.some_of(namespace, SAMPLE, is_open)
            };
            self.evict(core, some).then(|| port.owners.seat(Kind::Flows, free()))?
        })
    }

    fn insert(&mut self, core: &Core, key: FlowKey, token: Token, flow: Flow) {
        let service = flow.port.key.service.clone();
        self.by_client.insert(key, self.flows.insert(flow));
        self.order.push_back((core.now, token));
        let flows = &self.flows;
        let is_open = |token: &Token| is_at(flows, *token);
        self.of_namespace.add(service.namespace.clone(), token, is_open);
        self.of_service.add(service, token, is_open);
    }

    /// Passes an endpoint's answer on. It may wait for those of other endpoints until [`Flows::flush`].
    pub(super) fn answer(&mut self, core: &mut Core, token: Token) {
        let mut replies = std::mem::take(&mut self.replies);
        if let Some(flow) = self.get(token)
            && let Outcome::End = flow.answer(core, &mut replies)
        {
            self.end(core, token.key());
        }
        self.replies = replies;
    }

    /// Sends the answers that wait.
    pub(super) fn flush(&mut self) {
        self.replies.flush();
    }

    fn get(&mut self, token: Token) -> Option<&mut Flow> {
        let flow = self.flows.get_mut(token.key())?;
        (flow.token.generation() == token.generation()).then_some(flow)
    }

    fn end(&mut self, core: &Core, place: usize) {
        let flow = self.flows.remove(place);
        let (client, local) = flow.client;
        let listener = flow.listening.id;
        self.by_client.remove(&FlowKey {
            listener,
            client,
            local,
        });
        flow.port.closed(flow.endpoint);
        let service = &flow.port.key.service;
        self.of_service.ended(service);
        self.of_namespace.ended(&service.namespace);
        core.shared.flows.leave();
    }

    /// Ends flows that were not used for too long.
    pub(super) fn expire(&mut self, core: &mut Core) {
        let idle = core.shared.udp_idle;
        while let Some((at, token)) = self.order.front().copied() {
            if core.now.duration_since(at) < idle {
                return;
            }
            self.order.pop_front();
            match self.get(token).map(|flow| flow.touched) {
                Some(touched) if core.now.duration_since(touched) < idle => {
                    self.order.push_back((touched, token));
                }
                Some(_) => self.end(core, token.key()),
                None => {}
            }
        }
    }

    /// Returns when the next flow may be over.
    pub(super) fn next(&self, core: &Core) -> Option<Instant> {
        self.order.front().map(|(at, _)| *at + core.shared.udp_idle)
    }

    /// Ends the flow of some that was not used for longest; returns whether there is one.
    fn evict(&mut self, core: &Core, some: impl IntoIterator<Item = Token>) -> bool {
        let flows = some
            .into_iter()
            .filter_map(|token| Some((self.get(token)?.touched, token.key())));
        let idlest = flows.min_by_key(|(touched, _)| *touched);
        idlest.map(|(_, place)| self.end(core, place)).is_some()
    }

    /// Ends a quarter of the flows, so that their files are free.
    pub(super) fn shed(&mut self, core: &mut Core) {
        for _ in 0..self.flows.len().div_ceil(4) {
            let some: Vec<_> = self.order.iter().take(SAMPLE).map(|(_, token)| *token).collect();
            self.evict(core, some);
            // Those that ended do not come again.
            while let Some((_, token)) = self.order.front()
                && !is_at(&self.flows, *token)
            {
                self.order.pop_front();
            }
        }
    }

    /// Gives away all flows.
    pub(super) fn pack(&mut self, core: &Core) -> Vec<FlowState> {
        self.by_client.clear();
        self.order.clear();
        self.of_service = Queues::default();
        self.of_namespace = Queues::default();
        let flows = std::mem::take(&mut self.flows);
        let pack = |(_, flow): (usize, Flow)| {
            flow.port.closed(flow.endpoint);
            core.shared.flows.leave();
            flow.pack(core)
        };
        flows.into_iter().map(pack).collect()
    }

    /// Continues with a flow of an earlier proxy.
    pub(super) fn resume(
        &mut self,
        core: &mut Core,
        state: FlowState,
        listening: Arc<Listening>,
        port: Arc<Port>,
    ) {
        let (client, local) = state.client;
        let key = FlowKey {
            listener: listening.id,
            client,
            local,
        };
        self.generation = self.generation.wrapping_add(1) & Token::GENERATIONS;
        let token = Token::flow(self.flows.vacant_key(), self.generation);
        match Flow::unpack(core, token, state, listening, port) {
            Ok(flow) => {
                core.shared.flows.force();
                self.insert(core, key, token, flow);
            }
            Err(error) => tracing::debug!(%error, "a flow of the earlier proxy cannot be watched"),
        }
    }

    /// Returns what operators see of the flow at a place, and its ServicePort.
    pub(super) fn shown(
        &self,
        core: &Core,
        place: usize,
    ) -> Option<(&ServiceKey, ProxyConnection)> {
        let flow = self.flows.get(place)?;
        Some((&flow.port.key, flow.shown(core)))
    }

    /// Returns the number of places, with those that are free.
    pub(super) fn places(&self) -> usize {
        self.flows.capacity()
    }

    /// Ends the flows of a socket that is closed.
    pub(super) fn leave(&mut self, core: &mut Core, listener: ListenerId) {
        let of_listener = self.flows.iter().filter(|(_, flow)| flow.listening.id == listener);
        let places: Vec<usize> = of_listener.map(|(place, _)| place).collect();
        for place in places {
            self.end(core, place);
        }
    }
}

/// Returns whether a flow is open.
fn is_at(flows: &Slab<Flow>, token: Token) -> bool {
    let flow = flows.get(token.key());
    flow.is_some_and(|flow| flow.token.generation() == token.generation())
}

/// Finds the way of a client's datagrams.
fn find(core: &Core, listening: &Listening, key: FlowKey) -> Option<Arc<Route>> {
    let table = &core.shared.table;
    match listening.role {
        Role::Place(at) => table.route(Family::of(listening.at.ip()), at),
        Role::Captured => {
            let origins = core.shared.origins.as_ref()?;
            let to = origins.find(key.client, captured_at(listening, key.local))?;
            table.route_to(Protocol::Udp, to)
        }
    }
}

/// Has the kernel's rules decide about a client's next datagram, if they led this one here.
fn forget(core: &Core, listening: &Listening, client: SocketAddr, local: Option<IpAddr>) {
    if let (Role::Captured, Some(origins)) = (listening.role, &core.shared.origins) {
        origins.forget(client, captured_at(listening, local));
    }
}

/// Returns the address at which a socket got a datagram.
fn captured_at(listening: &Listening, local: Option<IpAddr>) -> SocketAddr {
    SocketAddr::new(local.unwrap_or(listening.at.ip()), listening.at.port())
}
