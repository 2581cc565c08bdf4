//! Leftovers that stay in the kernel, or may be there, each with the command that removes it.

use std::net::IpAddr;

use kplane_netlink::NetlinkError;

use crate::process::RunError;

/// An object that is still there, or may be, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The nftables table.
    #[error("nftables table {table}: {reason}; run `nft delete table {table}`")]
    Table {
        /// Family and name, as `nft` writes them.
        table: String,
        /// The reason.
        reason: String,
    },
    /// The rules could not be listed.
    #[error("{tool}-save {source}; remove kube-proxy's chains with `kube-proxy --cleanup`")]
    Save {
        /// The kind of iptables.
        tool: String,
        /// The reason.
        source: RunError,
    },
    /// A table's chains could not be removed.
    #[error(
        "{tool}-restore for table {table} {source}; remove kube-proxy's chains with \
         `kube-proxy --cleanup`"
    )]
    Restore {
        /// The kind of iptables.
        tool: String,
        /// The table.
        table: &'static str,
        /// The reason.
        source: RunError,
    },
    /// The chains of iptables in nf_tables could not be read.
    #[error("chains of {tool}: {source}; remove kube-proxy's chains with `kube-proxy --cleanup`")]
    Unread {
        /// The kind of iptables.
        tool: String,
        /// The reason.
        source: NetlinkError,
    },
    /// The chains of iptables in nf_tables could not be removed.
    #[error("{chains}: {reason}; remove kube-proxy's chains with `kube-proxy --cleanup`")]
    Chains {
        /// Kind of iptables, table and number of the chains.
        chains: String,
        /// The reason.
        reason: String,
    },
    /// Chains stay because other programs need them.
    #[error(
        "{tool} table {table}: {chains} kept, because rules of other programs jump to them; see \
         `{tool}-save -t {table}`"
    )]
    Kept {
        /// The kind of iptables.
        tool: String,
        /// The table.
        table: &'static str,
        /// Names of the chains.
        chains: String,
        /// Whether the chains only masquerade what those programs mark.
        only_masquerade: bool,
    },
    /// There may be chains, but no program to list them.
    #[error(
        "legacy iptables has tables that may contain kube-proxy's chains, but there is no \
         {name}-save to list them: use the agent's image with iptables (chart: agent.variant=iptables), or run \
         `kube-proxy --cleanup` on the node"
    )]
    Unseen {
        /// The kind of iptables.
        name: String,
    },
    /// The virtual servers.
    #[error("IPVS: {0}; run `ipvsadm --clear`")]
    VirtualServers(NetlinkError),
    /// The link with the addresses of all Services.
    #[error("link kube-ipvs0: {0}; run `ip link delete kube-ipvs0`")]
    Link(NetlinkError),
    /// The address of the userspace proxy.
    #[error("address {ip} of lo: {source}; run `ip address delete {ip} dev lo`")]
    ProxyAddress {
        /// The address.
        ip: IpAddr,
        /// The reason.
        source: NetlinkError,
    },
    /// The delivery of answers to the userspace proxy.
    #[error(
        "{ip} rule to table {table}: {source}; run `{ip} rule delete table {table}` and `{ip} route flush table {table}`"
    )]
    Delivery {
        /// `ip`, with the option for the family.
        ip: &'static str,
        /// Number of the routing table.
        table: u32,
        /// The reason.
        source: NetlinkError,
    },
    /// The IP sets could not be listed.
    #[error("IP sets: {0}; see `ipset list -name`")]
    Sets(NetlinkError),
    /// One IP set.
    #[error("IP set {name}: {source}; is a rule still using it? Run `ipset destroy {name}`")]
    Set {
        /// Name of the set.
        name: String,
        /// The reason.
        source: NetlinkError,
    },
}

impl Problem {
    /// Returns whether what stays leads no packet of a Service.
    pub fn is_harmless(&self) -> bool {
        matches!(
            self,
            Self::Kept {
                only_masquerade: true,
                ..
            }
        )
    }
}
