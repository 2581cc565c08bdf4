//! The record as messages have it.

use kplane_desired_state::index::{Cause, Details, EndpointState, Verb};
use kplane_desired_state::recorder::Notice;
use kplane_proto::v1 as pb;

pub(super) fn cause(cause: &Cause) -> pb::ChangeCause {
    let verb = match cause.verb {
        Verb::Added => pb::ChangeVerb::Added,
        Verb::Changed => pb::ChangeVerb::Changed,
        Verb::Removed => pb::ChangeVerb::Removed,
    };
    let details = &cause.details;
    pb::ChangeCause {
        kind: cause.object.kind.to_string(),
        namespace: cause.object.namespace.to_string(),
        name: cause.object.name.to_string(),
        version: cause.version,
        location: cause.location.to_string(),
        verb: verb.into(),
        written_ms: cause.written_ms,
        endpoints: endpoints(details),
        fields: fields(details),
        omitted: details.omitted,
    }
}

pub(super) fn endpoints(details: &Details) -> Vec<pb::RecordedEndpoint> {
    details
        .endpoints
        .iter()
        .map(|change| pb::RecordedEndpoint {
            address: change.addr.to_string(),
            node: change.node.as_deref().unwrap_or_default().to_owned(),
            before: state(change.before).into(),
            after: state(change.after).into(),
        })
        .collect()
}

pub(super) fn fields(details: &Details) -> Vec<pb::RecordedField> {
    details
        .fields
        .iter()
        .map(|change| pb::RecordedField {
            field: change.field.clone(),
            before: change.before.clone(),
            after: change.after.clone(),
        })
        .collect()
}

fn state(state: EndpointState) -> pb::RecordedState {
    match state {
        EndpointState::Absent => pb::RecordedState::Absent,
        EndpointState::Ready => pb::RecordedState::Ready,
        EndpointState::NotReady => pb::RecordedState::NotReady,
        EndpointState::Draining => pb::RecordedState::Draining,
        EndpointState::Terminating => pb::RecordedState::Terminating,
    }
}

pub(super) fn notice(notice: Notice) -> pb::Noticed {
    pb::Noticed {
        number: notice.number,
        at_ms: notice.at_ms,
        kind: notice.kind.as_str().to_owned(),
        object: notice.object,
        text: notice.text,
    }
}
