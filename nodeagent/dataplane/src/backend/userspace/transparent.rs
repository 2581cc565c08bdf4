//! Connections to endpoints on this node that keep the client's address (U51, way c).
//!
//! The proxy binds its socket to the client's address. The endpoint answers to that address: the answer leaves the
//! endpoint's pod for this node, where a table marks it and a policy rule delivers it to the proxy. If client and
//! endpoint are neighbours on one link, such as two pods on a bridge, the answer would not pass the node's routing, so the
//! proxy uses the node's address.

use std::fs;
use std::net::IpAddr;

use kplane_model::Family;
use kplane_netlink::{Exit, Routes};
use kplane_userproxy::Transparency;
use parking_lot::Mutex;

use super::super::nftables::proxy_tables::{DivertMarks, DivertTable};
use crate::chain;
use crate::proxy_address::DELIVERY;

/// With it, the kernel checks where an answer comes from by the route for its mark, which is this node: it would drop
/// all answers.
const SOURCE_MARKS: &str = "/proc/sys/net/ipv4/conf/all/src_valid_mark";

/// The delivery of answers, which ends with this object.
pub(super) struct Transparent {
    /// By family; `None` if this kernel does not have the family.
    tables: [Option<DivertTable>; 2],
    routes: Mutex<Option<Routes>>,
}

impl Transparent {
    /// Has answers delivered to the proxy, whose sockets have a mark.
    pub(super) fn open(own_mark: u32) -> Result<Self, String> {
        if own_mark == 0 {
            return Err(
                "--userspace-transparent needs a mark of the proxy's sockets: set --own-mark"
                    .to_owned(),
            );
        }
        if fs::read_to_string(SOURCE_MARKS).is_ok_and(|value| value.trim() == "1") {
            return Err(format!(
                "--userspace-transparent needs {SOURCE_MARKS} = 0: the kernel would drop answers"
            ));
        }
        let marks = marks(own_mark);
        let open = |family| {
            deliver(family, own_mark)?;
            DivertTable::create(family, marks).map_err(|error| chain(&error))
        };
        let v4 = open(Family::V4)?;
        let v6 = open(Family::V6);
        if let Err(reason) = &v6 {
            tracing::info!(
                reason,
                "IPv6 endpoints see the node's address, not the client's"
            );
        }
        Ok(Self {
            tables: [Some(v4), v6.ok()],
            routes: Mutex::default(),
        })
    }

    /// Returns whether answers of a family are delivered.
    pub(super) fn has(&self, family: Family) -> bool {
        self.tables[family as usize].is_some()
    }

    /// Asks the kernel with one socket, which is opened again after an error.
    fn exits(&self, client: IpAddr, endpoint: IpAddr) -> Option<[Exit; 2]> {
        let mut kept = self.routes.lock();
        let mut routes = kept.take().or_else(|| Routes::open().ok())?;
        let exits = [routes.to(client), routes.to(endpoint)];
        let [Ok(to_client), Ok(to_endpoint)] = exits else {
            return None;
        };
        *kept = Some(routes);
        Some([to_client?, to_endpoint?])
    }
}

fn marks(own_mark: u32) -> DivertMarks {
    DivertMarks {
        own: own_mark,
        answers: own_mark ^ 1,
    }
}

/// Has marked packets of a family delivered to this node; returns false if they are already.
pub(super) fn deliver(family: Family, own_mark: u32) -> Result<bool, String> {
    let mark = marks(own_mark).answers;
    let deliver = |mut routes: Routes| routes.deliver(family, DELIVERY, mark);
    let delivered = Routes::open().and_then(deliver);
    delivered.map_err(|error| {
        let table = DELIVERY.table;
        format!("cannot have answers delivered to the proxy by routing table {table}: {error}")
    })
}

impl Transparency for Transparent {
    fn keeps(&self, client: IpAddr, endpoint: IpAddr) -> bool {
        if !self.has(Family::of(client)) || client.is_loopback() {
            return false;
        }
        // The client or the endpoint is this node itself, or both are behind one link.
        matches!(
            self.exits(client, endpoint),
            Some([Exit::Link(to_client), Exit::Link(to_endpoint)]) if to_client != to_endpoint
        )
    }
}
