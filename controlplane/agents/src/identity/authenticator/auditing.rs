//! The audit log: what callers did, and which requests were refused.

use super::super::audit::AuditEntry;
use super::super::{Refusal, Right};
use super::Caller;

impl Caller {
    /// Records that the caller changed something.
    pub fn did(&self, right: &Right, text: &str) {
        let action = format!("{} {}", right.verb(), right.path());
        self.authenticator.audit.changed(&AuditEntry {
            decision: "allowed",
            text,
            ..self.entry(&action)
        });
    }

    /// Counts a refusal, and writes it to the audit log.
    pub(in super::super) fn refused(&self, action: &str, refusal: &Refusal) {
        self.authenticator.refusals.count(self.port, refusal.reason);
        let from = self.connection.peer().ip();
        self.authenticator.audit.refused(
            from,
            &AuditEntry {
                decision: "refused",
                reason: refusal.reason.as_str(),
                text: &refusal.text,
                ..self.entry(action)
            },
        );
    }

    fn entry<'a>(&'a self, action: &'a str) -> AuditEntry<'a> {
        let subject = self.who.as_ref().map(|who| &who.subject);
        AuditEntry {
            user: subject.map_or("", |subject| &subject.name),
            groups: subject.map_or(&[], |subject| &subject.groups),
            from: self.connection.peer().to_string(),
            port: self.port.as_str(),
            action,
            ..AuditEntry::default()
        }
    }
}
