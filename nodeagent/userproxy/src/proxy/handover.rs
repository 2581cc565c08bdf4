//! The handover from one proxy to the next, on the side of the proxy as a whole.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use kplane_model::{Family, Protocol};
use parking_lot::MutexGuard;

use super::Proxy;
use crate::handover::{Bundle, Client};
use crate::listening::{ListenerId, Listening, Role};
use crate::worker::Command;

/// Longest wait for a thread's answer.
const ANSWER: Duration = Duration::from_secs(5);

/// A listener of an earlier proxy that is not served yet.
#[derive(Debug)]
pub(crate) struct Heir {
    listening: Arc<Listening>,
    /// Clients that were accepted and have no endpoint.
    clients: Vec<Client>,
    /// Whether it is to be served.
    is_claimed: bool,
}

impl Proxy {
    /// Takes everything out of the proxy, without closing it. No data moves afterwards.
    pub fn pack(&self) -> Bundle {
        let mut bundle = Bundle::default();
        // First no thread accepts any more, so that none gives another one a client while that packs.
        for listening in self.ask(Command::Unlisten).into_iter().flatten() {
            let is_known = |known: &Arc<Listening>| known.id == listening.id;
            if !bundle.listeners.iter().any(is_known) {
                bundle.listeners.push(listening);
            }
        }
        for mut part in self.ask(Command::Pack) {
            bundle.connections.append(&mut part.connections);
            bundle.clients.append(&mut part.clients);
            bundle.flows.append(&mut part.flows);
        }
        for mut heir in self.heirs().drain(..) {
            bundle.clients.append(&mut heir.clients);
            bundle.listeners.push(heir.listening);
        }
        bundle
    }

    /// Goes on with what [`Proxy::pack`] took out.
    pub fn take_back(&self, bundle: Bundle) {
        self.resume(bundle);
        for heir in self.heirs().drain(..) {
            self.begin(heir);
        }
    }

    fn ask<T>(&self, question: impl Fn(Sender<T>) -> Command) -> Vec<T> {
        let (answers, all) = mpsc::channel();
        for inbox in &self.shared.inboxes {
            inbox.send(question(answers.clone()));
        }
        drop(answers);
        // Each thread answers, or drops the sender when it ends.
        std::iter::from_fn(|| all.recv_timeout(ANSWER).ok()).collect()
    }

    fn heirs(&self) -> MutexGuard<'_, Vec<Heir>> {
        self.inherited.lock()
    }

    /// Continues with what an earlier proxy had. Connections and flows go on at once; a listener when [`Proxy::listen`]
    /// names its address and role, and, in role [`Role::Captured`], when [`Proxy::settle`] is called.
    pub(crate) fn resume(&self, bundle: Bundle) {
        let inboxes = &self.shared.inboxes;
        let table = &self.shared.table;
        let mut heirs = self.heirs();
        heirs.extend(bundle.listeners.into_iter().map(|listening| Heir {
            listening,
            clients: Vec::new(),
            is_claimed: false,
        }));
        let places: HashMap<ListenerId, usize> =
            (0..).zip(&*heirs).map(|(place, heir)| (heir.listening.id, place)).collect();
        for (connection, inbox) in bundle.connections.into_iter().zip(inboxes.iter().cycle()) {
            let port = table.inherit(&connection.key);
            inbox.send(Command::Resume(Box::new(connection), port));
        }
        for flow in bundle.flows {
            let listening = places.get(&flow.listener).map(|place| &heirs[*place].listening);
            // Its client's datagrams arrive at this thread.
            let inbox = &inboxes[flow.number % inboxes.len()];
            if let Some(listening) = listening.filter(|it| flow.number < it.datagrams.len()) {
                let port = table.inherit(&flow.key);
                inbox.send(Command::ResumeFlow(Box::new(flow), listening.clone(), port));
            }
        }
        for client in bundle.clients {
            if let Some(place) = places.get(&client.listener) {
                heirs[*place].clients.push(client);
            }
        }
    }

    /// Finds a listener of an earlier proxy for an address and role. Port 0 is any port, and so is each port for a place,
    /// since a place has one socket at an address.
    pub(crate) fn claim(
        &self,
        at: SocketAddr,
        protocol: Protocol,
        role: Role,
    ) -> Option<(ListenerId, SocketAddr)> {
        let mut heirs = self.heirs();
        let fits = |heir: &Heir| {
            let of = &heir.listening;
            let is_port = at.port() == 0 || of.at.port() == at.port() || role != Role::Captured;
            !heir.is_claimed
                && (of.role, of.protocol(), of.at.ip()) == (role, protocol, at.ip())
                && is_port
        };
        let place = heirs.iter().position(fits)?;
        let found = (heirs[place].listening.id, heirs[place].listening.at);
        match role {
            // Its ServicePort is in the table.
            Role::Place(_) => self.begin(heirs.swap_remove(place)),
            Role::Captured => heirs[place].is_claimed = true,
        }
        Some(found)
    }

    /// Serves the listeners of an earlier proxy that were named for a family, and closes those that were not. Called when
    /// the family's ServicePorts are in the table.
    pub fn settle(&self, family: Family) {
        let mut heirs = self.heirs();
        let of_family = |heir: &mut Heir| Family::of(heir.listening.at.ip()) == family;
        let settled: Vec<Heir> = heirs.extract_if(.., of_family).collect();
        drop(heirs);
        for heir in settled {
            if heir.is_claimed {
                self.begin(heir);
            } else {
                // Flows end, and clients that wait get a reset or an end.
                self.close(heir.listening.id);
            }
        }
    }

    /// Drops a listener that is not served yet.
    pub(crate) fn disinherit(&self, id: ListenerId) {
        self.heirs().retain(|heir| heir.listening.id != id);
    }

    fn begin(&self, heir: Heir) {
        let inboxes = &self.shared.inboxes;
        for inbox in inboxes {
            inbox.send(Command::Listen(heir.listening.clone()));
        }
        for (client, inbox) in heir.clients.into_iter().zip(inboxes.iter().cycle()) {
            inbox.send(Command::Admit(heir.listening.clone(), client));
        }
    }
}
