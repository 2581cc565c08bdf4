//! The first message of a stream: who the agent is, and what it holds and can do.

use kplane_proto::v1 as pb;
use kplane_proto::v1::agent_message;
use kplane_proto::{DIGEST_SCHEMA, PROTOCOL_VERSION};

use super::Client;

/// The set of capabilities beyond the base protocol as bits: capability N is bit N - 1.
const CAPABILITIES: u64 = capability(pb::Capability::Draining)
    | capability(pb::Capability::Ranges)
    | capability(pb::Capability::Packed)
    | capability(pb::Capability::Policies)
    | capability(pb::Capability::Beats)
    | capability(pb::Capability::ClusterPolicies)
    | capability(pb::Capability::Urgent);

const fn capability(capability: pb::Capability) -> u64 {
    1 << (capability as u64 - 1)
}

impl<T> Client<T> {
    /// Returns the message.
    pub(super) fn hello(&self) -> pb::AgentMessage {
        let (resume, from_cache) = {
            let reports = self.shared.engine.reports();
            let report = reports.borrow();
            let confirmed = report.held.is_some() && report.stale_since_ms.is_none();
            (if self.fresh { None } else { report.resume }, !confirmed)
        };
        let from_cache = from_cache && resume.is_some();
        let resume = resume.map(|resume| pb::ResumeToken {
            schema: DIGEST_SCHEMA,
            epoch: resume.position.epoch,
            revision: resume.position.revision,
            digest: resume.digest.to_bytes().to_vec(),
        });
        let backend = self.shared.engine.backend();
        let hello = pb::Hello {
            protocol_version: PROTOCOL_VERSION,
            capabilities: CAPABILITIES,
            node_name: self.identity.node.to_string(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            instance: self.identity.instance,
            resume,
            backend: backend.name.to_owned(),
            backend_deprecation: backend.deprecation.unwrap_or_default().to_owned(),
            from_cache,
            mode_unset: self.identity.mode_unset,
        };
        pb::AgentMessage {
            kind: Some(agent_message::Kind::Hello(hello)),
        }
    }
}
