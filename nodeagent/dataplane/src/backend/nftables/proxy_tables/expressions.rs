//! Expressions of the agent's small tables. Nearly all of them use the first register.

use std::net::{IpAddr, SocketAddr};

use kplane_model::Family;
use kplane_netlink::AttributeWriter;

use super::super::element::{Element, ElementOp, Key, encode};
use super::super::schema::Set;

use super::super::uapi::*;

/// `enum nft_socket_attributes`, `enum nft_socket_keys`.
const NFTA_SOCKET_KEY: u16 = 1;
const NFTA_SOCKET_DREG: u16 = 2;
pub(super) const NFT_SOCKET_TRANSPARENT: u32 = 0;
pub(super) const NFT_SOCKET_MARK: u32 = 1;

/// The first register, under its old name: 16 bytes.
pub(super) const FIRST: u32 = 1;

/// The register behind its 16 bytes, under its old name.
const SECOND: u32 = 2;

/// Encodes an element without data.
pub(super) fn encode_key(list: &mut AttributeWriter<'_>, key: Key) {
    // The encoding does not depend on the set.
    let set = Set::ClusterIps;
    encode(
        list,
        ElementOp::Add,
        &Element {
            set,
            key,
            data: None,
        },
    );
}

/// A writer of a rule's expressions.
pub(super) struct ExpressionWriter<'a, 'b>(pub(super) &'a mut AttributeWriter<'b>);

impl ExpressionWriter<'_, '_> {
    pub(super) fn expression(&mut self, name: &str, data: impl FnOnce(&mut AttributeWriter<'_>)) {
        self.0.nest(NFTA_LIST_ELEM, |w| {
            w.str(NFTA_EXPR_NAME, name);
            w.nest(NFTA_EXPR_DATA, data);
        });
    }

    pub(super) fn meta(&mut self, key: u32, register: u32) {
        self.expression("meta", |w| {
            w.u32(NFTA_META_KEY, key);
            w.u32(NFTA_META_DREG, register);
        });
    }

    pub(super) fn payload(&mut self, register: u32, (base, offset, len): (u32, u32, u32)) {
        self.expression("payload", |w| {
            w.u32(NFTA_PAYLOAD_DREG, register);
            w.u32(NFTA_PAYLOAD_BASE, base);
            w.u32(NFTA_PAYLOAD_OFFSET, offset);
            w.u32(NFTA_PAYLOAD_LEN, len);
        });
    }

    pub(super) fn compare(&mut self, value: &[u8]) {
        self.expression("cmp", |w| {
            w.u32(NFTA_CMP_SREG, FIRST);
            w.u32(NFTA_CMP_OP, NFT_CMP_EQ);
            w.nest(NFTA_CMP_DATA, |w| w.bytes(NFTA_DATA_VALUE, value));
        });
    }

    pub(super) fn is_in(&mut self, set: &str) {
        self.lookup(set, 0);
    }

    pub(super) fn is_not_in(&mut self, set: &str) {
        self.lookup(set, NFT_LOOKUP_F_INV);
    }

    fn lookup(&mut self, set: &str, flags: u32) {
        self.expression("lookup", |w| {
            w.str(NFTA_LOOKUP_SET, set);
            w.u32(NFTA_LOOKUP_SREG, FIRST);
            w.u32(NFTA_LOOKUP_FLAGS, flags);
        });
    }

    /// Adds the first register to a set whose elements end after a time, which begins anew.
    pub(super) fn renew(&mut self, set: &str) {
        self.expression("dynset", |w| {
            w.str(NFTA_DYNSET_SET_NAME, set);
            w.u32(NFTA_DYNSET_OP, NFT_DYNSET_OP_UPDATE);
            w.u32(NFTA_DYNSET_SREG_KEY, FIRST);
        });
    }

    fn immediate(&mut self, data: impl FnOnce(&mut AttributeWriter<'_>)) {
        self.expression("immediate", |w| {
            w.u32(NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT);
            w.nest(NFTA_IMMEDIATE_DATA, data);
        });
    }

    pub(super) fn value(&mut self, register: u32, value: &[u8]) {
        self.expression("immediate", |w| {
            w.u32(NFTA_IMMEDIATE_DREG, register);
            w.nest(NFTA_IMMEDIATE_DATA, |w| w.bytes(NFTA_DATA_VALUE, value));
        });
    }

    /// Loads the destination address (`struct iphdr`, `struct ipv6hdr`).
    pub(super) fn destination(&mut self, family: Family) {
        let (offset, len) = family.pick((16, 4), (24, 16));
        self.payload(FIRST, (NFT_PAYLOAD_NETWORK_HEADER, offset, len));
    }

    /// Loads an address.
    pub(super) fn address(&mut self, ip: IpAddr) {
        match ip {
            IpAddr::V4(ip) => self.value(FIRST, &ip.octets()),
            IpAddr::V6(ip) => self.value(FIRST, &ip.octets()),
        }
    }

    /// Gives a connection this destination.
    pub(super) fn lead_to(&mut self, family: Family, socket: SocketAddr) {
        self.address(socket.ip());
        self.value(SECOND, &socket.port().to_be_bytes());
        self.expression("nat", |w| {
            w.u32(NFTA_NAT_TYPE, NFT_NAT_DNAT);
            w.u32(NFTA_NAT_FAMILY, u32::from(nfproto(family)));
            w.u32(NFTA_NAT_REG_ADDR_MIN, FIRST);
            w.u32(NFTA_NAT_REG_PROTO_MIN, SECOND);
        });
    }

    /// Ends the chain for a packet with a verdict.
    pub(super) fn verdict(&mut self, code: u32) {
        self.immediate(|w| {
            w.nest(NFTA_DATA_VERDICT, |w| w.u32(NFTA_VERDICT_CODE, code));
        });
    }

    /// Loads a property of the socket that gets a packet; without one, the rule does not apply.
    pub(super) fn socket(&mut self, key: u32) {
        self.expression("socket", |w| {
            w.u32(NFTA_SOCKET_KEY, key);
            w.u32(NFTA_SOCKET_DREG, FIRST);
        });
    }

    /// Sets the packet's mark.
    pub(super) fn set_mark(&mut self, mark: u32) {
        self.value(FIRST, &mark.to_ne_bytes());
        self.expression("meta", |w| {
            w.u32(NFTA_META_KEY, NFT_META_MARK);
            w.u32(NFTA_META_SREG, FIRST);
        });
    }
}
