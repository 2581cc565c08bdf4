//! Conversions to human-readable views, for the status API.

use kplane_model::fate::LocalRule;
use kplane_model::{Issue, Severity};

use crate::v1 as pb;

impl From<Severity> for pb::Severity {
    fn from(severity: Severity) -> Self {
        match severity {
            Severity::Info => Self::Info,
            Severity::Warning => Self::Warning,
            Severity::Error => Self::Error,
        }
    }
}

impl From<LocalRule> for pb::LocalRule {
    fn from(rule: LocalRule) -> Self {
        match rule {
            LocalRule::BySender => Self::Unspecified,
            LocalRule::FallsBack => Self::FallsBack,
            LocalRule::Strict => Self::Strict,
        }
    }
}

impl From<pb::LocalRule> for LocalRule {
    fn from(rule: pb::LocalRule) -> Self {
        match rule {
            pb::LocalRule::Unspecified => Self::BySender,
            pb::LocalRule::FallsBack => Self::FallsBack,
            pb::LocalRule::Strict => Self::Strict,
        }
    }
}

impl From<&Issue> for pb::InputIssue {
    fn from(issue: &Issue) -> Self {
        Self {
            severity: pb::Severity::from(issue.severity).into(),
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
