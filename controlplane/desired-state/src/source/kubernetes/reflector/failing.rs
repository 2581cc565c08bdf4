//! Handling of failures.

use std::time::Duration;

use tokio::time::Instant;

use super::{ABSENT, Closed, LONG_OUTAGE, OPTIONAL_AFTER, PAGE, Phase, Reflector, Then};
use crate::k8s::Kind;
use crate::kubernetes::Failure;
use crate::source::Event;
use crate::source::kubernetes::resource::Resource;
use crate::source::kubernetes::transport::Transport;

impl<T: Transport> Reflector<T> {
    pub(super) async fn failed(
        &mut self,
        verb: &'static str,
        failure: Failure,
        then: Then,
    ) -> Result<Phase<T::Watch>, Closed> {
        // Without ranges, Services work. Without policies that may exist, Pods would be open.
        let optional = self.kind == Kind::ServiceCidr;
        // The versions that a definition serves may change at any time.
        let versioned = self.kind == Kind::ClusterNetworkPolicy;
        if failure == Failure::NotServed && (!self.synced || versioned) {
            return self.not_served(failure).await;
        }
        if failure == Failure::Gone && verb == "watch" {
            return Ok(self.compacted());
        }
        let wait = self.note(verb, &failure).await;
        let then = match failure {
            // The same events would come again.
            Failure::Refused { .. } | Failure::Malformed(_) => Then::List,
            _ => then,
        };
        let overdue = self.started.elapsed() >= OPTIONAL_AFTER;
        if optional && !self.synced && overdue {
            self.serve_without().await?;
        } else if versioned && self.synced && self.memory.seen() == 0 {
            // Nobody waits for what this server never listed, so it stops no confirmation either.
            self.is_still_without().await?;
        }
        Ok(Phase::after(wait, then))
    }

    /// Handles a compacted watch: the server no longer has the changes since the known state, as is
    /// normal after its restart. The first list follows at once; further ones wait if it did not
    /// help.
    pub(super) fn compacted(&mut self) -> Phase<T::Watch> {
        self.report.failure(&Failure::Gone);
        if !std::mem::replace(&mut self.compacted, true) {
            return self.list(PAGE);
        }
        Phase::after(self.backoff.next(), Then::List)
    }

    /// Counts and reports a failure; returns the pause.
    pub(super) async fn note(&mut self, verb: &'static str, failure: &Failure) -> Duration {
        if failure.is_general() {
            self.outage_since.get_or_insert_with(Instant::now);
        }
        if failure.wants_new_credentials() {
            self.transport.renew().await;
        }
        let wait = self.backoff.next();
        let asked = self.transport.resource().asked(verb);
        let server = self.transport.server();
        let failures = self.backoff.failures();
        self.report.failed(&server, asked, failure, failures);
        match failure {
            Failure::Busy { after: Some(after) } => wait.max((*after).min(LONG_OUTAGE)),
            _ => wait,
        }
    }

    /// Handles a resource that the server does not have.
    pub(super) async fn not_served(&mut self, failure: Failure) -> Result<Phase<T::Watch>, Closed> {
        let instead = match self.transport.resource() {
            Resource::ServiceCidrs => {
                self.report.absent();
                self.serve_without().await?;
                // The kind is not synced: when the resource appears, it is listed as for the first
                // time.
                self.synced = false;
                return Ok(Phase::after(ABSENT, Then::List));
            }
            Resource::ClusterPolicies { beta } => {
                let beta = *beta;
                let other = Resource::ClusterPolicies { beta: !beta };
                self.transport.set_resource(other);
                if beta {
                    return Ok(Phase::after(Duration::ZERO, Then::List));
                }
                if self.memory.is_empty() {
                    self.report.absent();
                    if self.synced {
                        self.is_still_without().await?;
                    } else {
                        self.serve_without().await?;
                    }
                    return Ok(Phase::after(ABSENT, Then::Look));
                }
                // Their definition is gone, and none of them was deleted: they stay.
                let wait = self.note("list", &failure).await;
                return Ok(Phase::after(wait, Then::List));
            }
            Resource::Slices => Resource::Endpoints,
            Resource::Endpoints => Resource::Slices,
            Resource::Services
            | Resource::Nodes(_)
            | Resource::NetworkPolicies
            | Resource::Namespaces
            | Resource::Pods => {
                let wait = self.note("list", &failure).await;
                return Ok(Phase::after(wait, Then::List));
            }
        };
        tracing::warn!(
            instead = %instead.kind(),
            "the API server does not have this kind; listing another one instead"
        );
        let wait = match instead {
            Resource::Slices => self.note("list", &failure).await,
            _ => Duration::ZERO,
        };
        self.transport.set_resource(instead);
        Ok(Phase::after(wait, Then::List))
    }

    /// Passes on an empty list, so that nothing waits for the resource any longer.
    pub(super) async fn serve_without(&mut self) -> Result<(), Closed> {
        self.synced = true;
        self.report.synced();
        let events = vec![Event::Init(self.kind), Event::InitDone(self.kind)];
        self.tell(events).await
    }
}
