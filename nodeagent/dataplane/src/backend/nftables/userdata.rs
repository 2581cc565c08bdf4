//! Userdata: bytes that the kernel stores for `nft` without interpreting them. They hold comments, and the
//! `typeof` of set keys, which `nft` needs to print an index in a key.
//!
//! Userdata is a list of type (1 byte), length (1 byte) and value; integers are in host byte order. The
//! numbers are those of libnftnl's `libnftnl/udata.h` and of nft's own enums, taken from the messages that
//! `nft -f` sends. Golden tests compare with these messages.

// Bytes and texts from outside must not end the program.
#![deny(clippy::indexing_slicing)]

use kplane_model::Family;

use super::schema::{Carries, Field, Set};

/// `NFTNL_UDATA_TABLE_COMMENT`, `NFTNL_UDATA_CHAIN_COMMENT`, `NFTNL_UDATA_RULE_COMMENT`.
const COMMENT: u8 = 0;

/// `enum nftnl_udata_set_types`.
const SET_KEY_BYTEORDER: u8 = 0;
const SET_DATA_BYTEORDER: u8 = 1;
const SET_KEY_TYPEOF: u8 = 3;
const SET_DATA_TYPEOF: u8 = 4;
const SET_DATA_INTERVAL: u8 = 6;
const SET_COMMENT: u8 = 7;

/// `enum nftnl_udata_set_typeof_types`: the expression, and the expression's own list.
const TYPEOF_EXPRESSION: u8 = 0;
const TYPEOF_DATA: u8 = 1;

/// nft's `enum byteorder`.
const BYTEORDER_INVALID: u32 = 0;
const BYTEORDER_HOST_ENDIAN: u32 = 1;
const BYTEORDER_BIG_ENDIAN: u32 = 2;

/// nft's `enum expr_types`.
const EXPR_VERDICT: u32 = 1;
const EXPR_PAYLOAD: u32 = 7;
const EXPR_META: u32 = 9;
const EXPR_CONCAT: u32 = 13;
const EXPR_NUMGEN: u32 = 23;

/// nft's `enum proto_desc_id` and its header fields.
const PROTO_TH: u32 = 11;
const TH_DPORT: u32 = 2;
const PROTO_IP: u32 = 12;
const IP_SADDR: u32 = 11;
const IP_DADDR: u32 = 12;
const PROTO_IP6: u32 = 13;
const IP6_SADDR: u32 = 8;
const IP6_DADDR: u32 = 9;

/// Modulus that nft prints for an index in a key: the largest class.
const TYPEOF_MODULUS: u32 = 16384;

/// Returns the userdata of a table, chain or rule that has a comment.
pub(super) fn comment(text: &str) -> Vec<u8> {
    let mut list = TlvList::default();
    list.text(COMMENT, text);
    list.0
}

/// Returns the comment in the userdata of a rule, if the userdata holds nothing else.
pub(super) fn comment_of(userdata: &[u8]) -> Option<&str> {
    let [COMMENT, len, text @ ..] = userdata else {
        return None;
    };
    let text = text.strip_suffix(&[0])?;
    (usize::from(*len) == text.len() + 1).then_some(())?;
    str::from_utf8(text).ok()
}

/// Returns the userdata of a set.
pub(super) fn set(set: Set, family: Family) -> Vec<u8> {
    let mut list = TlvList::default();
    let byteorder = match set.fields() {
        [Field::Source | Field::Destination] => BYTEORDER_BIG_ENDIAN,
        [Field::Number] => BYTEORDER_HOST_ENDIAN,
        _ => BYTEORDER_INVALID,
    };
    list.u32(SET_KEY_BYTEORDER, byteorder);
    let of_data = match set.carries() {
        Carries::Nothing => None,
        Carries::Endpoint | Carries::Chain => Some(BYTEORDER_INVALID),
        Carries::Number => Some(BYTEORDER_HOST_ENDIAN),
    };
    if let Some(byteorder) = of_data {
        list.u32(SET_DATA_BYTEORDER, byteorder);
    }
    list.nest(SET_KEY_TYPEOF, &typeof_key(set.fields(), family));
    let data = match set.carries() {
        Carries::Nothing => None,
        Carries::Endpoint => Some(typeof_key(&[Field::Destination, Field::Port], family)),
        Carries::Chain => Some(typeof_expression(EXPR_VERDICT, &TlvList::default())),
        Carries::Number => Some(typeof_field(Field::Number, family)),
    };
    if let Some(data) = data {
        list.nest(SET_DATA_TYPEOF, &data);
        list.u32(SET_DATA_INTERVAL, 0);
    }
    if let Some(text) = set.comment() {
        list.text(SET_COMMENT, text);
    }
    list.0
}

/// Returns the userdata of a map of clients, with these fields as data.
pub(super) fn clients(data: &[Field], family: Family) -> Vec<u8> {
    let mut list = TlvList::default();
    list.u32(SET_KEY_BYTEORDER, BYTEORDER_BIG_ENDIAN);
    let byteorder = match data {
        [_] => BYTEORDER_BIG_ENDIAN,
        _ => BYTEORDER_INVALID,
    };
    list.u32(SET_DATA_BYTEORDER, byteorder);
    list.nest(SET_KEY_TYPEOF, &typeof_key(&[Field::Source], family));
    list.nest(SET_DATA_TYPEOF, &typeof_key(data, family));
    list.u32(SET_DATA_INTERVAL, 0);
    list.0
}

/// Returns the expressions of which a key consists.
fn typeof_key(fields: &[Field], family: Family) -> TlvList {
    if let [field] = fields {
        return typeof_field(*field, family);
    }
    let mut parts = TlvList::default();
    for (position, field) in (0_u8..).zip(fields) {
        parts.nest(position, &typeof_field(*field, family));
    }
    typeof_expression(EXPR_CONCAT, &parts)
}

fn typeof_field(field: Field, family: Family) -> TlvList {
    let (expression, values) = match (field, family) {
        (Field::Source, Family::V4) => (EXPR_PAYLOAD, &[PROTO_IP, IP_SADDR][..]),
        (Field::Source, Family::V6) => (EXPR_PAYLOAD, &[PROTO_IP6, IP6_SADDR][..]),
        (Field::Destination, Family::V4) => (EXPR_PAYLOAD, &[PROTO_IP, IP_DADDR][..]),
        (Field::Destination, Family::V6) => (EXPR_PAYLOAD, &[PROTO_IP6, IP6_DADDR][..]),
        (Field::Port, _) => (EXPR_PAYLOAD, &[PROTO_TH, TH_DPORT][..]),
        (Field::Protocol, _) => (EXPR_META, &[super::uapi::NFT_META_L4PROTO][..]),
        (Field::Number | Field::NetworkNumber, _) => {
            (EXPR_META, &[super::uapi::NFT_META_PRIORITY][..])
        }
        (Field::Index, _) => (
            EXPR_NUMGEN,
            &[super::uapi::NFT_NG_RANDOM, TYPEOF_MODULUS, 0][..],
        ),
    };
    let mut data = TlvList::default();
    for (kind, value) in (0_u8..).zip(values) {
        data.u32(kind, *value);
    }
    typeof_expression(expression, &data)
}

fn typeof_expression(expression: u32, data: &TlvList) -> TlvList {
    let mut list = TlvList::default();
    list.u32(TYPEOF_EXPRESSION, expression);
    list.nest(TYPEOF_DATA, data);
    list
}

/// A list of types, lengths and values.
#[derive(Debug, Default)]
struct TlvList(Vec<u8>);

impl TlvList {
    fn u32(&mut self, kind: u8, value: u32) {
        self.push(kind, &value.to_ne_bytes());
    }

    fn text(&mut self, kind: u8, text: &str) {
        self.push(kind, &[text.as_bytes(), &[0]].concat());
    }

    fn nest(&mut self, kind: u8, list: &TlvList) {
        self.push(kind, &list.0);
    }

    fn push(&mut self, kind: u8, value: &[u8]) {
        // All values are constants of at most about 130 bytes; a test builds every set.
        let len = u8::try_from(value.len()).unwrap_or(u8::MAX);
        debug_assert_eq!(usize::from(len), value.len());
        self.0.extend_from_slice(&[kind, len]);
        self.0.extend_from_slice(value);
    }
}
