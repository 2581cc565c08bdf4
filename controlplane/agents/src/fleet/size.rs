//! The size of what an agent says. A message of a hostile agent is as short as any, and yet can unfold into a thousand times
//! the memory, because each empty element of a list takes two bytes on the wire. Its texts are kept, logged and shown.

use std::fmt;
use std::net::SocketAddr;

use kplane_model::is_hidden;
use kplane_proto::v1::{AvoidedEndpoint, Hello, Report, ServiceKey};

use super::{holding, label};

/// Maximum number of address families in a report.
const FAMILIES: usize = 2;
/// Maximum number of draining real servers in a report; agents report at most as many.
const DRAINS: usize = 16;
/// Maximum number of findings in a report; agents report fewer.
const FINDINGS: usize = 16;
/// Maximum number of Services whose connections ended in a report; agents report at most as many.
const ENDED: usize = 64;
/// Maximum number of avoided endpoints in a report; agents report at most as many.
const AVOIDED: usize = 32;
/// Maximum number of failures in a report; agents report fewer.
const FAILURES: usize = 512;

/// Longest name in the key of a ServicePort, in bytes.
const NAME: usize = 253;
/// Longest version, name of a backend, code, or address with a port, in bytes.
const LABEL: usize = 64;
/// Longest reason in a Hello, in bytes.
const REASON: usize = 256;
/// Longest text in a report, in bytes. Agents cut theirs after 300, or write them in their code.
const TEXT: usize = 1_024;

/// A field of an agent's message that exceeds its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong {
    /// The field, as named in the .proto file.
    field: &'static str,
    /// Its length in bytes, or the number of its elements.
    length: usize,
    limit: usize,
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            field,
            length,
            limit,
        } = self;
        write!(f, "{field} has a length of {length}; {limit} are kept")
    }
}

/// Cuts fields, and remembers the first one that was too long.
#[derive(Debug, Default)]
struct Cut(Option<TooLong>);

impl Cut {
    fn note(&mut self, field: &'static str, length: usize, limit: usize) {
        let too_long = TooLong {
            field,
            length,
            limit,
        };
        if length > limit {
            self.0.get_or_insert(too_long);
        }
    }

    fn list<T>(&mut self, field: &'static str, list: &mut Vec<T>, limit: usize) {
        self.note(field, list.len(), limit);
        kplane_util::bounded::cut(list, limit);
    }

    fn text(&mut self, field: &'static str, text: &mut String, limit: usize) {
        self.note(field, text.len(), limit);
        if text.len() > limit || text.contains(is_hidden) {
            *text = label(text, limit);
        }
    }

    fn key(&mut self, field: &'static str, key: Option<&mut ServiceKey>) {
        if let Some(key) = key {
            for name in [&mut key.namespace, &mut key.name, &mut key.port_name] {
                self.text(field, name, NAME);
            }
        }
    }
}

/// Cuts off what exceeds the limits of kplane's agents. Returns the first such field.
pub(crate) fn bound_hello(hello: &mut Hello) -> Option<TooLong> {
    let mut cut = Cut::default();
    cut.text("agent_version", &mut hello.agent_version, LABEL);
    cut.text("backend", &mut hello.backend, LABEL);
    let deprecation = &mut hello.backend_deprecation;
    cut.text("backend_deprecation", deprecation, REASON);
    cut.0
}

/// Cuts off what exceeds the limits of kplane's agents, so that no report takes more memory. Returns the first such field.
pub(crate) fn bound(report: &mut Report) -> Option<TooLong> {
    let mut cut = Cut::default();
    cut.list("families", &mut report.families, FAMILIES);
    for family in &mut report.families {
        cut.text("families.error", &mut family.error, TEXT);
        cut.text("families.last_repair", &mut family.last_repair, TEXT);
        if let Some(stats) = &mut family.servers {
            cut.list("families.servers.drains", &mut stats.drains, DRAINS);
            for drain in &mut stats.drains {
                cut.key("drains.key", drain.key.as_mut());
                cut.text("drains.virtual_server", &mut drain.virtual_server, LABEL);
                cut.text("drains.address", &mut drain.address, LABEL);
            }
        }
    }
    cut.list("failures", &mut report.failures, FAILURES);
    for failure in &mut report.failures {
        cut.key("failures.key", failure.key.as_mut());
        cut.text("failures.reason", &mut failure.reason, TEXT);
    }
    cut.list("findings", &mut report.findings, FINDINGS);
    for finding in &mut report.findings {
        cut.text("findings.code", &mut finding.code, LABEL);
        cut.text("findings.text", &mut finding.text, TEXT);
        cut.text("findings.fix", &mut finding.fix, TEXT);
        cut.list("findings.nodes", &mut finding.nodes, 0);
    }
    cut.note("avoided", report.avoided.len(), AVOIDED);
    bound_avoided(&mut report.avoided);
    cut.list("ended", &mut report.ended, ENDED);
    for ended in &mut report.ended {
        cut.text("ended.namespace", &mut ended.namespace, NAME);
        cut.text("ended.name", &mut ended.name, NAME);
    }
    if let Some(held) = &mut report.held {
        holding::bound(held);
    }
    cut.0
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
    use kplane_proto::v1::{FamilyStatus, Held, ObjectFailure, ServerStats, ServiceKey};
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
    fn a_hello_with_endless_texts_is_cut_and_the_field_named() {
        let mut hello = Hello {
            backend: "nftables".to_owned(),
            agent_version: "0.1.0\u{1b}\u{202e}".repeat(30_000),
            ..Hello::default()
        };
        let found = bound_hello(&mut hello).unwrap().to_string();
        assert_eq!(found, "agent_version has a length of 270000; 64 are kept");
        assert!(
            hello.agent_version.capacity() <= LABEL && hello.agent_version.starts_with("0.1.00.1")
        );
        assert_eq!(bound_hello(&mut hello), None);
        assert_eq!(hello.backend, "nftables");
    }

    #[test]
    fn texts_of_a_report_are_cut_and_their_memory_is_given_back() {
        let failure = |reason: String| ObjectFailure {
            reason,
            ..ObjectFailure::default()
        };
        let mut report = Report {
            failures: vec![failure("ä\u{9b}".to_owned()), failure("x".repeat(200_000))],
            ..Report::default()
        };
        let found = bound(&mut report).unwrap().to_string();
        assert_eq!(
            found,
            "failures.reason has a length of 200000; 1024 are kept"
        );
        assert_eq!(report.failures[0].reason, "ä");
        assert!(report.failures[1].reason.capacity() <= TEXT);
        assert_eq!(bound(&mut report), None);
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
