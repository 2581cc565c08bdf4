//! Conversion of the annotations by which a Service asks for the userspace proxy (`userspace.md`, U50..U54).

use std::sync::Arc;

use kplane_model::{Balance, Cidr, Protocol, Proxied, ProxyHeader, Reason};

use super::ports::Port;
use super::report::Report;
use crate::k8s::{
    BALANCE_ANNOTATION, CONNECT_RETRY_ANNOTATION, DATA_PATH_ANNOTATION, ObjectMeta,
    PROXY_PROTOCOL_ANNOTATION, Texts, WEIGHTS_ANNOTATION,
};

/// All annotations of this kind. Each of them alone asks for the proxy, except that the data path may be the default.
const ASKING: [&str; 5] = [
    DATA_PATH_ANNOTATION,
    BALANCE_ANNOTATION,
    WEIGHTS_ANNOTATION,
    PROXY_PROTOCOL_ANNOTATION,
    CONNECT_RETRY_ANNOTATION,
];

/// Returns what a Service asks of the userspace proxy. An annotation that is not understood is reported and counts as
/// missing.
pub(super) fn proxied(
    metadata: &ObjectMeta,
    ports: &[Port],
    report: &mut Report<'_>,
) -> Option<Arc<Proxied>> {
    let mut reader = Reader {
        annotations: metadata.annotations.as_ref()?,
        report,
        is_asked: false,
    };
    let balance = reader.read(
        BALANCE_ANNOTATION,
        "round-robin, least-connections, weighted or source-hash",
        Balance::parse,
    );
    let weights = reader.read(
        WEIGHTS_ANNOTATION,
        "up to 64 pairs such as 10.244.1.0/24=3, separated by commas, with weights of 1..=65535",
        weights,
    );
    let header = reader.read(PROXY_PROTOCOL_ANNOTATION, "v1 or v2", ProxyHeader::parse);
    let retry = reader.read(CONNECT_RETRY_ANNOTATION, "true or false", |text| {
        text.parse().ok()
    });
    reader.read(DATA_PATH_ANNOTATION, "userspace", |text| {
        (text == "userspace").then_some(())
    });
    if !reader.is_asked {
        return None;
    }
    check_ports(ports, header.is_some(), report);
    let of_weights = weights.as_ref().map(|_| Balance::Weighted);
    Some(Arc::new(Proxied {
        balance: balance.or(of_weights).unwrap_or_default(),
        header,
        retry: retry.unwrap_or(true),
        weights: weights.unwrap_or_default(),
    }))
}

/// Reports ports that the proxy cannot serve as asked.
fn check_ports(ports: &[Port], has_header: bool, report: &mut Report<'_>) {
    let has = |protocol| ports.iter().any(|port| port.protocol == protocol);
    if has(Protocol::Sctp) {
        let asking = ASKING.join(", ");
        report.warning(
            Reason::InvalidField,
            format!(
                "SCTP ports stay with the kernel, since the userspace proxy does not speak SCTP; the annotations {asking} \
                 apply to the other ports"
            ),
        );
    }
    if has_header && has(Protocol::Udp) {
        report.warning(
            Reason::InvalidField,
            format!("annotation {PROXY_PROTOCOL_ANNOTATION} applies to TCP ports, not to UDP ones"),
        );
    }
}

/// A reader of annotations.
struct Reader<'a, 'b> {
    annotations: &'a Texts,
    report: &'a mut Report<'b>,
    /// Whether some annotation was understood.
    is_asked: bool,
}

impl Reader<'_, '_> {
    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let text: &str = self.annotations.get(name)?;
        let parsed = parse(text.trim());
        if parsed.is_none() {
            self.report.warning(
                Reason::InvalidField,
                format!("annotation {name} {text:?} is ignored: it must be {expected}"),
            );
        }
        self.is_asked |= parsed.is_some();
        parsed
    }
}

/// Reads pairs of ranges and weights.
fn weights(text: &str) -> Option<Vec<(Cidr, u16)>> {
    let pairs = text.split(',').take(Proxied::MAX_WEIGHTS + 1);
    let weights: Option<Vec<_>> = pairs.map(weight).collect();
    weights.filter(|weights| weights.len() <= Proxied::MAX_WEIGHTS)
}

fn weight(pair: &str) -> Option<(Cidr, u16)> {
    let (range, weight) = pair.split_once('=')?;
    let range = range.trim();
    let range = match range.parse() {
        Ok(range) => range,
        Err(_) => Cidr::single(kplane_model::parse_ip(range).ok()?),
    };
    let weight: u16 = weight.trim().parse().ok()?;
    (weight > 0).then_some((range, weight))
}
