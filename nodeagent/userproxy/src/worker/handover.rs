//! A thread's part in a handover: it gives away what it has, or continues with what another proxy had.

use std::sync::Arc;

use super::accept::Listener;
use super::pair::Pair;
use super::{Owner, Slot, Worker};
use crate::handover::{Bundle, Client, Connection, FlowState};
use crate::listening::Listening;
use crate::port::Port;

impl Worker {
    /// Stops to accept and to read datagrams of clients. Returns the listeners.
    pub(super) fn unlisten(&mut self) -> Vec<Arc<Listening>> {
        let mut listeners = Vec::new();
        let mut kept = Vec::new();
        for (key, slot) in &self.slots {
            if let Some((listening, socket)) = slot.entry.listener() {
                // Paused listeners are not watched.
                let _ = self.core.unwatch(socket);
                listeners.push(listening.clone());
                kept.push(key);
            }
        }
        for key in kept {
            self.slots.remove(key);
        }
        self.paused_until = None;
        listeners
    }

    /// Gives away everything but listeners.
    pub(super) fn pack(&mut self) -> Bundle {
        let mut bundle = Bundle {
            flows: self.flows.pack(&self.core),
            ..Bundle::default()
        };
        let keys: Vec<usize> = self.slots.iter().map(|(key, _)| key).collect();
        for key in keys {
            if let Owner::Wake = self.slots[key].entry {
                continue;
            }
            let Slot { entry, .. } = self.slots.remove(key);
            match entry {
                Owner::Pair(pair) => bundle.connections.push(pair.pack(&self.core)),
                Owner::Connecting(connecting) => bundle.clients.extend(connecting.pack(&self.core)),
                Owner::Wake | Owner::Listener(_) | Owner::UdpListener(_) => {}
            }
        }
        bundle
    }

    /// Continues with a connection of an earlier proxy.
    pub(super) fn resume(&mut self, connection: Connection, port: Arc<Port>) {
        self.core.shared.connections.force();
        self.core.enter();
        let pair = Pair::unpack(connection, port, &self.core);
        let token = self.insert(Owner::Pair(Box::new(pair)));
        self.step(token, |entry, core| match entry {
            Owner::Pair(pair) => pair.begin(core, token),
            other => other.again(core, token),
        });
    }

    /// Continues with a UDP flow of an earlier proxy.
    pub(super) fn resume_flow(
        &mut self,
        flow: FlowState,
        listening: Arc<Listening>,
        port: Arc<Port>,
    ) {
        self.flows.resume(&mut self.core, flow, listening, port);
    }

    /// Finds an endpoint for a client that an earlier proxy had accepted.
    pub(super) fn admit(&mut self, listening: Arc<Listening>, client: Client) {
        self.core.shared.connections.force();
        Listener::new(listening).take(&mut self.core, client.socket, Some(client.address));
    }
}
