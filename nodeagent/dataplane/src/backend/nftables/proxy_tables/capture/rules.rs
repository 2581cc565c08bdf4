//! The chains of the table, and their rules.

use std::net::{IpAddr, Ipv6Addr};

use kplane_model::Family;

use super::super::super::uapi::*;
use super::super::expressions::{ExpressionWriter, FIRST};
use super::super::own_table::BaseChain;
use super::{CaptureSettings, LEASE, LOCAL, NODES, PLACES, PORTS};

/// Before that of table `kplane`, which is -100 (`NF_IP_PRI_NAT_DST`).
const NAT: i32 = -110;
/// Before all that may drop packets (`NF_IP_PRI_RAW` is -300).
const FIRST_OF_ALL: i32 = -310;

pub(super) const CHAINS: [(BaseChain, &[CaptureRule]); 3] = [
    (
        BaseChain::new("lease", "filter", 3, FIRST_OF_ALL),
        &[CaptureRule::Renew],
    ),
    (
        BaseChain::new("prerouting", "nat", 0, NAT),
        &[
            CaptureRule::Lease,
            CaptureRule::Own,
            CaptureRule::Foreign,
            CaptureRule::Place,
            CaptureRule::NodePort,
        ],
    ),
    (
        BaseChain::new("output", "nat", 3, NAT),
        &[
            CaptureRule::Lease,
            CaptureRule::Own,
            CaptureRule::Place,
            CaptureRule::NodePort,
            CaptureRule::Loopback,
        ],
    ),
];

/// The first register of four bytes (`NFT_REG32_00`).
const REGISTER: u32 = 8;
#[derive(Clone, Copy)]
pub(super) enum CaptureRule {
    /// A datagram of the agent to the proxy's address.
    Renew,
    /// A packet when the agent hangs.
    Lease,
    Own,
    /// A packet to a loopback address that no process of the node sent. The kernel would drop it later, but only without
    /// a new destination.
    Foreign,
    Place,
    NodePort,
    Loopback,
}

/// A writer of the table's rules.
pub(super) struct RuleWriter<'a, 'b> {
    pub(super) to: ExpressionWriter<'a, 'b>,
    pub(super) family: Family,
}

impl RuleWriter<'_, '_> {
    pub(super) fn rule(&mut self, rule: CaptureRule, settings: CaptureSettings) {
        let address_len = self.family.pick(4, 16);
        match rule {
            CaptureRule::Renew => {
                self.to.meta(NFT_META_MARK, FIRST);
                self.to.compare(&settings.own_mark.to_ne_bytes());
                self.to.destination(self.family);
                self.compare_address(settings.socket.ip());
                self.to.renew(LEASE);
            }
            CaptureRule::Lease => {
                self.to.address(settings.socket.ip());
                self.to.is_not_in(LEASE);
                self.to.verdict(NFT_RETURN.cast_unsigned());
            }
            CaptureRule::Own => {
                self.to.meta(NFT_META_MARK, FIRST);
                self.to.compare(&settings.own_mark.to_ne_bytes());
                self.to.verdict(NFT_RETURN.cast_unsigned());
            }
            CaptureRule::Foreign => {
                self.match_loopback();
                self.to.verdict(NFT_RETURN.cast_unsigned());
            }
            CaptureRule::Place => {
                self.to.destination(self.family);
                self.port_key(REGISTER + address_len / 4);
                self.to.is_in(PLACES);
                self.to.lead_to(self.family, settings.socket);
            }
            CaptureRule::NodePort => {
                self.to.destination(self.family);
                self.to.is_in(NODES);
                self.to.expression("fib", |w| {
                    w.u32(NFTA_FIB_FLAGS, NFTA_FIB_F_DADDR);
                    w.u32(NFTA_FIB_RESULT, NFT_FIB_RESULT_ADDRTYPE);
                    w.u32(NFTA_FIB_DREG, FIRST);
                });
                self.to.compare(&RTN_LOCAL.to_ne_bytes());
                self.port_key(REGISTER);
                self.to.is_in(PORTS);
                self.to.lead_to(self.family, settings.socket);
            }
            CaptureRule::Loopback => {
                self.match_loopback();
                self.port_key(REGISTER);
                self.to.is_in(LOCAL);
                self.to.lead_to(self.family, settings.socket);
            }
        }
    }

    fn match_loopback(&mut self) {
        match self.family {
            Family::V4 => {
                // The first byte is enough for 127.0.0.0/8.
                self.to.payload(FIRST, (NFT_PAYLOAD_NETWORK_HEADER, 16, 1));
                self.to.compare(&[127]);
            }
            Family::V6 => {
                self.to.destination(self.family);
                self.to.compare(&Ipv6Addr::LOCALHOST.octets());
            }
        }
    }

    /// Loads protocol and destination port into two registers.
    fn port_key(&mut self, register: u32) {
        self.to.meta(NFT_META_L4PROTO, register);
        self.to.payload(register + 1, (NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2));
    }

    fn compare_address(&mut self, ip: IpAddr) {
        match ip {
            IpAddr::V4(ip) => self.to.compare(&ip.octets()),
            IpAddr::V6(ip) => self.to.compare(&ip.octets()),
        }
    }
}
