//! The authenticator: finds out who calls, and remembers nothing of it but counters and the audit log.

mod auditing;
mod authentication;
mod authorization;
mod config;
mod limits;

use std::sync::Arc;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use kplane_desired_state::kubernetes::Api;
use kplane_tls::{Follower, Token};
use kplane_util::buckets::Buckets;
use parking_lot::Mutex;

use super::audit::Audit;
use super::refusal::Refusals;
use super::reviews::Reviews;
use super::rights::{Decisions, Rights};
use super::rules::RulesFile;
use super::token_file::{TokenTable, TokenTableFile};
use super::tokens::Tokens;
use super::watches::Watches;
use super::{Identity, Refusal, RefusalReason};
use crate::connection_limits::ConnectionGuard;
use crate::hub::Hub;
use limits::{MAX_CALLERS, QUESTIONS};

pub use config::{AuthenticatorConfig, AuthenticatorError, Port, WATCHES};
pub use limits::spawn_watch;

/// The check of callers.
#[derive(Debug)]
pub struct Authenticator {
    pub(super) hub: Arc<Hub>,
    pub(super) accounts: Vec<String>,
    tokens: Option<Tokens>,
    listed: Option<Follower<TokenTable>>,
    rights: Rights,
    audit: Audit,
    refusals: Refusals,
    /// Budgets of questions to the status API, by user, or by address without an identity.
    questions: Mutex<Buckets<String>>,
    /// Open watches of the status API, by caller as in `questions`.
    watches: Arc<Watches>,
}

/// A caller whose identity was checked.
#[derive(Clone, Debug)]
pub struct Caller {
    pub(super) authenticator: Arc<Authenticator>,
    port: Port,
    connection: ConnectionGuard,
    token: Option<Token>,
    /// `None` on a port in plain text, where everybody may do everything.
    who: Option<Arc<Identity>>,
}

impl Authenticator {
    /// Reads the files. With `api`, tokens and rights are also those of the API server. Must be called on a runtime.
    ///
    /// # Errors
    /// [`AuthenticatorError`].
    pub fn open(
        config: &AuthenticatorConfig,
        hub: Arc<Hub>,
        api: Option<Arc<Api>>,
    ) -> Result<Arc<Self>, AuthenticatorError> {
        let listed = config
            .token_auth_file
            .clone()
            .map(TokenTableFile)
            .map(|file| Follower::start(file, "tokens"));
        let rules = config
            .authorization_file
            .clone()
            .map(RulesFile)
            .map(|file| Follower::start(file, "rights"));
        let reviews = api.map(|api| Arc::new(Reviews::new(api)));
        let rights = match (rules.transpose()?, &reviews) {
            (Some(rules), _) => Rights::File(rules),
            (None, Some(reviews)) => {
                Rights::Kubernetes(Box::new(Decisions::new(Arc::clone(reviews))))
            }
            (None, None) => Rights::BuiltIn,
        };
        Ok(Arc::new(Self {
            hub,
            accounts: config.agent_accounts.clone(),
            tokens: reviews.map(Tokens::new),
            listed: listed.transpose()?,
            rights,
            audit: Audit::open(&config.audit).map_err(AuthenticatorError::Audit)?,
            refusals: Refusals::default(),
            questions: Mutex::new(Buckets::new(QUESTIONS, MAX_CALLERS)),
            watches: Watches::new(config.watches),
        }))
    }

    /// Returns whether callers may have tokens.
    pub fn takes_tokens(&self) -> bool {
        self.tokens.is_some() || self.listed.is_some()
    }

    /// Follows the API server's keys until the control plane ends.
    pub async fn follow_keys(self: Arc<Self>) {
        if let Some(tokens) = &self.tokens {
            tokens.follow_keys().await;
        }
    }

    /// Returns the numbers of refusals by port and reason.
    pub fn refusals(&self) -> Vec<(Port, RefusalReason, u64)> {
        self.refusals.all()
    }

    /// Returns the number of lines that the audit log lacks because its disk was too slow.
    pub fn unaudited(&self) -> u64 {
        self.audit.dropped()
    }

    /// Finds out who calls.
    ///
    /// # Errors
    /// [`Refusal`] when the caller proves no identity.
    pub async fn authenticate(
        self: &Arc<Self>,
        port: Port,
        connection: &ConnectionGuard,
        headers: &HeaderMap,
    ) -> Result<Caller, Refusal> {
        let header = headers.get(AUTHORIZATION);
        let token = header.and_then(|value| Token::of_header(value.to_str().ok()?));
        let caller = Caller {
            authenticator: Arc::clone(self),
            port,
            connection: connection.clone(),
            token,
            who: None,
        };
        let who = caller.identify().await.inspect_err(|refusal| caller.refused("", refusal))?;
        Ok(Caller { who, ..caller })
    }
}

impl Caller {
    /// Returns the caller's proven name.
    pub fn name(&self) -> Option<&str> {
        Some(self.who.as_ref()?.subject.name.as_str())
    }
}
