//! The API server's public keys (RFC 7517), and the check of tokens against them without the API server.
//!
//! ServiceAccount tokens are signed with RS256, ES256 or ES384 (RFC 7518); ring verifies them. The check cannot see
//! that a pod or node was deleted, so it stands in for a TokenReview only while there is none.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use kplane_desired_state::kubernetes::Unanswered;
use parking_lot::RwLock;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, RSA_PKCS1_2048_8192_SHA256,
    RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};
use serde::Deserialize;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::claims::{Header, Parts};
use super::reviews::{self, Reviews};

/// Interval at which the keys are read.
const REFRESH: Duration = Duration::from_secs(300);
/// Pause after a failed attempt, and between two reads because of unknown keys.
const RETRY: Duration = Duration::from_secs(10);
/// Most keys that are used. API servers have one or two.
const MAX_KEYS: usize = 64;
/// Difference that clocks may have.
const SKEW: Duration = Duration::from_secs(30);

/// The published keys.
#[derive(Debug, Default)]
pub(super) struct Keys {
    current: RwLock<Arc<KeySet>>,
    wanted: Notify,
}

/// The keys of one answer.
#[derive(Debug, Default)]
pub struct KeySet {
    issuer: String,
    by_id: HashMap<String, PublicKey>,
}

#[derive(Debug)]
enum PublicKey {
    Rsa {
        n: Vec<u8>,
        e: Vec<u8>,
    },
    /// Point on the curve P-256.
    P256(Vec<u8>),
    /// Point on the curve P-384.
    P384(Vec<u8>),
}

/// The outcome of a check.
#[derive(Debug, PartialEq, Eq)]
pub enum Checked {
    /// The keys signed the token, and it is valid now.
    Valid,
    /// The token is invalid for this reason.
    Invalid(&'static str),
    /// The token may be valid: no key of its name is known, it is of another issuer, or it is not valid by this machine's
    /// clock.
    Unknown,
}

/// A set of keys in JSON.
#[derive(Debug, Deserialize)]
pub struct Published {
    keys: Vec<PublishedKey>,
}

#[derive(Debug, Deserialize)]
struct PublishedKey {
    #[serde(default)]
    kid: String,
    #[serde(default)]
    kty: String,
    #[serde(default)]
    crv: String,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

/// The part of OIDC discovery that names the issuer.
#[derive(Debug, Deserialize)]
struct Discovery {
    issuer: String,
}

impl KeySet {
    /// Creates a set from the API server's answers. Keys of kinds that ServiceAccount tokens do not have are left
    /// out.
    pub fn new(issuer: String, published: Published) -> Self {
        let keys = published.keys.into_iter().take(MAX_KEYS);
        let by_id = keys.filter_map(|key| Some((key.kid.clone(), PublicKey::read(&key)?)));
        Self {
            issuer,
            by_id: by_id.collect(),
        }
    }

    /// Checks a token of the API server.
    pub fn check(&self, parts: &Parts<'_>, now: SystemTime) -> Checked {
        if self.by_id.is_empty() {
            return Checked::Unknown;
        }
        if parts.claims.iss != self.issuer {
            // An API server may accept several issuers, and publishes one.
            return Checked::Unknown;
        }
        let Some(key) = self.by_id.get(&parts.header.kid) else {
            return Checked::Unknown;
        };
        if !key.signed(&parts.header, parts.signed.as_bytes(), &parts.signature) {
            return Checked::Invalid("the signature of the token is wrong");
        }
        let seconds = |seconds| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
        let begins = parts.claims.nbf.and_then(seconds);
        if begins.is_some_and(|begins| begins > now + SKEW) {
            return Checked::Unknown;
        }
        match parts.claims.until() {
            Some(until) if until > now => Checked::Valid,
            // This machine's clock may be wrong; the API server's decides.
            Some(_) => Checked::Unknown,
            None => Checked::Invalid("the token has no end"),
        }
    }
}

impl PublicKey {
    fn read(key: &PublishedKey) -> Option<Self> {
        let bytes = |text: &Option<String>| URL_SAFE_NO_PAD.decode(text.as_ref()?).ok();
        match (key.kty.as_str(), key.crv.as_str()) {
            ("RSA", _) => Some(Self::Rsa {
                n: bytes(&key.n)?,
                e: bytes(&key.e)?,
            }),
            ("EC", curve) => {
                // An uncompressed point (SEC 1, section 2.3.3).
                let point = [vec![4], bytes(&key.x)?, bytes(&key.y)?].concat();
                match curve {
                    "P-256" => Some(Self::P256(point)),
                    "P-384" => Some(Self::P384(point)),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Returns whether the key made a signature. The algorithm is the key's, and the header must name the same one.
    fn signed(&self, header: &Header, message: &[u8], signature: &[u8]) -> bool {
        let point = |algorithm: &'static dyn VerificationAlgorithm, point: &Vec<u8>| {
            let key = UnparsedPublicKey::new(algorithm, point);
            key.verify(message, signature).is_ok()
        };
        match (self, header.alg.as_str()) {
            (Self::Rsa { n, e }, "RS256") => RsaPublicKeyComponents { n, e }
                .verify(&RSA_PKCS1_2048_8192_SHA256, message, signature)
                .is_ok(),
            (Self::P256(key), "ES256") => point(&ECDSA_P256_SHA256_FIXED, key),
            (Self::P384(key), "ES384") => point(&ECDSA_P384_SHA384_FIXED, key),
            _ => false,
        }
    }
}

impl Keys {
    /// Checks a token against the latest keys. An unknown key makes the keys be read again.
    pub(super) fn check(&self, parts: &Parts<'_>, now: SystemTime) -> Checked {
        let keys = Arc::clone(&self.current.read());
        let checked = keys.check(parts, now);
        if checked == Checked::Unknown {
            self.wanted.notify_one();
        }
        checked
    }

    /// Replaces the keys.
    pub(super) fn replace(&self, keys: KeySet) {
        *self.current.write() = Arc::new(keys);
    }

    /// Reads the keys again and again. Never returns.
    pub(super) async fn follow(&self, reviews: &Reviews) {
        let mut said = String::new();
        loop {
            match read(reviews).await {
                Ok(keys) => {
                    if !said.is_empty() {
                        info!("read the API server's keys");
                        said.clear();
                    }
                    debug!(
                        keys = keys.by_id.len(),
                        issuer = keys.issuer,
                        "read the API server's keys"
                    );
                    self.replace(keys);
                    let _ = timeout(REFRESH, self.wanted.notified()).await;
                }
                Err(failure) => {
                    let text = failure.to_string();
                    if said != text {
                        warn!(
                            "cannot read the API server's keys, so every token of an agent needs a review: {text}"
                        );
                        said = text;
                    }
                }
            }
            sleep(RETRY).await;
        }
    }
}

/// Reads the published keys.
async fn read(reviews: &Reviews) -> Result<KeySet, Unanswered> {
    let discovery: Discovery = reviews.document("/.well-known/openid-configuration").await?;
    let published: Published = reviews.document(reviews::KEYS.resource).await?;
    Ok(KeySet::new(discovery.issuer, published))
}
