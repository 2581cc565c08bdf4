//! The size of a report. A message of a hostile agent is as short as any, and yet can unfold into a thousand times the
//! memory, because each empty element of a list takes two bytes on the wire.

use std::net::SocketAddr;

use kplane_proto::v1::{AvoidedEndpoint, Report};

use super::holding;
use crate::bounded::cut;

/// Maximum number of address families in a report.
const FAMILIES: usize = 2;
/// Maximum number of draining real servers in a report; agents report at most as many.
const DRAINS: usize = 16;
/// Maximum number of findings in a report; agents report fewer.
const FINDINGS: usize = 16;
/// Maximum number of avoided endpoints in a report; agents report at most as many.
const AVOIDED: usize = 32;
/// Longest name in the key of a ServicePort, in bytes.
const NAME: usize = 253;
/// Maximum number of failures in a report; agents report fewer.
const FAILURES: usize = 512;

/// Cuts off what exceeds the limits of kplane's agents, so that no report takes more memory.
pub(crate) fn bound(report: &mut Report) {
    cut(&mut report.families, FAMILIES);
    cut(&mut report.failures, FAILURES);
    cut(&mut report.findings, FINDINGS);
    for finding in &mut report.findings {
        cut(&mut finding.nodes, 0);
    }
    bound_avoided(&mut report.avoided);
    let servers = report.families.iter_mut();
    for stats in servers.filter_map(|family| family.servers.as_mut()) {
        cut(&mut stats.drains, DRAINS);
    }
    if let Some(held) = &mut report.held {
        holding::bound(held);
    }
}

/// Keeps so many avoided endpoints as agents report, and only those with names and addresses that can exist.
pub(crate) fn bound_avoided(avoided: &mut Vec<AvoidedEndpoint>) {
    avoided.truncate(AVOIDED);
    avoided.retain(|one| {
        let key = one.key.as_ref();
        let names = key.is_some_and(|key| {
            let longest = key.namespace.len().max(key.name.len());
            longest.max(key.port_name.len()) <= NAME
        });
        names && one.address.parse::<SocketAddr>().is_ok()
    });
    avoided.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use kplane_proto::v1::{FamilyStatus, Held, ServerStats, ServiceKey};
    use prost::Message as _;

    use super::*;

    fn avoided(name: &str, address: &str) -> AvoidedEndpoint {
        AvoidedEndpoint {
            key: Some(ServiceKey {
                name: name.to_owned(),
                ..ServiceKey::default()
            }),
            address: address.to_owned(),
        }
    }

    #[test]
    fn u53_avoided_endpoints_without_an_address_or_with_endless_names_are_left_out() {
        let mut all = vec![
            avoided("web", "web.example:80"),
            avoided(&"w".repeat(254), "10.0.0.1:80"),
            avoided("web", "[fd00::1]:80"),
            AvoidedEndpoint {
                key: None,
                ..avoided("web", "10.0.0.1:80")
            },
        ];
        bound_avoided(&mut all);
        assert_eq!(all, [avoided("web", "[fd00::1]:80")]);
    }

    #[test]
    fn a_report_that_unfolds_is_cut_and_its_memory_is_given_back() {
        const MANY: usize = 100_000;
        let servers = ServerStats {
            drains: vec![Default::default(); MANY],
            ..ServerStats::default()
        };
        let family = FamilyStatus {
            servers: Some(servers),
            ..FamilyStatus::default()
        };
        let mut families = vec![FamilyStatus::default(); MANY];
        families[0] = family;
        let wire = Report {
            families,
            failures: vec![Default::default(); MANY],
            findings: vec![Default::default(); MANY],
            avoided: vec![avoided("web", "10.0.0.1:80"); MANY],
            held: Some(Held {
                examples: vec![String::new(); MANY],
                ..Held::default()
            }),
            ..Report::default()
        };
        let mut report = Report::decode(&*wire.encode_to_vec()).unwrap();
        bound(&mut report);
        let drains = &report.families[0].servers.as_ref().unwrap().drains;
        let examples = &report.held.as_ref().unwrap().examples;
        let lists = [
            (report.families.len(), report.families.capacity()),
            (report.failures.len(), report.failures.capacity()),
            (report.findings.len(), report.findings.capacity()),
            (drains.len(), drains.capacity()),
            (report.avoided.len(), report.avoided.capacity()),
            (examples.len(), examples.capacity()),
        ];
        assert_eq!(
            lists,
            [FAMILIES, FAILURES, FINDINGS, DRAINS, AVOIDED, 8].map(|most| (most, most))
        );
    }
}
