//! The check of ranges: whether addresses and node ports for Services are running out. The API server refuses a Service for
//! which it finds none.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use kplane_model::{Cidr, Family, service_addresses};

use super::Finding;
use super::listed::{Service, ServiceCidr};

/// The name of the check.
pub(crate) const CHECK: &str = "ranges";

/// The range of node ports that an API server has unless a flag sets another one (`--service-node-port-range`).
const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;

/// The share of a range, in percent, from which on it is a warning.
const FULL: u128 = 80;

/// The use of a range.
struct Use {
    /// Its members, as in "node ports".
    what: String,
    used: usize,
    of: u128,
    /// The command that shows them.
    remedy: &'static str,
}

impl Use {
    fn percent(&self) -> u128 {
        (self.used as u128).saturating_mul(100) / self.of.max(1)
    }

    fn text(&self) -> String {
        let Self { what, used, of, .. } = self;
        match self.percent() {
            // Nobody counts the addresses of IPv6.
            0 => format!("{used} {what}"),
            percent => format!("{used} of {of} {what} ({percent} %)"),
        }
    }
}

/// Returns the finding about a cluster's Services. Without ServiceCIDRs (Kubernetes before 1.33), only node ports are
/// compared with a range.
pub(crate) fn finding(services: &[Service], ranges: Option<&[ServiceCidr]>) -> Finding {
    let mut all = of_addresses(services, ranges.unwrap_or_default());
    all.extend(of_node_ports(services));
    // Of equal ones the first.
    let fullest = all.iter().rev().max_by_key(|range| range.percent());
    let texts = all.iter().map(Use::text).collect();
    match fullest {
        Some(range) if range.percent() >= FULL => {
            let text = format!(
                "{} are in use; the API server refuses Services if none is left",
                range.text()
            );
            Finding::warning(CHECK, text, range.remedy).with(texts)
        }
        Some(range) => Finding::ok(CHECK, format!("{} are in use", range.text())).with(texts),
        None => Finding::ok(CHECK, "no Service has an address or a node port"),
    }
}

fn of_node_ports(services: &[Service]) -> Option<Use> {
    let used: BTreeSet<u16> = services.iter().flat_map(|it| it.spec.node_ports()).collect();
    // An API server with another range has ports outside of this one sooner or later.
    let known = used.iter().all(|port| NODE_PORTS.contains(port));
    (known && !used.is_empty()).then(|| Use {
        what: "node ports".to_owned(),
        used: used.len(),
        of: NODE_PORTS.len() as u128,
        remedy: "kubectl get services --all-namespaces | grep -E 'NodePort|LoadBalancer'",
    })
}

fn of_addresses(services: &[Service], ranges: &[ServiceCidr]) -> Vec<Use> {
    let texts = ranges.iter().flat_map(|range| &range.spec.cidrs);
    let cidrs: BTreeSet<Cidr> = texts.filter_map(|text| text.parse().ok()).collect();
    let of_family = |family: Family| {
        let addresses = services.iter().flat_map(|it| it.spec.addresses());
        let inside = |ip: &_| Family::of(*ip) == family && cidrs.iter().any(|it| it.contains(*ip));
        let range = Use {
            what: format!("addresses of {family}"),
            used: addresses.filter(inside).count(),
            of: service_addresses(&cidrs, family),
            remedy: "kubectl get servicecidrs",
        };
        (range.of > 0).then_some(range)
    };
    Family::ALL.into_iter().filter_map(of_family).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::check::Outcome;

    fn service(addresses: &Value, node_ports: &[u16]) -> Service {
        let ports: Vec<Value> = node_ports.iter().map(|port| json!({ "nodePort": port })).collect();
        let spec = json!({ "clusterIPs": addresses, "ports": ports });
        serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap()
    }

    fn cidrs(cidrs: &[&str]) -> Vec<ServiceCidr> {
        vec![serde_json::from_value(json!({ "spec": { "cidrs": cidrs } })).unwrap()]
    }

    #[test]
    fn addresses_that_run_out_are_a_warning() {
        // 14 addresses, of which 12 are 85 %.
        let ranges = cidrs(&["10.96.0.0/28", "fd00::/112"]);
        let some = |n: u8| -> Vec<Service> {
            let address = |i| json!([format!("10.96.0.{i}"), format!("fd00::{i}")]);
            (1..=n)
                .map(|i| service(&address(i), &[]))
                .chain([service(&json!(["None"]), &[])])
                .collect()
        };
        let of = |n, ranges: &[ServiceCidr]| finding(&some(n), Some(ranges));
        let full = of(12, &ranges);
        assert_eq!(full.outcome, Outcome::Warning);
        assert!(
            full.summary.starts_with("12 of 14 addresses of IPv4 (85 %)"),
            "{full:?}"
        );
        assert_eq!(full.details[1], "12 addresses of IPv6");
        assert_eq!(of(11, &ranges).outcome, Outcome::Ok);
        // A range inside of another one adds nothing; one beside it does.
        let mut more = ranges;
        more.extend(cidrs(&["10.96.0.0/29"]));
        assert_eq!(of(12, &more).outcome, Outcome::Warning);
        more.extend(cidrs(&["10.97.0.0/28"]));
        assert_eq!(of(12, &more).outcome, Outcome::Ok);
        assert_eq!(finding(&some(12), None).outcome, Outcome::Ok);
    }

    #[test]
    fn node_ports_that_run_out_are_a_warning() {
        let ports: Vec<u16> = (30_000..32_300).collect();
        let of = |ports: &[u16]| {
            finding(
                &[service(&json!([]), ports), service(&json!([]), ports)],
                None,
            )
        };
        assert_eq!(of(&ports).outcome, Outcome::Warning);
        assert_eq!(of(&ports[..2_000]).outcome, Outcome::Ok);
        // The API server has another range.
        let other = [&ports[..], &[20_000]].concat();
        assert_eq!(of(&other).outcome, Outcome::Ok);
    }
}
