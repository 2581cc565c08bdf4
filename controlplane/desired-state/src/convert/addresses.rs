//! External and load-balancer addresses of a Service, and the sources that may use the latter.

use std::collections::HashSet;
use std::net::IpAddr;

use kplane_model::{Cidr, Family, Reason, parse_ip, refused_endpoint_ip};

use super::report::Report;
use super::{ExternalIps, MAX_SERVICE_ADDRESSES, MAX_SOURCE_RANGES};
use crate::k8s::{self, ServiceSpec};

pub(super) fn of_family(ips: &[IpAddr], family: Family) -> Vec<IpAddr> {
    let of_family = |ip: &IpAddr| Family::of(*ip) == family;
    ips.iter().copied().filter(of_family).collect()
}

/// Parses an address of a Service (A4); refuses addresses that belong to the node itself.
pub(super) fn address(field: &str, text: &str, report: &mut Report<'_>) -> Option<IpAddr> {
    let ip = match parse_ip(text) {
        Ok(ip) => ip,
        Err(error) => {
            report.error(
                Reason::InvalidAddress,
                format!("{field}: {error}; correct or remove it"),
            );
            return None;
        }
    };
    if let Some(why) = refused_endpoint_ip(ip) {
        report.error(
            Reason::InvalidAddress,
            format!("{field}: {ip} {why} and is refused; use an address that is not special"),
        );
        return None;
    }
    Some(ip)
}

/// Returns the unique addresses of a list that are in the Service's families (A2).
fn addresses<'t>(
    field: &str,
    texts: impl Iterator<Item = &'t str>,
    families: &[Family],
    report: &mut Report<'_>,
) -> Vec<IpAddr> {
    let mut seen = HashSet::new();
    let mut ips = Vec::new();
    for text in texts {
        let Some(ip) = address(field, text, report) else {
            continue;
        };
        if ips.len() == MAX_SERVICE_ADDRESSES {
            report.error(Reason::TooLarge, format!(
                "{field}: only the first {MAX_SERVICE_ADDRESSES} addresses are served; split the \
                 Service"
            ));
            break;
        }
        let family = Family::of(ip);
        if !families.contains(&family) {
            report.warning(Reason::FamilyMismatch, format!(
                "{field}: {ip} is not served because the Service has no {family} cluster address; \
                 make the Service dual-stack or remove it"
            ));
        } else if seen.insert(ip) {
            ips.push(ip);
        }
    }
    ips
}

/// Returns the external addresses that the operator allows (A5).
pub(super) fn external_ips(
    spec: &ServiceSpec,
    families: &[Family],
    allowed: &ExternalIps,
    report: &mut Report<'_>,
) -> Vec<IpAddr> {
    const FIELD: &str = "spec.externalIPs";
    let written = spec.external_ips.as_deref().unwrap_or_default();
    if *allowed == ExternalIps::Nothing && !written.is_empty() {
        report.error(Reason::ExternalIpRefused, format!(
            "{FIELD} are switched off in this cluster (--allow-external-ips) and are not served; \
             remove them"
        ));
        return Vec::new();
    }
    let mut ips = addresses(FIELD, written.iter().map(String::as_str), families, report);
    if let ExternalIps::Within(ranges) = allowed {
        ips.retain(|ip| {
            let inside = ranges.iter().any(|range| range.contains(*ip));
            if !inside {
                report.error(
                    Reason::ExternalIpRefused,
                    format!(
                        "{FIELD}: {ip} is outside of the ranges that this cluster allows \
                     (--external-ip-cidr) and is refused; use an address inside of them"
                    ),
                );
            }
            inside
        });
    }
    ips
}

/// Returns the load-balancer addresses: entries with an address whose `ipMode` is `VIP` or unset
/// (A6).
pub(super) fn load_balancer_ips(
    svc: &k8s::Service,
    families: &[Family],
    report: &mut Report<'_>,
) -> Vec<IpAddr> {
    const FIELD: &str = "status.loadBalancer.ingress";
    let mut texts = Vec::new();
    for ingress in svc.status.load_balancer.ingress.iter().flatten() {
        let Some(ip) = ingress.ip.as_deref().filter(|ip| !ip.is_empty()) else {
            continue;
        };
        match ingress.ip_mode.as_deref() {
            None | Some("VIP") => texts.push(ip),
            Some("Proxy") => {}
            Some(mode) => report.error(Reason::InvalidField, format!(
                "{FIELD}: {ip:?} has the unknown ipMode {mode:?} and is not captured; use VIP or \
                 Proxy"
            )),
        }
    }
    addresses(FIELD, texts.into_iter(), families, report)
}

/// `spec.loadBalancerSourceRanges` (A8).
#[derive(Default)]
pub(super) struct SourceRanges {
    good: Vec<Cidr>,
    /// Families with at least one invalid range.
    doubtful: Vec<Family>,
}

impl SourceRanges {
    /// Returns the number of ranges of both families.
    pub(super) fn len(&self) -> usize {
        self.good.len()
    }

    /// Returns the load-balancer addresses of a family and the sources that may use them, empty =
    /// all. Fails closed: where ranges are written but all are invalid, no source may use the
    /// addresses, so none is returned.
    pub(super) fn restrict(
        &self,
        ips: Vec<IpAddr>,
        family: Family,
        report: &mut Report<'_>,
    ) -> (Vec<IpAddr>, Vec<Cidr>) {
        let good = self.good.iter().copied();
        let ranges: Vec<Cidr> = good.filter(|range| range.family() == family).collect();
        if ranges.contains(&Cidr::everything(family)) {
            return (ips, Vec::new());
        }
        if ranges.is_empty() && !ips.is_empty() && self.doubtful.contains(&family) {
            report.error(Reason::InvalidSourceRange, format!(
                "no {family} range of spec.loadBalancerSourceRanges can be used, so the {family} \
                 load-balancer addresses are not served at all; correct the ranges"
            ));
            return (Vec::new(), Vec::new());
        }
        (ips, ranges)
    }
}

pub(super) fn source_ranges(spec: &ServiceSpec, report: &mut Report<'_>) -> SourceRanges {
    let written = spec.load_balancer_source_ranges.as_deref().unwrap_or_default();
    let mut ranges = SourceRanges::default();
    if written.len() > MAX_SOURCE_RANGES {
        report.error(Reason::TooLarge, format!(
            "spec.loadBalancerSourceRanges has {} entries, more than {MAX_SOURCE_RANGES}; merge or \
             remove some",
            written.len()
        ));
        ranges.doubtful.extend(Family::ALL);
        return ranges;
    }
    for text in written {
        match text.parse::<Cidr>() {
            Ok(range) if ranges.good.contains(&range) => {}
            Ok(range) => ranges.good.push(range),
            Err(error) => {
                report.error(Reason::InvalidSourceRange, format!(
                    "spec.loadBalancerSourceRanges: {error}; this range admits no client, correct \
                     it"
                ));
                match (text.contains(':'), text.contains('.')) {
                    (true, _) => ranges.doubtful.push(Family::V6),
                    (false, true) => ranges.doubtful.push(Family::V4),
                    (false, false) => ranges.doubtful.extend(Family::ALL),
                }
            }
        }
    }
    ranges
}
