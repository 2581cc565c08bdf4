//! What the control plane's account asked of the API server, by the server's own audit log.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result};
use serde_json::Value;
use tempfile::TempDir;

/// The account of control planes.
const USER: &str = "system:serviceaccount:kplane:kplane-controlplane";

/// An audit log that has this account's requests alone.
pub(crate) struct Audit(TempDir);

/// A request: the API group, the resource, the object's name or nothing, and the verb.
pub(crate) type Request = [String; 4];

impl Audit {
    pub(crate) fn new() -> Result<Self> {
        let folder = tempfile::tempdir().context("make a folder for the audit log")?;
        let policy = format!(
            "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n\
             - level: Metadata\n  users: [\"{USER}\"]\n- level: None\n"
        );
        fs::write(folder.path().join("policy.yaml"), policy)?;
        Ok(Self(folder))
    }

    /// Returns the flags of the API server that writes the log.
    pub(crate) fn flags(&self) -> [String; 2] {
        let place = |name: &str| self.0.path().join(name).display().to_string();
        [
            format!("--audit-policy-file={}", place("policy.yaml")),
            format!("--audit-log-path={}", place("log")),
        ]
    }

    /// Returns all requests that the server allowed.
    pub(crate) fn allowed(&self) -> Result<BTreeSet<Request>> {
        let log = fs::read_to_string(self.0.path().join("log")).context("read the audit log")?;
        let mut requests = BTreeSet::new();
        for line in log.lines() {
            // The last line may be half written.
            let Ok(event) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            let of = &event["objectRef"];
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            if event["annotations"]["authorization.k8s.io/decision"] == "allow" {
                requests.insert([
                    text(&of["apiGroup"]),
                    text(&of["resource"]),
                    text(&of["name"]),
                    text(&event["verb"]),
                ]);
            }
        }
        Ok(requests)
    }
}
