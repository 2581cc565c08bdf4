//! The content of a JSON Web Token (RFC 7519) of a ServiceAccount, without its signature.

use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use kplane_desired_state::k8s::Uid;
use kplane_tls::{Subject, Token};
use serde::Deserialize;

use super::{AUDIENCE, Identity, NodeBinding, Proof};

/// Group of all ServiceAccounts.
const ACCOUNTS: &str = "system:serviceaccounts";
/// Group of everybody with a proven identity.
const AUTHENTICATED: &str = "system:authenticated";

/// A token, taken apart. Nothing in it is proven.
#[derive(Debug)]
pub struct Parts<'a> {
    pub(super) header: Header,
    pub(super) claims: Claims,
    /// The bytes that the signature covers.
    pub(super) signed: &'a str,
    pub(super) signature: Vec<u8>,
}

/// The header of a token.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Header {
    /// The algorithm of the signature, such as `RS256`.
    #[serde(default)]
    pub(super) alg: String,
    /// The key that signed the token.
    #[serde(default)]
    pub(super) kid: String,
}

/// The claims that kplane uses.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Claims {
    #[serde(default)]
    pub(super) iss: String,
    #[serde(default)]
    pub(super) sub: String,
    #[serde(default)]
    pub(super) aud: Audiences,
    /// End, in seconds since 1970.
    pub(super) exp: Option<u64>,
    /// Begin, in seconds since 1970.
    pub(super) nbf: Option<u64>,
    #[serde(default, rename = "kubernetes.io")]
    pub(super) kubernetes: Kubernetes,
}

/// `aud`: one text or several (RFC 7519, section 4.1.3).
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Audiences {
    One(String),
    Many(Vec<String>),
}

impl Default for Audiences {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

/// The claims of Kubernetes: the objects to which the token is bound.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Kubernetes {
    pub(super) node: Option<Bound>,
}

/// An object to which a token is bound.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Bound {
    pub(super) name: String,
    #[serde(default)]
    pub(super) uid: String,
}

impl Audiences {
    /// Returns whether the token is for kplane.
    pub(super) fn has_kplane(&self) -> bool {
        match self {
            Self::One(one) => one == AUDIENCE,
            Self::Many(all) => all.iter().any(|one| one == AUDIENCE),
        }
    }
}

impl<'a> Parts<'a> {
    /// Takes a token apart; `None` if it is no JSON Web Token.
    pub fn parse(token: &'a Token) -> Option<Self> {
        let text = token.as_str();
        let (signed, signature) = text.rsplit_once('.')?;
        let (header, claims) = signed.split_once('.')?;
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).ok();
        Some(Self {
            header: serde_json::from_slice(&decode(header)?).ok()?,
            claims: serde_json::from_slice(&decode(claims)?).ok()?,
            signed,
            signature: decode(signature)?,
        })
    }

    /// Returns the identity of a ServiceAccount, as a TokenReview would; `None` for any other user. The caller has
    /// verified the signature.
    pub fn identity(&self) -> Option<Identity> {
        self.claims.identity()
    }
}

impl Claims {
    /// Returns the time at which the token ends.
    pub(super) fn until(&self) -> Option<SystemTime> {
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(self.exp?))
    }

    pub(super) fn identity(&self) -> Option<Identity> {
        let account = self.sub.strip_prefix("system:serviceaccount:")?;
        let (namespace, name) = account.split_once(':')?;
        if namespace.is_empty() || name.is_empty() {
            return None;
        }
        let groups = [
            ACCOUNTS.to_owned(),
            format!("{ACCOUNTS}:{namespace}"),
            AUTHENTICATED.to_owned(),
        ];
        let node = self.kubernetes.node.as_ref().map(|node| NodeBinding {
            name: node.name.clone(),
            uid: Uid::parse(&node.uid),
        });
        let subject = Subject {
            name: self.sub.clone(),
            groups: groups.to_vec(),
        };
        let for_kplane = self.aud.has_kplane();
        Some(Identity {
            until: self.until(),
            ..Identity::lasting(subject, Proof::ApiToken { node, for_kplane })
        })
    }
}
