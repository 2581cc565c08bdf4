//! The differences that are meant: each is a row of `docs/kube-proxy-compat.md`.

use std::net::IpAddr;

use kplane_model::{Cidr, Protocol};

use crate::conformance::compare::Compared;
use crate::conformance::proxy::Mode;
use kplane_tests::support::Client;
use kplane_tests::support::fate::{End, Ends};
use kplane_tests::support::world::SERVICE_RANGES;

/// Packets that meet another fate on purpose.
pub(crate) struct Difference {
    /// The row of the compatibility page.
    pub(crate) id: &'static str,
    pub(crate) reason: &'static str,
    modes: &'static [Mode],
    /// Met in every complete run; otherwise kube-proxy does one thing or the other by chance.
    pub(crate) always: bool,
    fits: fn(&Compared<'_>) -> bool,
}

impl Difference {
    pub(crate) fn is_of(&self, mode: Mode) -> bool {
        self.modes.contains(&mode)
    }

    pub(crate) fn fits(&self, compared: &Compared<'_>) -> bool {
        (self.fits)(compared)
    }
}

/// The scenario of which kube-proxy makes one thing or the other.
pub(crate) const BY_CHANCE: &str = "A27 an endpoint that a later slice calls not ready";

/// The complete list.
pub(crate) const DIFFERENCES: &[Difference] = &[
    Difference {
        id: "A18",
        reason: "a refused TCP client gets a reset: over IPv6 it learns of it at once",
        modes: &[Mode::Nftables],
        always: true,
        fits: |compared| {
            let question = compared.packet.question;
            question.protocol == Protocol::Tcp
                && question.to.is_ipv6()
                && is(&compared.kube_proxy, &End::RefusedLate)
                && is(&compared.kplane, &End::Refused)
        },
    },
    Difference {
        id: "F4",
        reason: "UDP flows of a Service that lost all endpoints are cut: they fare as new ones",
        modes: &[Mode::Nftables, Mode::Iptables],
        always: true,
        fits: |compared| {
            compared.step.name.starts_with("A18 F4 scaled to zero")
                && compared.packet.question.protocol == Protocol::Udp
                && compared.kube_proxy.iter().all(|end| matches!(end, End::Hit { .. }))
                && is_unserved(compared)
        },
    },
    Difference {
        id: "A27",
        reason: "of two slices with the same endpoint the later by name counts; kube-proxy takes any",
        modes: &[Mode::Nftables, Mode::Iptables],
        always: false,
        fits: |compared| {
            compared.step.name == BY_CHANCE && compared.kplane.is_subset(&compared.kube_proxy)
        },
    },
    Difference {
        id: "E10",
        reason: "kube-proxy may hear of the ServiceCIDRs after its first sync, and look an hour later",
        modes: &[Mode::Nftables],
        always: false,
        fits: |compared| {
            let lost = [
                End::Passed,
                End::Silent,
                End::Other("unreachable".to_owned()),
            ];
            is_in_service_ranges(compared.packet.question.to.ip())
                && compared.kube_proxy.iter().all(|end| lost.contains(end))
                && (is(&compared.kplane, &End::Silent) || is(&compared.kplane, &End::Denied))
        },
    },
];

/// Whether an address is one that ClusterIPs are taken from.
fn is_in_service_ranges(ip: IpAddr) -> bool {
    let range = |range: &str| range.parse::<Cidr>().is_ok_and(|range| range.contains(ip));
    SERVICE_RANGES.into_iter().any(range)
}

/// A new flow of UDP to a Service without endpoints.
fn is_unserved(compared: &Compared<'_>) -> bool {
    // The node's own socket learns it from the first call that looks: sending, or receiving.
    let refused = is(&compared.kplane, &End::Refused) || is(&compared.kplane, &End::Denied);
    // C1: KUBE-EXTERNAL-SERVICES does not see what the node itself sends.
    let unseen = compared.mode == Mode::Iptables
        && compared.packet.question.client == Client::Node
        && is(&compared.kplane, &End::Silent);
    refused || unseen
}

/// Whether a fate is this one end.
fn is(fate: &Ends, end: &End) -> bool {
    fate.len() == 1 && fate.contains(end)
}
