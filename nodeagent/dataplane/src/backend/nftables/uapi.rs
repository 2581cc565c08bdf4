//! Numbers of the kernel's nf_tables interface, from linux/netfilter/nf_tables.h unless noted otherwise.

pub(super) use kplane_netlink::conntrack::IPS_DST_NAT;
pub(super) use kplane_netlink::nfproto;

/// `NFNL_SUBSYS_NFTABLES` (linux/netfilter/nfnetlink.h).
const NFNL_SUBSYS_NFTABLES: u16 = 10;

/// `NLM_F_EXCL` (linux/netlink.h): fail when the object exists.
pub(super) const NLM_F_EXCL: u16 = 0x200;
/// `NLM_F_CREATE`.
pub(super) const NLM_F_CREATE: u16 = 0x400;
/// `NLM_F_APPEND`: a rule goes to the end of its chain.
pub(super) const NLM_F_APPEND: u16 = 0x800;

/// `enum nf_tables_msg_types`, with the subsystem in the upper byte.
pub(crate) mod msg {
    const SUBSYSTEM: u16 = super::NFNL_SUBSYS_NFTABLES << 8;
    pub(in super::super) const NEWTABLE: u16 = SUBSYSTEM;
    pub(crate) const GETTABLE: u16 = SUBSYSTEM | 1;
    pub(crate) const DELTABLE: u16 = SUBSYSTEM | 2;
    pub(in super::super) const NEWCHAIN: u16 = SUBSYSTEM | 3;
    pub(crate) const GETCHAIN: u16 = SUBSYSTEM | 4;
    pub(crate) const DELCHAIN: u16 = SUBSYSTEM | 5;
    pub(in super::super) const NEWRULE: u16 = SUBSYSTEM | 6;
    pub(crate) const GETRULE: u16 = SUBSYSTEM | 7;
    pub(crate) const DELRULE: u16 = SUBSYSTEM | 8;
    pub(in super::super) const NEWSET: u16 = SUBSYSTEM | 9;
    pub(in super::super) const GETSET: u16 = SUBSYSTEM | 10;
    pub(in super::super) const DELSET: u16 = SUBSYSTEM | 11;
    pub(in super::super) const NEWSETELEM: u16 = SUBSYSTEM | 12;
    pub(in super::super) const GETSETELEM: u16 = SUBSYSTEM | 13;
    pub(in super::super) const DELSETELEM: u16 = SUBSYSTEM | 14;
    pub(in super::super) const NEWOBJ: u16 = SUBSYSTEM | 18;
    pub(in super::super) const GETOBJ: u16 = SUBSYSTEM | 19;
    /// As `DELTABLE`, and a missing table is no error (Linux 6.3).
    pub(in super::super) const DESTROYTABLE: u16 = SUBSYSTEM | 26;
}

/// `enum nft_list_attributes`.
pub(crate) const NFTA_LIST_ELEM: u16 = 1;

/// `enum nft_table_flags`: only the owner's socket changes the table, which ends with it (Linux 5.12).
pub(super) const NFT_TABLE_F_OWNER: u32 = 2;
/// The table outlives its owner, and anybody may become the next one (Linux 6.9).
pub(super) const NFT_TABLE_F_PERSIST: u32 = 4;

/// `enum nft_table_attributes`.
pub(crate) const NFTA_TABLE_NAME: u16 = 1;
pub(super) const NFTA_TABLE_FLAGS: u16 = 2;
pub(super) const NFTA_TABLE_USE: u16 = 3;
pub(super) const NFTA_TABLE_USERDATA: u16 = 6;

/// `enum nft_chain_attributes`.
pub(crate) const NFTA_CHAIN_TABLE: u16 = 1;
pub(crate) const NFTA_CHAIN_NAME: u16 = 3;
pub(crate) const NFTA_CHAIN_HOOK: u16 = 4;
pub(crate) const NFTA_CHAIN_POLICY: u16 = 5;
/// Number of the chain's rules, and of jumps to it.
pub(crate) const NFTA_CHAIN_USE: u16 = 6;
pub(super) const NFTA_CHAIN_TYPE: u16 = 7;
pub(super) const NFTA_CHAIN_USERDATA: u16 = 12;

/// `enum nft_hook_attributes`.
pub(crate) const NFTA_HOOK_HOOKNUM: u16 = 1;
pub(super) const NFTA_HOOK_PRIORITY: u16 = 2;

/// `enum nft_rule_attributes`.
pub(crate) const NFTA_RULE_TABLE: u16 = 1;
pub(crate) const NFTA_RULE_CHAIN: u16 = 2;
pub(crate) const NFTA_RULE_HANDLE: u16 = 3;
pub(crate) const NFTA_RULE_EXPRESSIONS: u16 = 4;
pub(super) const NFTA_RULE_USERDATA: u16 = 7;

/// `enum nft_set_attributes`.
pub(super) const NFTA_SET_TABLE: u16 = 1;
pub(super) const NFTA_SET_NAME: u16 = 2;
pub(super) const NFTA_SET_FLAGS: u16 = 3;
pub(super) const NFTA_SET_KEY_TYPE: u16 = 4;
pub(super) const NFTA_SET_KEY_LEN: u16 = 5;
pub(super) const NFTA_SET_DATA_TYPE: u16 = 6;
pub(super) const NFTA_SET_DATA_LEN: u16 = 7;
pub(super) const NFTA_SET_DESC: u16 = 9;
pub(super) const NFTA_SET_ID: u16 = 10;
pub(super) const NFTA_SET_TIMEOUT: u16 = 11;
pub(super) const NFTA_SET_USERDATA: u16 = 13;
pub(super) const NFTA_SET_OBJ_TYPE: u16 = 15;
pub(super) const NFTA_SET_EXPR: u16 = 17;
pub(super) const NFTA_SET_EXPRESSIONS: u16 = 18;

/// `enum nft_set_flags`.
pub(super) const NFT_SET_INTERVAL: u32 = 0x4;
pub(super) const NFT_SET_MAP: u32 = 0x8;
pub(super) const NFT_SET_TIMEOUT: u32 = 0x10;
/// Flag of sets that packets write to; nft calls it `dynamic`.
pub(super) const NFT_SET_EVAL: u32 = 0x20;
pub(super) const NFT_SET_CONCAT: u32 = 0x80;

/// `enum nft_data_types`: the type of verdicts. Its length is that of the kernel's own
/// `struct nft_verdict`, on 64-bit machines.
pub(super) const NFT_DATA_VERDICT: u32 = 0xffff_ff00;
pub(super) const VERDICT_LEN: u32 = 16;

/// `enum nft_set_desc_attributes`, `enum nft_set_field_attributes`.
pub(super) const NFTA_SET_DESC_SIZE: u16 = 1;
pub(super) const NFTA_SET_DESC_CONCAT: u16 = 2;
pub(super) const NFTA_SET_FIELD_LEN: u16 = 1;

/// `enum nft_set_elem_list_attributes`.
pub(super) const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
pub(super) const NFTA_SET_ELEM_LIST_SET: u16 = 2;
pub(super) const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;

/// `enum nft_set_elem_attributes`.
pub(super) const NFTA_SET_ELEM_KEY: u16 = 1;
pub(super) const NFTA_SET_ELEM_DATA: u16 = 2;
pub(super) const NFTA_SET_ELEM_FLAGS: u16 = 3;
pub(super) const NFTA_SET_ELEM_EXPIRATION: u16 = 5;
pub(super) const NFTA_SET_ELEM_EXPR: u16 = 7;
pub(super) const NFTA_SET_ELEM_KEY_END: u16 = 10;

/// `enum nft_set_elem_flags`: the key is the first key behind an interval.
pub(super) const NFT_SET_ELEM_INTERVAL_END: u32 = 1;

/// `enum nft_data_attributes`.
pub(super) const NFTA_DATA_VALUE: u16 = 1;
pub(crate) const NFTA_DATA_VERDICT: u16 = 2;

/// `enum nft_verdict_attributes`.
pub(crate) const NFTA_VERDICT_CODE: u16 = 1;
pub(crate) const NFTA_VERDICT_CHAIN: u16 = 2;

/// `enum nft_verdicts`, and `NF_DROP` and `NF_ACCEPT` (linux/netfilter.h).
pub(crate) const NFT_JUMP: i32 = -3;
pub(crate) const NFT_GOTO: i32 = -4;
pub(super) const NFT_RETURN: i32 = -5;
pub(super) const NF_DROP: i32 = 0;
pub(super) const NF_ACCEPT: u32 = 1;

/// `enum nft_expr_attributes`.
pub(crate) const NFTA_EXPR_NAME: u16 = 1;
pub(crate) const NFTA_EXPR_DATA: u16 = 2;

/// `enum nft_immediate_attributes`; register 0 is `NFT_REG_VERDICT`.
pub(super) const NFTA_IMMEDIATE_DREG: u16 = 1;
pub(crate) const NFTA_IMMEDIATE_DATA: u16 = 2;
pub(super) const NFT_REG_VERDICT: u32 = 0;

/// `enum nft_bitwise_attributes`.
pub(super) const NFTA_BITWISE_SREG: u16 = 1;
pub(super) const NFTA_BITWISE_DREG: u16 = 2;
pub(super) const NFTA_BITWISE_LEN: u16 = 3;
pub(super) const NFTA_BITWISE_MASK: u16 = 4;
pub(super) const NFTA_BITWISE_XOR: u16 = 5;

/// `enum nft_cmp_attributes`, `enum nft_cmp_ops`.
pub(super) const NFTA_CMP_SREG: u16 = 1;
pub(super) const NFTA_CMP_OP: u16 = 2;
pub(super) const NFTA_CMP_DATA: u16 = 3;
pub(super) const NFT_CMP_EQ: u32 = 0;
pub(super) const NFT_CMP_NEQ: u32 = 1;
pub(super) const NFT_CMP_LTE: u32 = 3;
pub(super) const NFT_CMP_GTE: u32 = 5;

/// `enum nft_byteorder_attributes`, `enum nft_byteorder_ops`.
pub(super) const NFTA_BYTEORDER_SREG: u16 = 1;
pub(super) const NFTA_BYTEORDER_DREG: u16 = 2;
pub(super) const NFTA_BYTEORDER_OP: u16 = 3;
pub(super) const NFTA_BYTEORDER_LEN: u16 = 4;
pub(super) const NFTA_BYTEORDER_SIZE: u16 = 5;
pub(super) const NFT_BYTEORDER_HTON: u32 = 1;

/// `enum nft_lookup_attributes`, `enum nft_lookup_flags`.
pub(super) const NFTA_LOOKUP_SET: u16 = 1;
pub(super) const NFTA_LOOKUP_SREG: u16 = 2;
pub(super) const NFTA_LOOKUP_DREG: u16 = 3;
pub(super) const NFTA_LOOKUP_FLAGS: u16 = 5;
pub(super) const NFT_LOOKUP_F_INV: u32 = 1;

/// `enum nft_payload_attributes`, `enum nft_payload_bases`.
pub(super) const NFTA_PAYLOAD_DREG: u16 = 1;
pub(super) const NFTA_PAYLOAD_BASE: u16 = 2;
pub(super) const NFTA_PAYLOAD_OFFSET: u16 = 3;
pub(super) const NFTA_PAYLOAD_LEN: u16 = 4;
pub(super) const NFT_PAYLOAD_NETWORK_HEADER: u32 = 1;
pub(super) const NFT_PAYLOAD_TRANSPORT_HEADER: u32 = 2;

/// `enum nft_meta_attributes`, `enum nft_meta_keys`.
pub(super) const NFTA_META_DREG: u16 = 1;
pub(super) const NFTA_META_KEY: u16 = 2;
pub(super) const NFTA_META_SREG: u16 = 3;
pub(super) const NFT_META_PRIORITY: u32 = 2;
pub(super) const NFT_META_MARK: u32 = 3;
pub(super) const NFT_META_IIFNAME: u32 = 6;
pub(super) const NFT_META_L4PROTO: u32 = 16;

/// `enum nft_ct_attributes`, `enum nft_ct_keys`.
pub(super) const NFTA_CT_DREG: u16 = 1;
pub(super) const NFTA_CT_KEY: u16 = 2;
pub(super) const NFTA_CT_DIRECTION: u16 = 3;
pub(super) const NFTA_CT_SREG: u16 = 4;
pub(super) const NFT_CT_STATE: u32 = 0;
pub(super) const NFT_CT_DIRECTION: u32 = 1;
pub(super) const NFT_CT_STATUS: u32 = 2;
pub(super) const NFT_CT_MARK: u32 = 3;
pub(super) const NFT_CT_PROTO_DST: u32 = 12;
pub(super) const NFT_CT_DST_IP: u32 = 20;
pub(super) const NFT_CT_DST_IP6: u32 = 22;
/// `IP_CT_DIR_ORIGINAL` (linux/netfilter/nf_conntrack_tuple_common.h).
pub(super) const IP_CT_DIR_ORIGINAL: u8 = 0;
/// `IP_CT_DIR_REPLY`.
pub(super) const IP_CT_DIR_REPLY: u8 = 1;
/// `NF_CT_STATE_INVALID_BIT` (linux/netfilter/nf_conntrack_common.h).
pub(super) const CT_STATE_INVALID: u32 = 1;
/// `NF_CT_STATE_BIT(IP_CT_RELATED)`.
pub(super) const CT_STATE_RELATED: u32 = 4;
/// `NF_CT_STATE_BIT(IP_CT_NEW)` (linux/netfilter/nf_conntrack_common.h).
pub(super) const CT_STATE_NEW: u32 = 8;
/// `NF_CT_STATE_BIT(IP_CT_ESTABLISHED) | NF_CT_STATE_BIT(IP_CT_RELATED)`.
pub(super) const CT_STATES_KNOWN: u32 = 2 | 4;
/// `IPS_CONFIRMED` (linux/netfilter/nf_conntrack_common.h).
pub(super) const IPS_CONFIRMED: u32 = 1 << 3;

/// `enum nft_dynset_attributes`, `enum nft_dynset_ops`.
pub(super) const NFTA_DYNSET_SET_NAME: u16 = 1;
pub(super) const NFTA_DYNSET_OP: u16 = 3;
pub(super) const NFTA_DYNSET_SREG_KEY: u16 = 4;
pub(super) const NFTA_DYNSET_SREG_DATA: u16 = 5;
pub(super) const NFTA_DYNSET_TIMEOUT: u16 = 6;
pub(super) const NFT_DYNSET_OP_UPDATE: u32 = 1;

/// `enum nft_numgen_attributes`, `enum nft_ng_types`.
pub(super) const NFTA_NG_DREG: u16 = 1;
pub(super) const NFTA_NG_MODULUS: u16 = 2;
pub(super) const NFTA_NG_TYPE: u16 = 3;
pub(super) const NFTA_NG_OFFSET: u16 = 4;
pub(super) const NFT_NG_RANDOM: u32 = 1;

/// `enum nft_fib_attributes`, `enum nft_fib_flags`, `enum nft_fib_result`.
pub(super) const NFTA_FIB_DREG: u16 = 1;
pub(super) const NFTA_FIB_RESULT: u16 = 2;
pub(super) const NFTA_FIB_FLAGS: u16 = 3;
pub(super) const NFTA_FIB_F_SADDR: u32 = 1;
pub(super) const NFTA_FIB_F_DADDR: u32 = 2;
pub(super) const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
/// `RTN_LOCAL` (linux/rtnetlink.h).
pub(super) const RTN_LOCAL: u32 = 2;

/// `enum nft_nat_attributes`, `enum nft_nat_types`.
pub(super) const NFTA_NAT_TYPE: u16 = 1;
pub(super) const NFTA_NAT_FAMILY: u16 = 2;
pub(super) const NFTA_NAT_REG_ADDR_MIN: u16 = 3;
pub(super) const NFTA_NAT_REG_ADDR_MAX: u16 = 4;
pub(super) const NFTA_NAT_REG_PROTO_MIN: u16 = 5;
pub(super) const NFTA_NAT_REG_PROTO_MAX: u16 = 6;
pub(super) const NFTA_NAT_FLAGS: u16 = 7;
pub(super) const NFT_NAT_DNAT: u32 = 1;
/// `NF_NAT_RANGE_MAP_IPS | NF_NAT_RANGE_PROTO_SPECIFIED` (linux/netfilter/nf_nat.h).
pub(super) const NAT_RANGE_ADDRESS_AND_PORT: u32 = 1 | 2;

/// `enum nft_masq_attributes`.
pub(super) const NFTA_MASQ_FLAGS: u16 = 1;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY` (linux/netfilter/nf_nat.h).
pub(super) const NF_NAT_RANGE_PROTO_RANDOM_FULLY: u32 = 1 << 4;

/// `enum nft_reject_attributes`, `enum nft_reject_types`.
pub(super) const NFTA_REJECT_TYPE: u16 = 1;
pub(super) const NFTA_REJECT_ICMP_CODE: u16 = 2;
pub(super) const NFT_REJECT_ICMP_UNREACH: u32 = 0;
pub(super) const NFT_REJECT_TCP_RST: u32 = 1;

/// `enum nft_object_attributes`.
pub(super) const NFTA_OBJ_TABLE: u16 = 1;
pub(super) const NFTA_OBJ_NAME: u16 = 2;
pub(super) const NFTA_OBJ_TYPE: u16 = 3;
pub(super) const NFTA_OBJ_DATA: u16 = 4;
/// `NFT_OBJECT_COUNTER`.
pub(super) const NFT_OBJECT_COUNTER: u32 = 1;
/// `enum nft_counter_attributes`.
pub(super) const NFTA_COUNTER_BYTES: u16 = 1;
pub(super) const NFTA_COUNTER_PACKETS: u16 = 2;
/// `enum nft_limit_attributes`, `enum nft_limit_type`.
pub(super) const NFTA_LIMIT_RATE: u16 = 1;
pub(super) const NFTA_LIMIT_UNIT: u16 = 2;
pub(super) const NFTA_LIMIT_BURST: u16 = 3;
pub(super) const NFTA_LIMIT_TYPE: u16 = 4;
pub(super) const NFT_LIMIT_PKTS: u32 = 0;
/// `enum nft_log_attributes`.
pub(super) const NFTA_LOG_GROUP: u16 = 1;
pub(super) const NFTA_LOG_PREFIX: u16 = 2;
pub(super) const NFTA_LOG_SNAPLEN: u16 = 3;
pub(super) const NFTA_LOG_QTHRESHOLD: u16 = 4;
/// `enum nft_objref_attributes`.
pub(super) const NFTA_OBJREF_IMM_TYPE: u16 = 1;
pub(super) const NFTA_OBJREF_IMM_NAME: u16 = 2;
