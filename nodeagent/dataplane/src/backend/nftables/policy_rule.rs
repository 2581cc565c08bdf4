//! Encodes the steps of the table of NetworkPolicies.

use kplane_model::Protocol;
use kplane_netlink::nflog::{GROUP, PACKET_BYTES, prefix};

use super::policy_schema::{CUT, PolicySet, denied};
use super::policy_step::{ListenerTypes, PolicyStep};
use super::rule::{Expressions, FIRST, Register};
use super::schema::{Field, Set};
use super::uapi::*;

/// `IPPROTO_ICMPV6` (linux/in6.h), and the types of neighbour discovery: `NDISC_ROUTER_SOLICITATION` to
/// `NDISC_REDIRECT` (net/ndisc.h).
const ICMPV6: u8 = 58;
const NEIGHBOUR_TYPES: [u8; 2] = [133, 137];
/// The hop limit of neighbour discovery, and its code (RFC 4861).
const NEIGHBOUR_HOP_LIMIT: u8 = 255;
const NEIGHBOUR_CODE: u8 = 0;
/// Types of listeners to multicast: `ICMPV6_MGM_QUERY` to `ICMPV6_MGM_REDUCTION`, and `ICMPV6_MLD2_REPORT`
/// (linux/icmpv6.h).
const LISTENER_TYPES: [u8; 2] = [130, 132];
const LISTENER_REPORT: u8 = 143;
/// How addresses of multicast begin that no router hands on.
const LINK_MULTICAST: [u8; 2] = [0xff, 0x02];
/// Offsets of the hop limit and of the destination in the IPv6 header.
const HOP_LIMIT_OFFSET: u32 = 7;
const DESTINATION_OFFSET: u32 = 24;
/// Bits of the TCP flags: FIN, SYN, RST, ACK.
const TCP_FLAGS: u8 = 0x17;
const TCP_SYN: u8 = 0x02;
/// Offset of the flags in the TCP header.
const TCP_FLAGS_OFFSET: u32 = 13;

/// Most denied packets of a family and direction that are logged in a second, and at once.
const SAMPLES_A_SECOND: u64 = 50;
const SAMPLES_AT_ONCE: u32 = 50;

impl Expressions<'_, '_> {
    pub(super) fn policy_step(&mut self, step: PolicyStep) {
        match step {
            PolicyStep::KnownConnection => {
                self.conntrack(NFT_CT_STATE, CT_STATES_KNOWN, NFT_CMP_NEQ);
                self.cut_mark(NFT_CMP_NEQ);
            }
            PolicyStep::IsCut => self.cut_mark(NFT_CMP_EQ),
            PolicyStep::TakeUp => self.take_up(),
            PolicyStep::Related => self.conntrack(NFT_CT_STATE, CT_STATE_RELATED, NFT_CMP_NEQ),
            PolicyStep::Invalid => self.conntrack(NFT_CT_STATE, CT_STATE_INVALID, NFT_CMP_NEQ),
            PolicyStep::Reply => {
                self.load_conntrack(NFT_CT_DIRECTION);
                self.compare(NFT_CMP_EQ, &[IP_CT_DIR_REPLY]);
            }
            PolicyStep::Neighbour => self.neighbour(),
            PolicyStep::Listeners(types) => self.listeners(types),
            PolicyStep::MidStream => self.mid_stream(),
            PolicyStep::AddressIn(field, set) => self.address_in(field, set, 0),
            PolicyStep::AddressNotIn(field, set) => self.address_in(field, set, NFT_LOOKUP_F_INV),
            PolicyStep::Anybody => {
                self.zero();
                self.keep_number();
            }
            PolicyStep::Number(field, set) => {
                self.load(field, FIRST, 0);
                self.map(Set::Policy(set).name(), FIRST, FIRST.number());
                self.keep_number();
            }
            PolicyStep::Limit => self.expression("limit", |w| {
                w.bytes(NFTA_LIMIT_RATE, &SAMPLES_A_SECOND.to_be_bytes());
                w.bytes(NFTA_LIMIT_UNIT, &1_u64.to_be_bytes());
                w.u32(NFTA_LIMIT_BURST, SAMPLES_AT_ONCE);
                w.u32(NFTA_LIMIT_TYPE, NFT_LIMIT_PKTS);
            }),
            PolicyStep::Log(direction) => self.expression("log", |w| {
                w.bytes(NFTA_LOG_GROUP, &GROUP.to_be_bytes());
                w.str(NFTA_LOG_PREFIX, prefix(direction));
                w.u32(NFTA_LOG_SNAPLEN, PACKET_BYTES);
                w.bytes(NFTA_LOG_QTHRESHOLD, &1_u16.to_be_bytes());
            }),
            PolicyStep::Count(direction) => self.count(denied(direction)),
            PolicyStep::NumberOf(set) => {
                self.load_key(Set::Policy(set), 0);
                self.map(Set::Policy(set).name(), FIRST, FIRST.number());
                self.keep_number();
            }
            PolicyStep::IsNumber(number) => {
                self.meta(NFT_META_PRIORITY, FIRST);
                self.compare(NFT_CMP_EQ, &number.to_ne_bytes());
            }
            PolicyStep::Accept => self.verdict(NF_ACCEPT.cast_signed(), None),
        }
    }

    /// Loads a number in network byte order.
    pub(super) fn network_number(&mut self, register: Register) {
        self.meta(NFT_META_PRIORITY, register);
        self.expression("byteorder", |w| {
            w.u32(NFTA_BYTEORDER_SREG, register.number());
            w.u32(NFTA_BYTEORDER_DREG, register.number());
            w.u32(NFTA_BYTEORDER_OP, NFT_BYTEORDER_HTON);
            w.u32(NFTA_BYTEORDER_LEN, 4);
            w.u32(NFTA_BYTEORDER_SIZE, 4);
        });
    }

    pub(super) fn zero(&mut self) {
        self.expression("immediate", |w| {
            w.u32(NFTA_IMMEDIATE_DREG, FIRST.number());
            w.nest(NFTA_IMMEDIATE_DATA, |w| w.bytes(NFTA_DATA_VALUE, &[0; 4]));
        });
    }

    pub(super) fn keep_number(&mut self) {
        self.expression("meta", |w| {
            w.u32(NFTA_META_KEY, NFT_META_PRIORITY);
            w.u32(NFTA_META_SREG, FIRST.number());
        });
    }

    fn address_in(&mut self, field: Field, set: PolicySet, flags: u32) {
        self.load(field, FIRST, 0);
        self.member(Set::Policy(set), flags);
    }

    fn cut_mark(&mut self, op: u32) {
        self.load_conntrack(NFT_CT_MARK);
        self.compare(op, &CUT.to_ne_bytes());
    }

    fn take_up(&mut self) {
        self.cut_mark(NFT_CMP_EQ);
        self.zero();
        self.expression("ct", |w| {
            w.u32(NFTA_CT_KEY, NFT_CT_MARK);
            w.u32(NFTA_CT_SREG, FIRST.number());
        });
    }

    /// Only a bridge hands on such packets: a router has taken one from the hop limit when it comes here.
    fn neighbour(&mut self) {
        self.payload(FIRST, NFT_PAYLOAD_NETWORK_HEADER, HOP_LIMIT_OFFSET, 1);
        self.compare(NFT_CMP_EQ, &[NEIGHBOUR_HOP_LIMIT]);
        self.icmp_types(NEIGHBOUR_TYPES);
        self.payload(FIRST, NFT_PAYLOAD_TRANSPORT_HEADER, 1, 1);
        self.compare(NFT_CMP_EQ, &[NEIGHBOUR_CODE]);
    }

    fn listeners(&mut self, types: ListenerTypes) {
        self.payload(FIRST, NFT_PAYLOAD_NETWORK_HEADER, DESTINATION_OFFSET, 2);
        self.compare(NFT_CMP_EQ, &LINK_MULTICAST);
        match types {
            ListenerTypes::First => self.icmp_types(LISTENER_TYPES),
            ListenerTypes::Second => {
                self.meta(NFT_META_L4PROTO, FIRST);
                self.compare(NFT_CMP_EQ, &[ICMPV6]);
                self.payload(FIRST, NFT_PAYLOAD_TRANSPORT_HEADER, 0, 1);
                self.compare(NFT_CMP_EQ, &[LISTENER_REPORT]);
            }
        }
    }

    fn icmp_types(&mut self, [first, last]: [u8; 2]) {
        self.meta(NFT_META_L4PROTO, FIRST);
        self.compare(NFT_CMP_EQ, &[ICMPV6]);
        for (op, value) in [(NFT_CMP_GTE, first), (NFT_CMP_LTE, last)] {
            self.payload(FIRST, NFT_PAYLOAD_TRANSPORT_HEADER, 0, 1);
            self.compare(op, &[value]);
        }
    }

    fn mid_stream(&mut self) {
        self.meta(NFT_META_L4PROTO, FIRST);
        self.compare(NFT_CMP_EQ, &[Protocol::Tcp.number()]);
        self.payload(FIRST, NFT_PAYLOAD_TRANSPORT_HEADER, TCP_FLAGS_OFFSET, 1);
        self.expression("bitwise", |w| {
            w.u32(NFTA_BITWISE_SREG, FIRST.number());
            w.u32(NFTA_BITWISE_DREG, FIRST.number());
            w.u32(NFTA_BITWISE_LEN, 1);
            w.nest(NFTA_BITWISE_MASK, |w| {
                w.bytes(NFTA_DATA_VALUE, &[TCP_FLAGS]);
            });
            w.nest(NFTA_BITWISE_XOR, |w| w.bytes(NFTA_DATA_VALUE, &[0]));
        });
        self.compare(NFT_CMP_NEQ, &[TCP_SYN]);
    }
}
