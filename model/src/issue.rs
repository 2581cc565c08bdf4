//! Problems with the input. Each is kept until the input is fixed, so that no problem goes
//! unreported.

use std::fmt;

use crate::Reason;

/// Severity of an [`Issue`] or a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Worth knowing: nothing is wrong. No issue has it.
    Info,
    /// The object is served, but not in every respect as written.
    Warning,
    /// The object, or the named part of it, is not served as written.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// The object that an issue is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectRef {
    /// The kind, such as `Service`; empty when a document is not an object.
    pub kind: String,
    /// The namespace; empty for cluster-wide kinds.
    pub namespace: String,
    /// The name; empty when unknown.
    pub name: String,
}

impl ObjectRef {
    /// Creates a reference; an empty namespace or name stands for none.
    pub fn new(kind: impl AsRef<str>, namespace: impl AsRef<str>, name: impl AsRef<str>) -> Self {
        Self {
            kind: kind.as_ref().to_owned(),
            namespace: namespace.as_ref().to_owned(),
            name: name.as_ref().to_owned(),
        }
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&*self.kind, &*self.namespace, &*self.name) {
            ("", _, _) => f.write_str("document"),
            (kind, _, "") => f.write_str(kind),
            (kind, "", name) => write!(f, "{kind} {name}"),
            (kind, namespace, name) => write!(f, "{kind} {namespace}/{name}"),
        }
    }
}

/// One problem with one object of the input.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Issue {
    /// The severity.
    pub severity: Severity,
    /// The kind of problem.
    pub code: Reason,
    /// Place where the object was read, such as `shop.yaml, document 2, line 14`; empty when the
    /// source has no places.
    pub location: String,
    /// The object.
    pub object: ObjectRef,
    /// The problem, and what to do about it.
    pub reason: String,
}

impl Issue {
    /// Creates an error that has no place in the source.
    pub fn error(code: Reason, object: ObjectRef, reason: String) -> Self {
        Self {
            severity: Severity::Error,
            code,
            location: String::new(),
            object,
            reason,
        }
    }

    /// Returns an error of the source as a whole.
    pub fn of_source(code: Reason, reason: String) -> Self {
        Self::error(code, ObjectRef::new("source", "", ""), reason)
    }

    /// Sets the place.
    #[must_use]
    pub fn at(self, location: impl Into<String>) -> Self {
        Self {
            location: location.into(),
            ..self
        }
    }
}

impl fmt::Display for Issue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.location.is_empty() {
            write!(f, "{}: ", self.location)?;
        }
        write!(f, "{}: {}", self.object, self.reason)
    }
}
