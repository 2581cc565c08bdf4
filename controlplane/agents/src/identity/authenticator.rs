//! The authenticator: finds out who calls, and remembers nothing of it but counters and the audit log.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::AUTHORIZATION;
use kplane_desired_state::kubernetes::Api;
use kplane_model::NodeName;
use kplane_tls::{FileError, Follower, Token};
use kplane_util::buckets::{Buckets, Rate};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tonic::Status;

use super::audit::{Audit, AuditEntry, AuditLog};
use super::refusal::Refusals;
use super::reviews::Reviews;
use super::rights::{Decisions, Rights};
use super::rules::RulesFile;
use super::token_file::{TokenTable, TokenTableFile};
use super::tokens::Tokens;
use super::watches::{Full, WatchPermit, Watches};
use super::{CredentialWatch, Identity, Proof, Refusal, RefusalReason, Right};
use crate::connection_limits::{ConnectionGuard, TransportIdentity, network};
use crate::hub::Hub;

/// A gRPC port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// The port of agents.
    Agents,
    /// The port of the status API.
    Status,
}

impl Port {
    /// All ports.
    pub const ALL: [Self; 2] = [Self::Agents, Self::Status];

    /// Returns the name in metrics and in the audit log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agents => "agents",
            Self::Status => "status",
        }
    }
}

/// Configuration of identities and rights.
#[derive(Clone, Debug)]
pub struct AuthenticatorConfig {
    /// User names of agents' ServiceAccounts, `system:serviceaccount:NAMESPACE:NAME`.
    pub agent_accounts: Vec<String>,
    /// File of tokens and their owners.
    pub token_auth_file: Option<PathBuf>,
    /// File of rights on the status API, in place of the API server's decisions.
    pub authorization_file: Option<PathBuf>,
    /// The audit log.
    pub audit: AuditLog,
    /// Most watches of the status API at a time.
    pub watches: usize,
}

/// Default of [`AuthenticatorConfig::watches`].
pub const WATCHES: usize = 256;

/// Questions of a caller to the status API: an answer about a small fleet costs 1.
const QUESTIONS: Rate = Rate {
    burst: 2_000,
    refill: Duration::from_millis(2),
};
/// Most callers whose questions are counted; further ones share theirs.
const MAX_CALLERS: usize = 1_024;

impl Default for AuthenticatorConfig {
    fn default() -> Self {
        Self {
            agent_accounts: Vec::new(),
            token_auth_file: None,
            authorization_file: None,
            audit: AuditLog::default(),
            watches: WATCHES,
        }
    }
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthenticatorError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The audit log cannot be opened.
    #[error("cannot open the audit log; check --audit-log")]
    Audit(#[source] io::Error),
}

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
    /// What callers of the status API may still ask, by user, or by address without an identity.
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
        let listed = config.token_auth_file.clone().map(TokenTableFile);
        let listed = listed.map(|file| Follower::start(file, "tokens"));
        let rules = config.authorization_file.clone().map(RulesFile);
        let rules = rules.map(|file| Follower::start(file, "rights"));
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
        let who = caller.identify().await;
        let who = who.inspect_err(|refusal| caller.refused("", refusal))?;
        Ok(Caller { who, ..caller })
    }
}

impl Caller {
    /// Returns the caller's proven name.
    pub fn name(&self) -> Option<&str> {
        Some(self.who.as_ref()?.subject.name.as_str())
    }

    /// Returns when the proof of the identity ends, by a clock that does not step: a step ends no open stream.
    pub(super) fn end(&self) -> Option<Instant> {
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

    /// Charges the caller for a question to the status API. Questions cost more where answers are large, or where
    /// agents are asked.
    ///
    /// # Errors
    /// [`Refusal`] when the caller asked too much in the last seconds.
    pub fn charge(&self, cost: u32) -> Result<(), Refusal> {
        let mut questions = self.authenticator.questions.lock();
        let Err(wait) = questions.take(self.caller(), cost) else {
            return Ok(());
        };
        drop(questions);
        let text = format!("too many questions; ask again in {} ms", wait.as_millis());
        let refusal = Refusal::new(RefusalReason::TooMuch, text);
        self.refused("ask", &refusal);
        Err(refusal)
    }

    /// Returns the name under which the caller's questions and watches are counted.
    fn caller(&self) -> String {
        match self.name() {
            Some(name) => name.to_owned(),
            None => network(self.connection.peer().ip()).to_string(),
        }
    }

    /// Takes the right to one more watch, until the value is dropped.
    ///
    /// # Errors
    /// [`Refusal`] when there are too many watches, or too many of this caller.
    pub fn watch(&self) -> Result<WatchPermit, Refusal> {
        self.authenticator.watches.begin(self.caller()).map_err(|full| {
            let text = match full {
                Full::All => {
                    "too many watches are open; see --max-watches of the control plane, or ask without a watch"
                }
                Full::Caller => {
                    "this caller has half of all watches that may be open; close some, or see --max-watches of the \
                     control plane"
                }
            };
            let refusal = Refusal::new(RefusalReason::TooMuch, text);
            self.refused("watch", &refusal);
            refusal
        })
    }

    /// Checks that the caller has a right on the status API.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn may(&self, right: &Right) -> Result<(), Refusal> {
        let Some(who) = &self.who else {
            return Ok(());
        };
        let outcome = match who.subject.is_of_node() {
            true => Err(Refusal::new(
                RefusalReason::NoRight,
                format!(
                    "{:?} is a node, and nodes may not use the status API",
                    who.subject.name
                ),
            )),
            false => self.authenticator.rights.check(who, right).await,
        };
        outcome.inspect_err(|refusal| {
            self.refused(&format!("{} {}", right.verb(), right.path()), refusal);
        })
    }

    /// Records that the caller changed something.
    pub fn did(&self, right: &Right, text: &str) {
        let action = format!("{} {}", right.verb(), right.path());
        self.authenticator.audit.changed(&AuditEntry {
            decision: "allowed",
            text,
            ..self.entry(&action)
        });
    }

    /// Checks that the caller is the agent of a node. The watch of a credential ends when it no longer is.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn authorize_agent(&self, node: &NodeName) -> Result<CredentialWatch, Refusal> {
        let Some(who) = &self.who else {
            return Ok(CredentialWatch::idle());
        };
        let checked = match self.authenticator.is_agent(who, node) {
            Ok(()) => self.authenticator.is_same_node(who, node).await,
            Err(refusal) => Err(refusal),
        };
        checked.inspect_err(|refusal| self.refused(&format!("speak for node {node}"), refusal))?;
        Ok(CredentialWatch::start(self.clone(), node.clone()))
    }

    /// Checks the caller again, as the agent of a node: with `token`, if there is a newer one.
    pub(super) async fn again(
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
            self.authenticator.is_agent(who, node)?;
            self.authenticator.is_same_node(who, node).await?;
        }
        self.authenticator.is_still_there(node)?;
        Ok(Self { who, ..caller })
    }

    /// Returns the identity that the connection or the token proves; `None` in plain text. A certificate counts
    /// more than a token, as at the API server.
    async fn identify(&self) -> Result<Option<Arc<Identity>>, Refusal> {
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
        if let Some(owner) =
            authenticator.listed.as_ref().and_then(|listed| listed.current().owner(token))
        {
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

    /// Counts a refusal, and writes it to the audit log.
    pub(super) fn refused(&self, action: &str, refusal: &Refusal) {
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

/// Starts a watch, which ends with the caller's credential. A caller in the same process has none.
///
/// # Errors
/// [`Refusal`] when there are too many watches.
pub fn spawn_watch<T: Send + 'static>(
    caller: Option<Caller>,
    outbox: mpsc::Sender<Result<T, Status>>,
    watch: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Refusal> {
    let permit = caller.as_ref().map(Caller::watch).transpose()?;
    let ended = async move {
        match caller {
            Some(caller) => caller.ended().await,
            None => std::future::pending().await,
        }
    };
    tokio::spawn(async move {
        tokio::select! {
            () = watch => {}
            refusal = ended => drop(outbox.send(Err(refusal.into())).await),
        }
        drop(permit);
    });
    Ok(())
}

fn no_credential(port: Port, takes_tokens: bool) -> Refusal {
    let (who, flags) = match port {
        Port::Agents => ("agents need a certificate of their node", "the agent"),
        Port::Status => ("the status API needs a certificate", "kpctl"),
    };
    let (or, flag) = match takes_tokens {
        true => (" or a token", ", or --token-file"),
        false => ("", ""),
    };
    Refusal::new(
        RefusalReason::NoCredential,
        format!("{who}{or}; give {flags} --client-certificate and --client-key{flag}"),
    )
}
