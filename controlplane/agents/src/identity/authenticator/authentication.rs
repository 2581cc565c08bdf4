//! Authentication: the identity that a connection or a token proves, and when the proof ends.

use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::NodeName;
use kplane_tls::Token;
use tokio::time::{Instant, sleep_until};

use super::super::{Identity, Proof, Refusal, RefusalReason};
use super::{Caller, Port};
use crate::connection_limits::{TransportIdentity, network};

impl Caller {
    /// Returns when the proof of the identity ends, by a clock that does not step: a step ends no open stream.
    pub(in super::super) fn end(&self) -> Option<Instant> {
        let left = self.who.as_ref()?.until?.duration_since(SystemTime::now());
        Some(Instant::now() + left.unwrap_or_default())
    }

    /// Waits until the proof of the identity ends, if it does.
    pub async fn ended(&self) -> Refusal {
        match self.end() {
            Some(end) => sleep_until(end).await,
            None => std::future::pending().await,
        }
        let refusal = Refusal::new(
            RefusalReason::Ended,
            "the credential has ended; connect with a renewed one",
        );
        self.refused("watch", &refusal);
        refusal
    }

    /// Checks the caller again, as the agent of a node: with `token`, if there is a newer one.
    pub(in super::super) async fn again(
        &self,
        node: &NodeName,
        token: Option<Token>,
    ) -> Result<Self, Refusal> {
        let caller = Self {
            token: token.or_else(|| self.token.clone()),
            ..self.clone()
        };
        let who = match &self.who {
            // The connection proved it for good; the watch of a credential knows when it ends.
            Some(who) if who.proof == Proof::Certificate => Some(Arc::clone(who)),
            _ => caller.identify().await?,
        };
        if let Some(who) = &who {
            self.authenticator.is_agent(who, node).await?;
        }
        self.authenticator.is_still_there(node)?;
        Ok(Self { who, ..caller })
    }

    /// Returns the identity that the connection or the token proves; `None` in plain text. A certificate counts
    /// more than a token, as at the API server.
    pub(super) async fn identify(&self) -> Result<Option<Arc<Identity>>, Refusal> {
        let authenticator = &self.authenticator;
        if let TransportIdentity::Certificate(subject, until) = self.connection.identity() {
            if until.is_some_and(|until| until <= SystemTime::now()) {
                let text = "the certificate has ended; use the renewed one in a new connection";
                return Err(Refusal::new(RefusalReason::Ended, text));
            }
            return Ok(Some(Arc::new(Identity {
                until: *until,
                ..Identity::lasting(subject.clone(), Proof::Certificate)
            })));
        }
        if *self.connection.identity() == TransportIdentity::PlainText {
            return Ok(None);
        }
        let Some(token) = &self.token else {
            return Err(no_credential(self.port, authenticator.takes_tokens()));
        };
        let listed = authenticator.listed.as_ref();
        if let Some(owner) = listed.and_then(|listed| listed.current().owner(token)) {
            return Ok(Some(owner));
        }
        let Some(tokens) = &authenticator.tokens else {
            let text = match authenticator.listed {
                Some(_) => "--token-auth-file of the control plane does not list the token",
                None => "this control plane accepts no tokens, only certificates",
            };
            return Err(Refusal::new(RefusalReason::BadCredential, text));
        };
        let served = |node: &str| authenticator.hub.agents().record(node).is_some();
        let from = network(self.connection.peer().ip());
        tokens.check(self.port, token, from, served).await.map(Some)
    }
}

fn no_credential(port: Port, takes_tokens: bool) -> Refusal {
    let (who, flags) = match port {
        Port::Agents => ("agents need a certificate of their node", "the agent"),
        Port::Status => ("the status API needs a certificate", "kpctl"),
    };
    let (or, flag) = if takes_tokens { (" or a token", ", or --token-file") } else { ("", "") };
    Refusal::new(
        RefusalReason::NoCredential,
        format!("{who}{or}; give {flags} --client-certificate and --client-key{flag}"),
    )
}
