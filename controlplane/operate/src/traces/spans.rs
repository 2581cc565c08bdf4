//! The spans of one change. Pure.

use std::fmt::Display;

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use ring::digest::{SHA256, digest};

/// Sizes of ids (W3C Trace Context).
const TRACE_ID: usize = 16;
const SPAN_ID: usize = 8;

/// Returns the spans of a change: the whole way, its parts in the control plane, and the nodes that the record names.
pub(super) fn of(epoch: u64, service: &ServiceName, change: &pb::ServiceChange) -> Vec<Span> {
    let written = change.causes.iter().map(|cause| cause.written_ms);
    let written = written.filter(|at| *at > 0).max();
    let start = written.map_or(change.observed_ms, |at| at.min(change.observed_ms));
    let nodes = change.slowest.iter().map(|node| node.at_ms).max();
    let end = nodes.unwrap_or(0).max(change.published_ms).max(start);
    let trace = Trace::new(epoch, service, change);
    let mut root = trace.span("change", start, end, "");
    root.name = format!("change of {service}");
    root.attributes = attributes(service, change);
    if !change.waiting.is_empty() {
        let waiting: Vec<&str> = change.waiting.iter().map(|node| &*node.node).collect();
        root.status = Some(Status {
            message: format!("nodes without it: {}", waiting.join(", ")),
            code: StatusCode::Error.into(),
        });
    }
    let mut spans = Vec::new();
    if let Some(written) = written.filter(|at| *at <= change.observed_ms) {
        spans.push(trace.span("watch", written, change.observed_ms, "change"));
    }
    if change.published_ms >= change.observed_ms {
        spans.push(trace.span("publish", change.observed_ms, change.published_ms, "change"));
    }
    for node in &change.slowest {
        let mut span = trace.span(
            &format!("node {}", node.node),
            change.published_ms,
            node.at_ms.max(change.published_ms),
            "change",
        );
        span.attributes = vec![text("k8s.node.name", &node.node)];
        if node.or_before {
            span.attributes.push(text("kplane.time", "at the latest"));
        }
        spans.push(span);
    }
    spans.insert(0, root);
    spans
}

/// Returns spans with the facts about this process.
pub(super) fn resource(epoch: u64, spans: Vec<Span>) -> ResourceSpans {
    let attributes = vec![
        text("service.name", "kp-controlplane"),
        text("service.version", env!("CARGO_PKG_VERSION")),
        text("service.instance.id", format_args!("{epoch:016x}")),
    ];
    ResourceSpans {
        resource: Some(Resource {
            attributes,
            ..Resource::default()
        }),
        scope_spans: vec![ScopeSpans {
            scope: Some(InstrumentationScope {
                name: "kplane".to_owned(),
                ..InstrumentationScope::default()
            }),
            spans,
            ..ScopeSpans::default()
        }],
        ..ResourceSpans::default()
    }
}

fn attributes(service: &ServiceName, change: &pb::ServiceChange) -> Vec<KeyValue> {
    let mut attributes = vec![
        text("k8s.namespace.name", &service.namespace),
        text("kplane.service", &service.name),
        number("kplane.revision", change.revision),
        number("kplane.nodes", change.nodes),
        number("kplane.nodes.reached", change.reached),
    ];
    for cause in &change.causes {
        let what = format!("{} {}/{}", cause.kind, cause.namespace, cause.name);
        attributes.push(text("kplane.cause", what));
        attributes.push(number("kplane.cause.resource_version", cause.version));
    }
    attributes
}

/// The identity of a trace. Replicas that see the same write make spans of the same trace.
struct Trace {
    id: Vec<u8>,
    epoch: u64,
}

impl Trace {
    fn new(epoch: u64, service: &ServiceName, change: &pb::ServiceChange) -> Self {
        let version = change.causes.iter().map(|cause| cause.version).max();
        // Manifests have no versions.
        let version = version.filter(|version| *version > 0);
        let write = match version {
            Some(version) => format!("{service} {version}"),
            None => format!("{service} {epoch} {}", change.revision),
        };
        Self {
            id: hash(write.as_bytes(), TRACE_ID),
            epoch,
        }
    }

    /// Returns a span; `parent` is the name of another one, or empty.
    fn span(&self, name: &str, start_ms: u64, end_ms: u64, parent: &str) -> Span {
        Span {
            trace_id: self.id.clone(),
            span_id: self.span_id(name),
            parent_span_id: match parent {
                "" => Vec::new(),
                parent => self.span_id(parent),
            },
            name: name.to_owned(),
            kind: SpanKind::Internal.into(),
            start_time_unix_nano: nanos(start_ms),
            end_time_unix_nano: nanos(end_ms),
            ..Span::default()
        }
    }

    fn span_id(&self, name: &str) -> Vec<u8> {
        let seed = [&self.id[..], &self.epoch.to_be_bytes(), name.as_bytes()].concat();
        hash(&seed, SPAN_ID)
    }
}

fn hash(seed: &[u8], len: usize) -> Vec<u8> {
    digest(&SHA256, seed)
        .as_ref()
        .iter()
        .copied()
        .take(len)
        .collect()
}

fn nanos(ms: u64) -> u64 {
    ms.saturating_mul(1_000_000)
}

fn text(key: &str, value: impl Display) -> KeyValue {
    pair(key, Value::StringValue(value.to_string()))
}

fn number(key: &str, value: u64) -> KeyValue {
    pair(
        key,
        Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)),
    )
}

fn pair(key: &str, value: Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change() -> pb::ServiceChange {
        let node = |node: &str, at_ms| pb::NodeReached {
            node: node.to_owned(),
            at_ms,
            ..pb::NodeReached::default()
        };
        pb::ServiceChange {
            revision: 7,
            observed_ms: 1_020,
            published_ms: 1_021,
            causes: vec![pb::ChangeCause {
                kind: "EndpointSlice".to_owned(),
                version: 4_711,
                written_ms: 1_000,
                ..pb::ChangeCause::default()
            }],
            nodes: 3,
            reached: 2,
            slowest: vec![node("n2", 1_030), node("n1", 1_024)],
            waiting: vec![node("n3", 0)],
            ..pb::ServiceChange::default()
        }
    }

    #[test]
    fn a_trace_has_the_way_from_the_write_to_the_nodes() {
        let service = ServiceName::new("shop", "web");
        let spans = of(1, &service, &change());
        let times: Vec<_> = spans
            .iter()
            .map(|span| {
                let ms = [span.start_time_unix_nano, span.end_time_unix_nano];
                (span.name.as_str(), ms.map(|ns| ns / 1_000_000))
            })
            .collect();
        assert_eq!(
            times,
            [
                ("change of shop/web", [1_000, 1_030]),
                ("watch", [1_000, 1_020]),
                ("publish", [1_020, 1_021]),
                ("node n2", [1_021, 1_030]),
                ("node n1", [1_021, 1_024]),
            ]
        );
        let root = &spans[0];
        assert!(root.parent_span_id.is_empty());
        assert_eq!(
            root.status.as_ref().unwrap().message,
            "nodes without it: n3"
        );
        for span in &spans[1..] {
            assert_eq!(span.parent_span_id, root.span_id);
            assert_eq!(
                (span.trace_id.len(), span.span_id.len()),
                (TRACE_ID, SPAN_ID)
            );
        }
    }

    #[test]
    fn replicas_make_spans_of_one_trace() {
        let service = ServiceName::new("shop", "web");
        let [one, other] = [1, 2].map(|epoch| of(epoch, &service, &change()));
        assert_eq!(one[0].trace_id, other[0].trace_id);
        assert_ne!(one[0].span_id, other[0].span_id);
        let later = pb::ServiceChange {
            causes: Vec::new(),
            ..change()
        };
        assert_ne!(of(1, &service, &later)[0].trace_id, one[0].trace_id);
    }
}
