//! Encodes rules as nf_tables expressions, with the registers that `nft` itself would use.

use kplane_model::Family;

use super::affinity::Group;
use super::affinity_id::{AffinityId, GroupPart};
use super::chain::{RuleStep, counter_name};
use super::schema::{Balancer, Class, Field, Set, TableSettings};
use super::uapi::*;
use super::word::{Word, WordStep, draw_mask};
use crate::backend::PodInterface;
use kplane_netlink::AttributeWriter;

/// A data register of four bytes, 0..16. Longer values continue in the following registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Register(u32);

impl Register {
    /// Returns the register's number (`enum nft_registers`). Each register at a multiple of 16 bytes has an
    /// old name too (`NFT_REG_1..4` = 1..4, `NFT_REG32_00..15` = 8..23). The kernel answers with the old
    /// number.
    pub(super) fn number(self) -> u32 {
        match self.0 % 4 {
            0 => 1 + self.0 / 4,
            _ => 8 + self.0,
        }
    }

    /// Returns the register behind a value of `len` bytes.
    fn after(self, len: usize) -> Self {
        // A key is at most 64 bytes: 16 registers.
        Self(self.0 + u32::try_from(len.div_ceil(4)).unwrap_or(u32::MAX))
    }
}

pub(super) const FIRST: Register = Register(0);
/// Register in which nft puts a second value: behind 16 bytes, whatever the length of the first value.
const SECOND: Register = Register(4);
/// The number of the register of verdicts.
const VERDICT: u32 = NFT_REG_VERDICT;

/// A writer of the expressions of one rule, into `NFTA_RULE_EXPRESSIONS`.
pub(super) struct Expressions<'a, 'b> {
    pub(super) list: &'a mut AttributeWriter<'b>,
    pub(super) family: Family,
    pub(super) settings: TableSettings,
}

impl Expressions<'_, '_> {
    /// Writes one step of a rule.
    pub(super) fn step(&mut self, step: RuleStep) {
        let mark = self.settings.mark();
        match step {
            RuleStep::In(set) => self.look_up(set, 0),
            RuleStep::NotIn(set) => self.look_up(set, NFT_LOOKUP_F_INV),
            RuleStep::Lead(set) => {
                self.load_key(set, 0);
                self.map(set.name(), FIRST, VERDICT);
            }
            RuleStep::OriginalLead(set) => {
                self.load_original_key(set);
                self.map(set.name(), FIRST, VERDICT);
            }
            RuleStep::OriginalIn(set) => {
                self.load_original_key(set);
                self.member(set, 0);
            }
            RuleStep::OriginalNotIn(set) => {
                self.load_original_key(set);
                self.member(set, NFT_LOOKUP_F_INV);
            }
            RuleStep::FromPodInterface => self.interface(NFT_CMP_EQ),
            RuleStep::NotFromPodInterface => self.interface(NFT_CMP_NEQ),
            RuleStep::NewConnection => self.conntrack(NFT_CT_STATE, CT_STATE_NEW, NFT_CMP_NEQ),
            RuleStep::Dnatted => self.conntrack(NFT_CT_STATUS, IPS_DST_NAT, NFT_CMP_NEQ),
            RuleStep::NotDnatted => self.conntrack(NFT_CT_STATUS, IPS_DST_NAT, NFT_CMP_EQ),
            RuleStep::Unanswered => {
                self.conntrack(NFT_CT_STATE, CT_STATE_NEW, NFT_CMP_NEQ);
                self.conntrack(NFT_CT_STATUS, IPS_CONFIRMED, NFT_CMP_NEQ);
            }
            RuleStep::Word(step) => self.word_step(step),
            RuleStep::ToThisNode => self.address_is_local(NFTA_FIB_F_DADDR),
            RuleStep::FromThisNode => self.address_is_local(NFTA_FIB_F_SADDR),
            RuleStep::NotToLoopback => self.loopback(NFT_CMP_NEQ),
            RuleStep::ToLoopback => self.loopback(NFT_CMP_EQ),
            RuleStep::Count(protocol) => self.count(counter_name(protocol)),
            RuleStep::Is(protocol) => {
                self.load(Field::Protocol, FIRST, 0);
                self.compare(NFT_CMP_EQ, &[protocol.number()]);
            }
            RuleStep::OfOurs => {
                self.load_mark();
                self.compare(NFT_CMP_EQ, &self.settings.own_mark.to_ne_bytes());
            }
            RuleStep::Marked => {
                self.load_mark();
                self.mask_xor(mark, 0);
                self.compare(NFT_CMP_EQ, &mark.to_ne_bytes());
            }
            RuleStep::SetMark => self.change_mark(!mark, mark),
            RuleStep::FlipMark => self.change_mark(u32::MAX, mark),
            RuleStep::Dnat(balancer, class) => self.draw(balancer, class),
            RuleStep::UseRemembered(id) => self.use_remembered(id),
            RuleStep::Remember(id, timeout_s) => self.remember(id, timeout_s),
            RuleStep::GotoKeep(id) => self.verdict(NFT_GOTO, Some(&id.name(GroupPart::Keep))),
            RuleStep::Masquerade => self.expression("masq", |w| {
                w.u32(NFTA_MASQ_FLAGS, NF_NAT_RANGE_PROTO_RANDOM_FULLY);
            }),
            RuleStep::TcpReset => self.reject(NFT_REJECT_TCP_RST, 0),
            RuleStep::Unreachable => {
                self.reject(NFT_REJECT_ICMP_UNREACH, port_unreachable(self.family));
            }
            RuleStep::Jump(chain) => self.verdict(NFT_JUMP, Some(chain)),
            RuleStep::Goto(chain) => self.verdict(NFT_GOTO, Some(chain)),
            RuleStep::Return => self.verdict(NFT_RETURN, None),
            RuleStep::Drop => self.verdict(NF_DROP, None),
            RuleStep::Policy(step) => self.policy_step(step),
        }
    }

    pub(super) fn expression(&mut self, name: &str, data: impl FnOnce(&mut AttributeWriter<'_>)) {
        self.list.nest(NFTA_LIST_ELEM, |w| {
            w.str(NFTA_EXPR_NAME, name);
            w.nest(NFTA_EXPR_DATA, data);
        });
    }

    /// Counts the packet in a counter of the table.
    pub(super) fn count(&mut self, counter: &str) {
        self.expression("objref", |w| {
            w.u32(NFTA_OBJREF_IMM_TYPE, NFT_OBJECT_COUNTER);
            w.str(NFTA_OBJREF_IMM_NAME, counter);
        });
    }

    /// Writes a lookup of the packet's key in the set.
    fn look_up(&mut self, set: Set, flags: u32) {
        self.load_key(set, 0);
        self.member(set, flags);
    }

    /// Writes a test whether the key in the first registers is in a set.
    pub(super) fn member(&mut self, set: Set, flags: u32) {
        self.expression("lookup", |w| {
            w.str(NFTA_LOOKUP_SET, set.name());
            w.u32(NFTA_LOOKUP_SREG, FIRST.number());
            w.u32(NFTA_LOOKUP_FLAGS, flags);
        });
    }

    /// Writes a lookup in a map, with the key in `register`. The result goes to the register with number
    /// `to`.
    pub(super) fn map(&mut self, map: &str, register: Register, to: u32) {
        self.expression("lookup", |w| {
            w.str(NFTA_LOOKUP_SET, map);
            w.u32(NFTA_LOOKUP_SREG, register.number());
            w.u32(NFTA_LOOKUP_DREG, to);
            w.u32(NFTA_LOOKUP_FLAGS, 0);
        });
    }

    /// Loads the set's key with the destination that the connection's first packet had.
    fn load_original_key(&mut self, set: Set) {
        set.fields().iter().fold(FIRST, |register, field| {
            let key = match (field, self.family) {
                (Field::Destination, Family::V4) => Some(NFT_CT_DST_IP),
                (Field::Destination, Family::V6) => Some(NFT_CT_DST_IP6),
                (Field::Port, _) => Some(NFT_CT_PROTO_DST),
                (
                    Field::Source
                    | Field::Protocol
                    | Field::Index
                    | Field::Number
                    | Field::NetworkNumber,
                    _,
                ) => None,
            };
            match key {
                Some(key) => self.expression("ct", |w| {
                    w.u32(NFTA_CT_KEY, key);
                    w.u32(NFTA_CT_DREG, register.number());
                    w.u8(NFTA_CT_DIRECTION, IP_CT_DIR_ORIGINAL);
                }),
                None => self.load(*field, register, 0),
            }
            register.after(field.len(self.family))
        });
    }

    fn interface(&mut self, op: u32) {
        // Rules with this step are left out without an interface. An empty name never occurs.
        let interface = self.settings.pod_interface;
        let name = interface.as_ref().map_or(&[0][..], PodInterface::bytes);
        self.meta(NFT_META_IIFNAME, FIRST);
        self.compare(op, name);
    }

    pub(super) fn load_key(&mut self, set: Set, modulus: u32) {
        set.fields().iter().fold(FIRST, |register, field| {
            self.load(*field, register, modulus);
            register.after(field.len(self.family))
        });
    }

    pub(super) fn load(&mut self, field: Field, register: Register, modulus: u32) {
        // struct iphdr: addresses at 12 and 16; struct ipv6hdr: at 8 and 24.
        let (source, destination) = self.family.pick((12, 16), (8, 24));
        let address_len = self.family.pick(4, 16);
        let (base, offset, len) = match field {
            Field::Source => (NFT_PAYLOAD_NETWORK_HEADER, source, address_len),
            Field::Destination => (NFT_PAYLOAD_NETWORK_HEADER, destination, address_len),
            // TCP, UDP and SCTP all have the destination port at offset 2.
            Field::Port => (NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2),
            Field::Protocol => return self.meta(NFT_META_L4PROTO, register),
            Field::Number => return self.meta(NFT_META_PRIORITY, register),
            Field::NetworkNumber => return self.network_number(register),
            Field::Index => {
                return self.expression("numgen", |w| {
                    w.u32(NFTA_NG_DREG, register.number());
                    w.u32(NFTA_NG_MODULUS, modulus);
                    w.u32(NFTA_NG_TYPE, NFT_NG_RANDOM);
                    w.u32(NFTA_NG_OFFSET, 0);
                });
            }
        };
        self.payload(register, base, offset, len);
    }

    pub(super) fn payload(&mut self, register: Register, base: u32, offset: u32, len: u32) {
        self.expression("payload", |w| {
            w.u32(NFTA_PAYLOAD_DREG, register.number());
            w.u32(NFTA_PAYLOAD_BASE, base);
            w.u32(NFTA_PAYLOAD_OFFSET, offset);
            w.u32(NFTA_PAYLOAD_LEN, len);
        });
    }

    /// Compares the first register with `value`.
    pub(super) fn compare(&mut self, op: u32, value: &[u8]) {
        self.expression("cmp", |w| {
            w.u32(NFTA_CMP_SREG, FIRST.number());
            w.u32(NFTA_CMP_OP, op);
            w.nest(NFTA_CMP_DATA, |w| w.bytes(NFTA_DATA_VALUE, value));
        });
    }

    /// Writes: first register = (first register & mask) ^ xor, host byte order.
    fn mask_xor(&mut self, mask: u32, xor: u32) {
        self.expression("bitwise", |w| {
            w.u32(NFTA_BITWISE_SREG, FIRST.number());
            w.u32(NFTA_BITWISE_DREG, FIRST.number());
            w.u32(NFTA_BITWISE_LEN, 4);
            let data = |w: &mut AttributeWriter<'_>, kind, value: u32| {
                w.nest(kind, |w| w.bytes(NFTA_DATA_VALUE, &value.to_ne_bytes()));
            };
            data(w, NFTA_BITWISE_MASK, mask);
            data(w, NFTA_BITWISE_XOR, xor);
        });
    }

    fn word_step(&mut self, step: WordStep) {
        match step {
            WordStep::LookUp(map) => {
                self.load_key(map, 0);
                self.map(map.name(), FIRST, FIRST.number());
                self.keep_number();
            }
            WordStep::Equals(mask, value) => {
                self.word(mask, 0);
                self.compare(NFT_CMP_EQ, &value.to_ne_bytes());
            }
            WordStep::HasAny(mask) => {
                self.word(mask, 0);
                self.compare(NFT_CMP_NEQ, &0_u32.to_ne_bytes());
            }
            WordStep::Draw(map) => {
                self.word(draw_mask(map), 0);
                self.map(map.name(), FIRST, VERDICT);
            }
            WordStep::First(balancer) => {
                self.word(!Word::class_mask(balancer), Word(0).first(balancer).0);
                self.keep_number();
            }
            WordStep::Forget => {
                self.zero();
                self.keep_number();
            }
        }
    }

    /// Loads the word, without the bits outside a mask and with others flipped.
    fn word(&mut self, mask: u32, xor: u32) {
        self.meta(NFT_META_PRIORITY, FIRST);
        self.mask_xor(mask, xor);
    }

    /// Compares `ct KEY & bit` with 0.
    pub(super) fn conntrack(&mut self, key: u32, bit: u32, op: u32) {
        self.load_conntrack(key);
        self.mask_xor(bit, 0);
        self.compare(op, &0_u32.to_ne_bytes());
    }

    pub(super) fn load_conntrack(&mut self, key: u32) {
        self.expression("ct", |w| {
            w.u32(NFTA_CT_KEY, key);
            w.u32(NFTA_CT_DREG, FIRST.number());
        });
    }

    fn address_is_local(&mut self, which: u32) {
        self.expression("fib", |w| {
            w.u32(NFTA_FIB_FLAGS, which);
            w.u32(NFTA_FIB_RESULT, NFT_FIB_RESULT_ADDRTYPE);
            w.u32(NFTA_FIB_DREG, FIRST.number());
        });
        self.compare(NFT_CMP_EQ, &RTN_LOCAL.to_ne_bytes());
    }

    fn loopback(&mut self, op: u32) {
        match self.family {
            Family::V4 => {
                // The first byte is enough for 127.0.0.0/8.
                self.payload(FIRST, NFT_PAYLOAD_NETWORK_HEADER, 16, 1);
                self.compare(op, &[127]);
            }
            Family::V6 => {
                self.load(Field::Destination, FIRST, 0);
                self.compare(op, &std::net::Ipv6Addr::LOCALHOST.octets());
            }
        }
    }

    pub(super) fn meta(&mut self, key: u32, register: Register) {
        self.expression("meta", |w| {
            w.u32(NFTA_META_KEY, key);
            w.u32(NFTA_META_DREG, register.number());
        });
    }

    fn load_mark(&mut self) {
        self.meta(NFT_META_MARK, FIRST);
    }

    fn change_mark(&mut self, mask: u32, xor: u32) {
        self.load_mark();
        self.mask_xor(mask, xor);
        self.expression("meta", |w| {
            w.u32(NFTA_META_KEY, NFT_META_MARK);
            w.u32(NFTA_META_SREG, FIRST.number());
        });
    }

    /// Draws an endpoint. The lookup writes address and port to the registers of the key.
    fn draw(&mut self, balancer: Balancer, class: Class) {
        let map = Set::Endpoints(balancer);
        self.load_key(map, class.modulus());
        self.map(map.name(), FIRST, FIRST.number());
        self.dnat(FIRST.after(self.family.address_len()));
    }

    /// Sends the packet to the client's last endpoint, if it is known.
    fn use_remembered(&mut self, id: AffinityId) {
        let port = FIRST.after(self.family.address_len());
        for (part, register) in Group::maps(self.family).iter().zip([FIRST, port]) {
            self.load(Field::Source, register, 0);
            self.map(&id.name(*part), register, register.number());
        }
        self.dnat(port);
    }

    /// Stores the packet's endpoint. If an endpoint is stored already, it stays, and only its timeout
    /// restarts.
    fn remember(&mut self, id: AffinityId, timeout_s: u32) {
        let family = self.family;
        let (data, behind) = (SECOND, SECOND.after(family.address_len()));
        for part in Group::maps(family) {
            self.load(Field::Source, FIRST, 0);
            match (part, family) {
                (GroupPart::Ports, _) => self.load(Field::Port, data, 0),
                (_, Family::V6) => self.load(Field::Destination, data, 0),
                (_, Family::V4) => {
                    self.load(Field::Destination, data, 0);
                    self.load(Field::Port, behind, 0);
                }
            }
            self.expression("dynset", |w| {
                w.str(NFTA_DYNSET_SET_NAME, &id.name(*part));
                w.u32(NFTA_DYNSET_OP, NFT_DYNSET_OP_UPDATE);
                w.u32(NFTA_DYNSET_SREG_KEY, FIRST.number());
                w.u32(NFTA_DYNSET_SREG_DATA, data.number());
                let ms = u64::from(timeout_s) * 1000;
                w.bytes(NFTA_DYNSET_TIMEOUT, &ms.to_be_bytes());
            });
        }
    }

    /// Translates the destination to the address in the first register and the port in another.
    fn dnat(&mut self, port: Register) {
        let family = self.family;
        self.expression("nat", |w| {
            w.u32(NFTA_NAT_TYPE, NFT_NAT_DNAT);
            w.u32(NFTA_NAT_FAMILY, u32::from(nfproto(family)));
            w.u32(NFTA_NAT_REG_ADDR_MIN, FIRST.number());
            w.u32(NFTA_NAT_REG_ADDR_MAX, FIRST.number());
            w.u32(NFTA_NAT_REG_PROTO_MIN, port.number());
            w.u32(NFTA_NAT_REG_PROTO_MAX, port.number());
            w.u32(NFTA_NAT_FLAGS, NAT_RANGE_ADDRESS_AND_PORT);
        });
    }

    fn reject(&mut self, kind: u32, code: u8) {
        self.expression("reject", |w| {
            w.u32(NFTA_REJECT_TYPE, kind);
            w.u8(NFTA_REJECT_ICMP_CODE, code);
        });
    }

    pub(super) fn verdict(&mut self, code: i32, chain: Option<&str>) {
        self.expression("immediate", |w| {
            w.u32(NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT);
            w.nest(NFTA_IMMEDIATE_DATA, |w| {
                w.nest(NFTA_DATA_VERDICT, |w| {
                    w.bytes(NFTA_VERDICT_CODE, &code.to_be_bytes());
                    if let Some(chain) = chain {
                        w.str(NFTA_VERDICT_CHAIN, chain);
                    }
                });
            });
        });
    }
}

/// Returns `ICMP_PORT_UNREACH` (linux/icmp.h) or `ICMPV6_PORT_UNREACH` (linux/icmpv6.h).
fn port_unreachable(family: Family) -> u8 {
    family.pick(3, 4)
}
