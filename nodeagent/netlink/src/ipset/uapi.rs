//! Numbers of the kernel's interface (linux/netfilter/ipset/ip_set.h).

/// `NFNL_SUBSYS_IPSET << 8`.
pub(super) const IPSET: u16 = 6 << 8;
/// `IPSET_PROTOCOL_MIN`, which every kernel since 2.6.39 understands.
pub(super) const IPSET_PROTOCOL: u8 = 6;

/// `IPSET_CMD_*`.
pub(super) mod cmd {
    pub(in super::super) const CREATE: u16 = 2;
    pub(in super::super) const DESTROY: u16 = 3;
    pub(in super::super) const SWAP: u16 = 6;
    pub(in super::super) const LIST: u16 = 7;
    pub(in super::super) const ADD: u16 = 9;
    pub(in super::super) const DEL: u16 = 10;
    pub(in super::super) const TYPE: u16 = 13;
}

/// `IPSET_ATTR_*` of a command.
pub(super) mod attr {
    pub(in super::super) const PROTOCOL: u16 = 1;
    pub(in super::super) const SETNAME: u16 = 2;
    /// `IPSET_ATTR_SETNAME2` as well.
    pub(in super::super) const TYPENAME: u16 = 3;
    pub(in super::super) const REVISION: u16 = 4;
    pub(in super::super) const FAMILY: u16 = 5;
    pub(in super::super) const FLAGS: u16 = 6;
    pub(in super::super) const DATA: u16 = 7;
    pub(in super::super) const ADT: u16 = 8;
    pub(in super::super) const REVISION_MIN: u16 = 10;
}

/// `IPSET_ATTR_*` of a set or entry.
pub(super) mod data {
    pub(in super::super) const IP: u16 = 1;
    pub(in super::super) const PORT: u16 = 4;
    pub(in super::super) const PORT_TO: u16 = 5;
    pub(in super::super) const PROTO: u16 = 7;
    pub(in super::super) const HASHSIZE: u16 = 18;
    pub(in super::super) const MAXELEM: u16 = 19;
    /// The numbers for entries; for sets they mean something else.
    pub(in super::super) const IP2: u16 = 20;
    pub(in super::super) const CIDR2: u16 = 21;
    pub(in super::super) const IPADDR_IPV4: u16 = 1;
    pub(in super::super) const IPADDR_IPV6: u16 = 2;
}

/// `NLA_F_NET_BYTEORDER`; the kernel refuses numbers without it.
pub(super) const NETWORK_ORDER: u16 = 1 << 14;
/// `IPSET_FLAG_LIST_SETNAME`: names only.
pub(super) const FLAG_NAMES: u32 = 1 << 1;
/// The newest revision of a type that kplane requests: programs of 2014 can list it.
pub(super) const REVISION_MAX: u8 = 3;
/// `IPSET_DEFAULT_HASHSIZE`; grows by itself.
pub(super) const HASHSIZE: u32 = 1024;

/// `IPSET_ERR_*`, which the C library does not define.
pub mod code {
    /// The type does not exist.
    pub const FIND_TYPE: i32 = 4098;
    /// The set is in use.
    pub const BUSY: i32 = 4100;
    /// The set is full (`IPSET_ERR_HASH_FULL`).
    pub const HASH_FULL: i32 = 4352;
}
