//! Numbers of the fields that kplane reads.
//!
//! Source: `generated.proto` of k8s.io/api (core/v1, discovery/v1) and of k8s.io/apimachinery (meta/v1, runtime, intstr)
//! v0.37. Numbers never change. Whether JSON omits an empty field stands in the Go types beside them.

/// A type of messages, by the fields that kplane reads.
pub(in super::super) struct Message(pub(super) &'static [MessageField]);

/// A field that kplane reads.
pub(super) struct MessageField {
    pub(super) tag: u32,
    /// Its name in JSON.
    pub(super) name: &'static str,
    pub(super) presence: Presence,
    pub(super) shape: Shape,
}

/// The condition under which JSON has a field that protobuf has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    Always,
    /// `omitempty`, where protobuf has the empty text, zero or false.
    UnlessEmpty,
    /// A list or a map.
    Many,
}

/// The kind of a field's content.
#[derive(Clone, Copy)]
pub(super) enum Shape {
    Text,
    Number,
    Flag,
    Bytes,
    /// `metav1.Time`.
    Time,
    /// `intstr.IntOrString`.
    NameOrNumber,
    /// An entry of a map from texts to texts.
    Entry,
    Message(&'static Message),
}

use Shape::{Entry, Flag, Number, Text};

const fn field(tag: u32, name: &'static str, presence: Presence, shape: Shape) -> MessageField {
    MessageField {
        tag,
        name,
        presence,
        shape,
    }
}

const fn always(tag: u32, name: &'static str, shape: Shape) -> MessageField {
    field(tag, name, Presence::Always, shape)
}

const fn filled(tag: u32, name: &'static str, shape: Shape) -> MessageField {
    field(tag, name, Presence::UnlessEmpty, shape)
}

const fn many(tag: u32, name: &'static str, shape: Shape) -> MessageField {
    field(tag, name, Presence::Many, shape)
}

pub(super) static ENVELOPE: Message = Message(&[always(2, "raw", Shape::Bytes)]);

pub(in super::super) static WATCH_EVENT: Message = Message(&[
    always(1, "type", Text),
    always(2, "object", Shape::Message(&RAW_EXTENSION)),
]);

static RAW_EXTENSION: Message = Message(&[always(1, "raw", Shape::Bytes)]);

pub(in super::super) static LIST: Message = Message(&[
    always(1, "metadata", Shape::Message(&LIST_META)),
    many(2, "items", Shape::Bytes),
]);

static LIST_META: Message = Message(&[
    always(2, "resourceVersion", Text),
    filled(3, "continue", Text),
]);

pub(in super::super) static STATUS: Message =
    Message(&[filled(3, "message", Text), filled(6, "code", Number)]);

pub(super) static TIME: Message = Message(&[always(1, "seconds", Number)]);

pub(super) static INT_OR_STRING: Message = Message(&[
    always(1, "type", Number),
    always(2, "intVal", Number),
    always(3, "strVal", Text),
]);

static META: Message = Message(&[
    filled(1, "name", Text),
    filled(3, "namespace", Text),
    filled(5, "uid", Text),
    filled(6, "resourceVersion", Text),
    always(8, "creationTimestamp", Shape::Time),
    always(9, "deletionTimestamp", Shape::Time),
    many(11, "labels", Entry),
    many(12, "annotations", Entry),
]);

const METADATA: MessageField = always(1, "metadata", Shape::Message(&META));

pub(in super::super) static SERVICE: Message = Message(&[
    METADATA,
    always(2, "spec", Shape::Message(&SERVICE_SPEC)),
    always(3, "status", Shape::Message(&SERVICE_STATUS)),
]);

static SERVICE_SPEC: Message = Message(&[
    many(1, "ports", Shape::Message(&SERVICE_PORT)),
    many(2, "selector", Entry),
    filled(3, "clusterIP", Text),
    filled(4, "type", Text),
    many(5, "externalIPs", Text),
    filled(7, "sessionAffinity", Text),
    many(9, "loadBalancerSourceRanges", Text),
    filled(10, "externalName", Text),
    filled(11, "externalTrafficPolicy", Text),
    filled(12, "healthCheckNodePort", Number),
    filled(13, "publishNotReadyAddresses", Flag),
    always(
        14,
        "sessionAffinityConfig",
        Shape::Message(&SESSION_AFFINITY_CONFIG),
    ),
    many(18, "clusterIPs", Text),
    many(19, "ipFamilies", Text),
    always(22, "internalTrafficPolicy", Text),
]);

static SERVICE_PORT: Message = Message(&[
    filled(1, "name", Text),
    filled(2, "protocol", Text),
    always(3, "port", Number),
    always(4, "targetPort", Shape::NameOrNumber),
    filled(5, "nodePort", Number),
]);

static SESSION_AFFINITY_CONFIG: Message =
    Message(&[always(1, "clientIP", Shape::Message(&CLIENT_IP_CONFIG))]);

static CLIENT_IP_CONFIG: Message = Message(&[always(1, "timeoutSeconds", Number)]);

static SERVICE_STATUS: Message = Message(&[always(
    1,
    "loadBalancer",
    Shape::Message(&LOAD_BALANCER_STATUS),
)]);

static LOAD_BALANCER_STATUS: Message =
    Message(&[many(1, "ingress", Shape::Message(&LOAD_BALANCER_INGRESS))]);

static LOAD_BALANCER_INGRESS: Message =
    Message(&[filled(1, "ip", Text), always(3, "ipMode", Text)]);

pub(in super::super) static SLICE: Message = Message(&[
    METADATA,
    many(2, "endpoints", Shape::Message(&ENDPOINT)),
    many(3, "ports", Shape::Message(&ENDPOINT_PORT)),
    always(4, "addressType", Text),
]);

static ENDPOINT: Message = Message(&[
    many(1, "addresses", Text),
    always(2, "conditions", Shape::Message(&CONDITIONS)),
    always(4, "targetRef", Shape::Message(&OBJECT_REFERENCE)),
    always(6, "nodeName", Text),
    always(8, "hints", Shape::Message(&HINTS)),
]);

static CONDITIONS: Message = Message(&[
    always(1, "ready", Flag),
    always(2, "serving", Flag),
    always(3, "terminating", Flag),
]);

static OBJECT_REFERENCE: Message = Message(&[
    filled(1, "kind", Text),
    filled(2, "namespace", Text),
    filled(3, "name", Text),
]);

static HINTS: Message = Message(&[
    many(1, "forZones", Shape::Message(&HINT)),
    many(2, "forNodes", Shape::Message(&HINT)),
]);

static HINT: Message = Message(&[always(1, "name", Text)]);

static ENDPOINT_PORT: Message = Message(&[
    always(1, "name", Text),
    always(2, "protocol", Text),
    always(3, "port", Number),
]);

pub(in super::super) static NODE: Message = Message(&[
    METADATA,
    always(2, "spec", Shape::Message(&NODE_SPEC)),
    always(3, "status", Shape::Message(&NODE_STATUS)),
]);

static NODE_SPEC: Message = Message(&[
    filled(1, "podCIDR", Text),
    many(5, "taints", Shape::Message(&TAINT)),
    many(7, "podCIDRs", Text),
]);

static TAINT: Message = Message(&[always(1, "key", Text)]);

static NODE_STATUS: Message = Message(&[many(5, "addresses", Shape::Message(&NODE_ADDRESS))]);

static NODE_ADDRESS: Message = Message(&[always(1, "type", Text), always(2, "address", Text)]);

pub(in super::super) static NAMESPACE: Message = Message(&[METADATA]);

pub(in super::super) static POD: Message = Message(&[
    METADATA,
    always(2, "spec", Shape::Message(&POD_SPEC)),
    always(3, "status", Shape::Message(&POD_STATUS)),
]);

static POD_SPEC: Message = Message(&[
    many(2, "containers", Shape::Message(&CONTAINER)),
    filled(10, "nodeName", Text),
    filled(11, "hostNetwork", Flag),
    many(20, "initContainers", Shape::Message(&CONTAINER)),
]);

static CONTAINER: Message = Message(&[
    many(6, "ports", Shape::Message(&CONTAINER_PORT)),
    always(24, "restartPolicy", Text),
]);

static CONTAINER_PORT: Message = Message(&[
    filled(1, "name", Text),
    always(3, "containerPort", Number),
    filled(4, "protocol", Text),
]);

static POD_STATUS: Message = Message(&[
    filled(1, "phase", Text),
    filled(6, "podIP", Text),
    many(12, "podIPs", Shape::Message(&POD_IP)),
]);

static POD_IP: Message = Message(&[filled(1, "ip", Text)]);
