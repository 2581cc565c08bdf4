//! Identities of callers, and their rights.
//!
//! ```text
//! connection (TLS, certificate) --+
//! header `authorization` ---------+--authenticate--> Caller --Caller::may--> Ok, or a Refusal
//!                                        |                       |
//!                              tokens, token_file             rights
//! ```
//!
//! A port without TLS proves nothing about anybody; the program opens such a port only on loopback or with
//! `--insecure`. On a port with TLS, every caller proves an identity:
//!
//! | proof | agents' port | status port |
//! |---|---|---|
//! | none | refused | refused |
//! | certificate or listed token of node N (`system:node:N` in `system:nodes`, as kubelet's) | serves N alone | refused |
//! | ServiceAccount token for kplane, of an agent's account, bound to node N | serves N alone | by its rights |
//! | any other certificate or token | refused | by its rights |

mod agent;
mod audit;
mod authenticator;
mod claims;
mod credential_watch;
mod keys;
mod refusal;
mod reviews;
mod rights;
mod rules;
mod token_file;
mod tokens;
mod watches;

#[cfg(test)]
mod tests;

pub use audit::{Audit, AuditLog};
pub use authenticator::{
    Authenticator, AuthenticatorConfig, AuthenticatorError, Caller, Port, WATCHES, spawn_watch,
};
pub use claims::Parts;
pub use credential_watch::CredentialWatch;
pub use keys::{Checked, KeySet, Published};
pub use refusal::{Refusal, RefusalReason};
pub use rights::{ADMINS, REPLICAS, Right};
pub use rules::Rules;
pub use token_file::TokenTable;
pub use watches::WatchPermit;

use std::collections::BTreeMap;
use std::time::SystemTime;

use kplane_desired_state::k8s::Uid;
use kplane_tls::{Subject, Token};
use ring::digest::{SHA256, digest};

/// Audience of the ServiceAccount tokens of agents: a token for another audience opens nothing here, and one for
/// kplane opens no API server.
pub const AUDIENCE: &str = "kplane";

/// A proven identity of a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The user's name and groups, as Kubernetes writes them.
    pub subject: Subject,
    /// The user's UID; empty if there is none.
    pub uid: String,
    /// Further attributes of the user, which an authorizer may want.
    pub extra: BTreeMap<String, Vec<String>>,
    /// Proof of the identity.
    pub proof: Proof,
    /// Time at which the proof ends; `None` = never.
    pub until: Option<SystemTime>,
}

/// A proof of an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// A certificate of an authority of clients.
    Certificate,
    /// A token that a file of this control plane lists.
    ListedToken,
    /// A token that the API server accepts, or that its keys signed.
    ApiToken {
        /// The node on which the token's owner runs; `None` for tokens of people.
        node: Option<NodeBinding>,
        /// Whether the token is for kplane and nobody else.
        for_kplane: bool,
    },
}

/// The node to which a token is bound (KEP-4193).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeBinding {
    /// The node's name.
    pub name: String,
    /// The UID of the Node object; `None` if the token has none.
    pub uid: Option<Uid>,
}

/// The hash of a token, by which caches and tables find it.
type TokenId = [u8; 32];

/// Returns the hash of a whole token. The time of a search by it depends on no token's text.
fn token_id(token: &Token) -> TokenId {
    let mut id = TokenId::default();
    id.copy_from_slice(digest(&SHA256, token.as_str().as_bytes()).as_ref());
    id
}

impl Identity {
    /// Creates an identity without a UID and further attributes, which lasts until the operator takes it away.
    fn lasting(subject: Subject, proof: Proof) -> Self {
        Self {
            subject,
            uid: String::new(),
            extra: BTreeMap::new(),
            proof,
            until: None,
        }
    }

    /// Returns the node for which the caller may speak. `accounts` are the user names of agents' ServiceAccounts.
    pub fn node(&self, accounts: &[String]) -> Option<&str> {
        match &self.proof {
            Proof::Certificate | Proof::ListedToken => self.subject.node(),
            Proof::ApiToken { node, for_kplane } => {
                let is_agent = *for_kplane && accounts.contains(&self.subject.name);
                if is_agent { node.as_ref().map(|node| node.name.as_str()) } else { None }
            }
        }
    }

    /// Returns the node to which the identity's token is bound.
    pub fn binding(&self) -> Option<&NodeBinding> {
        match &self.proof {
            Proof::ApiToken { node, .. } => node.as_ref(),
            Proof::Certificate | Proof::ListedToken => None,
        }
    }
}
