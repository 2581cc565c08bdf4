//! Tests in a real kernel, each in a network namespace of its own.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod connected;
mod ipset;
mod iptables;
mod link;
mod policy;
mod reported;
mod sample;
mod socket;
mod table;

use kplane_dataplane::backend::nftables::{TableSettings, push_structure};
use kplane_model::Family;
use kplane_netlink::{Batch, NfSocket};

const SETTINGS: TableSettings = TableSettings {
    masquerade_bit: 14,
    own_mark: 0x50,
    pod_interface: None,
    refuse_loopback: true,
};

fn commit(socket: &mut NfSocket, fill: impl FnOnce(&mut Batch)) {
    let mut batch = Batch::new();
    fill(&mut batch);
    socket.commit(batch.seal(None)).unwrap_or_else(|error| panic!("{error}"));
}

fn socket_with_tables() -> NfSocket {
    let mut socket = NfSocket::open().unwrap();
    commit(&mut socket, |batch| {
        for family in Family::ALL {
            push_structure(batch, family, SETTINGS);
        }
    });
    socket
}
