//! Conversions to human-readable views, for the status API.

use kplane_model::{Issue, Severity};

use crate::v1 as pb;

impl From<&Issue> for pb::InputIssue {
    fn from(issue: &Issue) -> Self {
        let severity = match issue.severity {
            Severity::Warning => pb::Severity::Warning,
            Severity::Error => pb::Severity::Error,
        };
        Self {
            severity: severity.into(),
            location: issue.location.clone(),
            kind: issue.object.kind.clone(),
            namespace: issue.object.namespace.clone(),
            name: issue.object.name.clone(),
            reason: issue.reason.clone(),
            alike: 0,
            code: issue.code.code().to_owned(),
        }
    }
}
