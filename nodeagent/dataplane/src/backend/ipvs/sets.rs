//! The IP sets around IPVS, with exactly kube-proxy's names and types (D3).

use kplane_model::{Family, Protocol};

pub(super) use kplane_netlink::ipset::{Entry, SetType};

/// Initial capacity of a set, as in kube-proxy. The set is enlarged when it needs more entries.
pub(super) const CAPACITY: u32 = 65_536;

/// A set. The order is that in which entries are added: sets that let packets pass come before sets that make
/// rules test them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SetId {
    /// Endpoints of this node that reach themselves through a Service.
    LoopBack,
    ClusterIp,
    /// External addresses that are masqueraded.
    ExternalIp,
    /// External addresses of policy Local.
    ExternalIpLocal,
    /// Addresses of load balancers.
    LoadBalancer,
    /// Load balancers' own addresses as sources.
    LoadBalancerSourceIp,
    /// Sources that load balancers let pass.
    LoadBalancerSourceCidr,
    /// Load balancers that only let some sources pass.
    LoadBalancerFw,
    /// Load balancers of policy Local.
    LoadBalancerLocal,
    NodePortTcp,
    /// Node ports of policy Local.
    NodePortLocalTcp,
    NodePortUdp,
    /// Node ports of policy Local.
    NodePortLocalUdp,
    /// Node ports, with the node's addresses.
    NodePortSctp,
    /// Node ports of policy Local, with the node's addresses.
    NodePortLocalSctp,
    HealthCheckNodePort,
    /// Addresses of the dummy device.
    IpvsIps,
}

/// Factor by which a set is larger than necessary when it grows, so that it rarely grows.
const SPARE: u32 = 2;

impl SetId {
    /// All sets.
    pub(super) const ALL: [Self; 17] = [
        Self::LoopBack,
        Self::ClusterIp,
        Self::ExternalIp,
        Self::ExternalIpLocal,
        Self::LoadBalancer,
        Self::LoadBalancerSourceIp,
        Self::LoadBalancerSourceCidr,
        Self::LoadBalancerFw,
        Self::LoadBalancerLocal,
        Self::NodePortTcp,
        Self::NodePortLocalTcp,
        Self::NodePortUdp,
        Self::NodePortLocalUdp,
        Self::NodePortSctp,
        Self::NodePortLocalSctp,
        Self::HealthCheckNodePort,
        Self::IpvsIps,
    ];

    /// Returns the names by family, the type, and kube-proxy's description of the purpose.
    const fn facts(self) -> ([&'static str; 2], SetType, &'static str) {
        match self {
            Self::LoopBack => (
                ["KUBE-LOOP-BACK", "KUBE-6-LOOP-BACK"],
                SetType::IpPortIp,
                "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose",
            ),
            Self::ClusterIp => (
                ["KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP"],
                SetType::IpPort,
                "Kubernetes service cluster ip + port for masquerade purpose",
            ),
            Self::ExternalIp => (
                ["KUBE-EXTERNAL-IP", "KUBE-6-EXTERNAL-IP"],
                SetType::IpPort,
                "Kubernetes service external ip + port for masquerade and filter purpose",
            ),
            Self::ExternalIpLocal => (
                ["KUBE-EXTERNAL-IP-LOCAL", "KUBE-6-EXTERNAL-IP-LOCAL"],
                SetType::IpPort,
                "Kubernetes service external ip + port with externalTrafficPolicy=local",
            ),
            Self::LoadBalancer => (
                ["KUBE-LOAD-BALANCER", "KUBE-6-LOAD-BALANCER"],
                SetType::IpPort,
                "Kubernetes service lb portal",
            ),
            Self::LoadBalancerSourceIp => (
                [
                    "KUBE-LOAD-BALANCER-SOURCE-IP",
                    "KUBE-6-LOAD-BALANCER-SOURCE-IP",
                ],
                SetType::IpPortIp,
                "Kubernetes service load balancer ip + port + source IP for packet filter purpose",
            ),
            Self::LoadBalancerSourceCidr => (
                [
                    "KUBE-LOAD-BALANCER-SOURCE-CIDR",
                    "KUBE-6-LOAD-BALANCER-SOURCE-CID",
                ],
                SetType::IpPortNet,
                "Kubernetes service load balancer ip + port + source cidr for packet filter purpose",
            ),
            Self::LoadBalancerFw => (
                ["KUBE-LOAD-BALANCER-FW", "KUBE-6-LOAD-BALANCER-FW"],
                SetType::IpPort,
                "Kubernetes service load balancer ip + port for load balancer with sourceRange",
            ),
            Self::LoadBalancerLocal => (
                ["KUBE-LOAD-BALANCER-LOCAL", "KUBE-6-LOAD-BALANCER-LOCAL"],
                SetType::IpPort,
                "Kubernetes service load balancer ip + port with externalTrafficPolicy=local",
            ),
            _ => self.node_port_facts(),
        }
    }

    const fn node_port_facts(self) -> ([&'static str; 2], SetType, &'static str) {
        match self {
            Self::NodePortTcp => (
                ["KUBE-NODE-PORT-TCP", "KUBE-6-NODE-PORT-TCP"],
                SetType::Port,
                "Kubernetes nodeport TCP port for masquerade purpose",
            ),
            Self::NodePortLocalTcp => (
                ["KUBE-NODE-PORT-LOCAL-TCP", "KUBE-6-NODE-PORT-LOCAL-TCP"],
                SetType::Port,
                "Kubernetes nodeport TCP port with externalTrafficPolicy=local",
            ),
            Self::NodePortUdp => (
                ["KUBE-NODE-PORT-UDP", "KUBE-6-NODE-PORT-UDP"],
                SetType::Port,
                "Kubernetes nodeport UDP port for masquerade purpose",
            ),
            Self::NodePortLocalUdp => (
                ["KUBE-NODE-PORT-LOCAL-UDP", "KUBE-6-NODE-PORT-LOCAL-UDP"],
                SetType::Port,
                "Kubernetes nodeport UDP port with externalTrafficPolicy=local",
            ),
            Self::NodePortSctp => (
                ["KUBE-NODE-PORT-SCTP-HASH", "KUBE-6-NODE-PORT-SCTP-HASH"],
                SetType::IpPort,
                "Kubernetes nodeport SCTP port for masquerade purpose with type \\'hash ip:port\\'",
            ),
            Self::NodePortLocalSctp => (
                [
                    "KUBE-NODE-PORT-LOCAL-SCTP-HASH",
                    "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS",
                ],
                SetType::IpPort,
                "Kubernetes nodeport SCTP port with externalTrafficPolicy=local with type \\'hash ip:port\\'",
            ),
            Self::HealthCheckNodePort => (
                [
                    "KUBE-HEALTH-CHECK-NODE-PORT",
                    "KUBE-6-HEALTH-CHECK-NODE-PORT",
                ],
                SetType::Port,
                "Kubernetes health check node port",
            ),
            _ => (
                ["KUBE-IPVS-IPS", "KUBE-6-IPVS-IPS"],
                SetType::Ip,
                "Addresses on the ipvs interface",
            ),
        }
    }

    pub(super) const fn name(self, family: Family) -> &'static str {
        self.facts().0[family as usize]
    }

    /// Returns the type.
    pub(super) const fn kind(self) -> SetType {
        self.facts().1
    }

    /// Returns the purpose, in kube-proxy's words.
    pub(super) const fn comment(self) -> &'static str {
        self.facts().2
    }

    /// Returns whether the set exempts packets from masquerading. That is correct only for packets to
    /// endpoints of this node, so an entry must not stay longer than it applies.
    pub(super) fn is_exemption(self) -> bool {
        matches!(
            self,
            Self::LoadBalancerLocal
                | Self::NodePortLocalTcp
                | Self::NodePortLocalUdp
                | Self::NodePortLocalSctp
        )
    }

    /// Returns the sets of node ports: all, and those of policy Local.
    pub(super) fn of_node_ports(protocol: Protocol) -> (Self, Self) {
        match protocol {
            Protocol::Tcp => (Self::NodePortTcp, Self::NodePortLocalTcp),
            Protocol::Udp => (Self::NodePortUdp, Self::NodePortLocalUdp),
            Protocol::Sctp => (Self::NodePortSctp, Self::NodePortLocalSctp),
        }
    }

    /// Returns the set with a name of either family.
    pub(super) fn by_name(name: &str) -> Option<Self> {
        let is = |id: &Self| Family::ALL.iter().any(|family| id.name(*family) == name);
        Self::ALL.into_iter().find(is)
    }
}

/// Returns whether a name is that of a set of kube-proxy's IPVS mode, of either family.
pub(crate) fn is_name(name: &str) -> bool {
    SetId::by_name(name).is_some()
}

/// Returns the capacity of a set that must hold this many entries.
pub(super) fn capacity_for(entries: usize) -> u32 {
    let entries = u32::try_from(entries).unwrap_or(u32::MAX);
    let wanted = entries.saturating_mul(SPARE);
    wanted.checked_next_power_of_two().unwrap_or(u32::MAX).max(CAPACITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longest name of a set: `IPSET_MAXNAMELEN` (linux/netfilter/ipset/ip_set.h) less the zero at its
    /// end. kube-proxy cuts its names there.
    const MAX_NAME: usize = 31;

    /// D3: names as kube-proxy makes them, cut where it cuts them.
    #[test]
    fn d3_names_are_kube_proxys_and_fit() {
        for id in SetId::ALL {
            let [v4, v6] = Family::ALL.map(|family| id.name(family));
            let mut expected = v4.replacen("KUBE-", "KUBE-6-", 1);
            expected.truncate(MAX_NAME);
            assert_eq!(v6, expected);
            assert!(v4.len() <= MAX_NAME, "{v4}");
            assert_eq!(SetId::by_name(v4), Some(id));
            assert_eq!(SetId::by_name(v6), Some(id));
            assert_eq!(SetId::ALL[id as usize], id);
        }
        assert!(!is_name("KUBE-SERVICES") && !is_name("KUBE-6-KUBE-CLUSTER-IP"));
    }

    #[test]
    fn d3_sets_grow_beyond_kube_proxys_limit() {
        assert_eq!(capacity_for(0), 65_536);
        assert_eq!(capacity_for(32_768), 65_536);
        assert_eq!(capacity_for(65_537), 262_144);
        assert_eq!(capacity_for(usize::MAX), u32::MAX);
    }
}
