//! Collection of one object's issues.

use kplane_model::{Issue, ObjectRef, Reason, Severity};

use super::MAX_ISSUES_PER_OBJECT;
use crate::k8s::{Kind, ObjectMeta};

/// The issues of one object; costs nothing while there are none.
pub(super) struct Report<'a> {
    kind: Kind,
    metadata: &'a ObjectMeta,
    location: &'a str,
    issues: Vec<Issue>,
    omitted: usize,
}

impl<'a> Report<'a> {
    pub(super) fn new(kind: Kind, metadata: &'a ObjectMeta, location: &'a str) -> Self {
        Self {
            kind,
            metadata,
            location,
            issues: Vec::new(),
            omitted: 0,
        }
    }

    /// Reports that a part of the object is not served as written.
    pub(super) fn error(&mut self, code: Reason, reason: impl Into<String>) {
        self.add(Severity::Error, code, reason.into());
    }

    /// Reports that the object is served, but not in every respect as written.
    pub(super) fn warning(&mut self, code: Reason, reason: impl Into<String>) {
        self.add(Severity::Warning, code, reason.into());
    }

    pub(super) fn finish(mut self) -> Vec<Issue> {
        if self.omitted > 0 {
            let reason = format!(
                "has {} further problems that are not listed; fix the listed ones first",
                self.omitted
            );
            self.issues.push(self.issue(Severity::Error, Reason::MoreProblems, reason));
        }
        self.issues
    }

    fn add(&mut self, severity: Severity, code: Reason, reason: String) {
        if self.issues.len() < MAX_ISSUES_PER_OBJECT {
            self.issues.push(self.issue(severity, code, reason));
        } else {
            self.omitted += 1;
        }
    }

    pub(super) fn issue(&self, severity: Severity, code: Reason, reason: String) -> Issue {
        Issue {
            severity,
            code,
            location: self.location.to_owned(),
            object: ObjectRef::new(
                self.kind.as_str(),
                self.metadata.namespace_of(self.kind),
                &self.metadata.name,
            ),
            reason,
        }
    }
}
