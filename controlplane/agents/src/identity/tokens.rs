//! Bearer tokens that the API server issued or accepts.
//!
//! ```text
//! token --cache, reviewed a moment ago--> identity
//!       --review by the API server-----> identity, or rejected
//!       --published keys---------------> identity, while there are too many reviews; or while there is no API server,
//!                                        of an agent that was admitted before
//! ```
//!
//! The cache is found by a hash of the whole token, so a forged signature finds nothing. The streams of agents come
//! back to each token ([`super::CredentialWatch`]), so that a token that only the keys verified is reviewed soon after.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use kplane_tls::Token;
use kplane_util::bounded::make_room;
use kplane_util::buckets::{Buckets, Rate};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::claims::Parts;
use super::keys::{Checked, Keys};
use super::reviews::{self, Review, Reviews};
use super::{Identity, Port, Refusal, RefusalReason, TokenId, token_id};

/// Time for which a review counts. The API server itself may be wrong for as long (its cache of successes).
const FRESH: Duration = Duration::from_secs(10);
/// Most reviews at a time. An API server answers in 4 ms.
const REVIEWS: usize = 16;
/// Most tokens that are remembered: those of the largest fleet during a rotation. About 1 KiB each.
const MAX_KNOWN: usize = 32_768;

/// Wrong tokens from an address, each of which costs the API server a review.
const GUESSES: Rate = Rate {
    burst: 20,
    refill: Duration::from_secs(1),
};
/// Most addresses whose wrong tokens are counted; further ones share theirs.
const MAX_ADDRESSES: usize = 4_096;

/// The tokens of a cluster.
#[derive(Debug)]
pub(super) struct Tokens {
    reviews: Arc<Reviews>,
    keys: Keys,
    known: Mutex<HashMap<TokenId, Known>>,
    permits: Semaphore,
    /// The last review got no answer.
    unanswered: AtomicBool,
    /// Wrong tokens that addresses may still try.
    guesses: Mutex<Buckets<IpAddr>>,
}

/// A token that was accepted.
#[derive(Clone, Debug)]
struct Known {
    identity: Arc<Identity>,
    /// Time of the last review; `None` = only the keys verified it.
    reviewed: Option<Instant>,
}

impl Known {
    fn is_over(&self) -> bool {
        let until = self.identity.until;
        until.is_some_and(|until| until <= SystemTime::now())
    }

    fn is_fresh(&self) -> bool {
        self.reviewed.is_some_and(|at| at.elapsed() < FRESH)
    }
}

impl Tokens {
    pub(super) fn new(reviews: Arc<Reviews>) -> Self {
        Self {
            reviews,
            keys: Keys::default(),
            known: Mutex::default(),
            permits: Semaphore::new(REVIEWS),
            unanswered: AtomicBool::new(false),
            guesses: Mutex::new(Buckets::new(GUESSES, MAX_ADDRESSES)),
        }
    }

    /// Follows the published keys. Never returns.
    pub(super) async fn follow_keys(&self) {
        self.keys.follow(&self.reviews).await;
    }

    /// Returns the owner of a token that came from an address. `has_served` returns whether the agent of a node was
    /// admitted before: such an agent is not locked out while the API server is away.
    pub(super) async fn check(
        &self,
        port: Port,
        token: &Token,
        from: IpAddr,
        has_served: impl Fn(&str) -> bool,
    ) -> Result<Arc<Identity>, Refusal> {
        let id = token_id(token);
        let known = self.known.lock().get(&id).filter(|known| !known.is_over()).cloned();
        if let Some(known) = known.as_ref().filter(|known| known.is_fresh()) {
            return Ok(Arc::clone(&known.identity));
        }
        let parts = Parts::parse(token);
        let verified = self.verify(port, parts.as_ref())?;
        if verified.is_none() && known.is_none() && !self.guesses().has(&from) {
            let text = "too many wrong tokens came from this address; try again in a few seconds";
            return Err(Refusal::new(RefusalReason::TooMuch, text));
        }
        let served = |identity: &Identity| {
            identity.binding().map(|node| node.name.as_str()).is_some_and(&has_served)
        };
        let Ok(_permit) = self.permits.try_acquire() else {
            let answers = !self.unanswered.load(Ordering::Relaxed);
            let verified = verified.filter(|identity| answers || served(identity));
            return self.without_review(id, known, verified, "too many reviews at the moment");
        };
        let for_kplane = match port {
            Port::Agents => true,
            Port::Status => parts.as_ref().is_some_and(|parts| parts.claims.aud.has_kplane()),
        };
        let review = self.reviews.token(token, for_kplane).await;
        self.unanswered.store(review.is_err(), Ordering::Relaxed);
        match review {
            Ok(Review::Accepted(user)) => {
                let until = parts.and_then(|parts| parts.claims.until());
                let identity = reviews::identity(*user, for_kplane, until);
                Ok(self.remember(id, identity, Some(Instant::now())))
            }
            Ok(Review::Rejected) => {
                self.known.lock().remove(&id);
                // The bucket may be empty: other requests took the last.
                let _ = self.guesses().take(from, 1);
                Err(Refusal::new(RefusalReason::BadCredential, rejected(port)))
            }
            Err(unanswered) => {
                let verified = verified.filter(served);
                self.without_review(id, known, verified, &unanswered.to_string())
            }
        }
    }

    /// Checks a token against the published keys. An agent's token without a valid signature costs no review. Tokens
    /// of people may come from elsewhere, so those are reviewed.
    fn verify(&self, port: Port, parts: Option<&Parts<'_>>) -> Result<Option<Identity>, Refusal> {
        let bad = |why: &str| Refusal::new(RefusalReason::BadCredential, why);
        let Some(parts) = parts else {
            return match port {
                Port::Agents => Err(bad("the token is not of a ServiceAccount")),
                Port::Status => Ok(None),
            };
        };
        match (self.keys.check(parts, SystemTime::now()), port) {
            (Checked::Invalid(why), Port::Agents) => Err(bad(why)),
            (Checked::Valid, Port::Agents) if !parts.claims.aud.has_kplane() => {
                Err(bad(rejected(port)))
            }
            (Checked::Valid, _) if parts.claims.aud.has_kplane() => Ok(parts.identity()),
            // Only a review shows whether the API server takes a token for another audience.
            (Checked::Valid | Checked::Invalid(_) | Checked::Unknown, _) => Ok(None),
        }
    }

    /// Decides about a token that nobody can review now.
    fn without_review(
        &self,
        id: TokenId,
        known: Option<Known>,
        verified: Option<Identity>,
        why: &str,
    ) -> Result<Arc<Identity>, Refusal> {
        if let Some(known) = known {
            return Ok(known.identity);
        }
        let identity = verified.ok_or_else(|| {
            let text = format!("the token cannot be checked now, so try again: {why}");
            Refusal::new(RefusalReason::Unavailable, text)
        })?;
        Ok(self.remember(id, identity, None))
    }

    fn remember(
        &self,
        id: TokenId,
        identity: Identity,
        reviewed: Option<Instant>,
    ) -> Arc<Identity> {
        let identity = Arc::new(identity);
        let entry = Known {
            identity: Arc::clone(&identity),
            reviewed,
        };
        let mut known = self.known.lock();
        if !known.contains_key(&id) {
            // A token that has to go is checked again when it comes back.
            make_room(&mut known, MAX_KNOWN, |known| {
                !known.is_over() && known.is_fresh()
            });
        }
        known.insert(id, entry);
        identity
    }

    fn guesses(&self) -> MutexGuard<'_, Buckets<IpAddr>> {
        // A bucket is changed as a whole, so a panic elsewhere leaves it usable.
        self.guesses.lock()
    }
}

fn rejected(port: Port) -> &'static str {
    match port {
        Port::Agents => {
            "the API server does not accept the token for kplane: it must be a projected ServiceAccount token with \
             the audience \"kplane\", and its pod must exist"
        }
        Port::Status => "the API server does not accept the token; log in again",
    }
}
