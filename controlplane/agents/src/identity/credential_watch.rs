//! The watch of a credential at an agent's stream: ends the stream when the agent's identity ends.
//!
//! The watch of a credential checks the identity again and again, because a pod, a node or a listed token may be gone. It does
//! nothing while the API server is away: an agent that was admitted stays.

use std::time::Duration;

use futures_util::future::OptionFuture;
use kplane_model::NodeName;
use kplane_tls::Token;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::{Caller, Refusal, RefusalReason};

/// Shortest and longest time between two checks of an identity: a revoked one ends within a minute, together with the
/// time for which the API server itself may be wrong.
const RECHECK: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(45)];
/// Shortest time between two renewals, so that an agent with many costs little.
const RENEWAL_PAUSE: Duration = Duration::from_secs(1);

/// A watch of a credential. Dropping it ends the checks.
#[derive(Debug)]
pub struct CredentialWatch(Option<Running>);

#[derive(Debug)]
struct Running {
    renewals: watch::Sender<Option<Token>>,
    ended: oneshot::Receiver<Refusal>,
    _task: AbortOnDropHandle<()>,
}

impl CredentialWatch {
    /// Creates a watch of a credential that never ends the stream.
    pub fn idle() -> Self {
        Self(None)
    }

    /// Starts the checks of an agent's identity.
    pub(super) fn start(caller: Caller, node: NodeName) -> Self {
        let (renewals, renewed) = watch::channel(None);
        let (end, ended) = oneshot::channel();
        let task = tokio::spawn(async move {
            let refusal = watch(caller, node, renewed).await;
            // The stream may have ended already.
            let _ = end.send(refusal);
        });
        Self(Some(Running {
            renewals,
            ended,
            _task: AbortOnDropHandle::new(task),
        }))
    }

    /// Hands over the newer token of the agent, which sends each token once.
    pub fn renew(&self, token: Token) {
        if let Some(start) = &self.0 {
            start.renewals.send_replace(Some(token));
        }
    }

    /// Waits until the identity has ended.
    pub async fn ended(&mut self) -> Refusal {
        match &mut self.0 {
            // The sender goes without a word only when the runtime ends.
            Some(start) => match (&mut start.ended).await {
                Ok(refusal) => refusal,
                Err(_) => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }
}

async fn watch(
    caller: Caller,
    node: NodeName,
    mut renewals: watch::Receiver<Option<Token>>,
) -> Refusal {
    let mut watched = WatchedIdentity {
        end: caller.end(),
        caller,
        node,
        renewed: None,
    };
    let recheck = || Instant::now() + rand::random_range(RECHECK[0]..RECHECK[1]);
    // Whatever the agent sends does not put it off.
    let mut checks_at = recheck();
    loop {
        let ends = OptionFuture::from(watched.end.map(sleep_until));
        tokio::select! {
            Some(()) = ends => if !watched.renew().await {
                let text = "the credential has ended; the agent must connect with a renewed one";
                return watched.over(Refusal::new(RefusalReason::Ended, text));
            },
            Ok(()) = renewals.changed() => {
                watched.renewed.clone_from(&renewals.borrow_and_update());
                watched.renew().await;
                sleep(RENEWAL_PAUSE).await;
            }
            () = sleep_until(checks_at) => {
                if !watched.renew().await && let Err(refusal) = watched.check().await {
                    return watched.over(refusal);
                }
                checks_at = recheck();
            }
        }
    }
}

/// Returns whether a refusal says nothing about the credential: nobody can check it, or others of the same address tried
/// too often.
fn cannot_tell(reason: RefusalReason) -> bool {
    matches!(reason, RefusalReason::Unavailable | RefusalReason::TooMuch)
}

/// The identity that is watched.
#[derive(Debug)]
struct WatchedIdentity {
    caller: Caller,
    node: NodeName,
    end: Option<Instant>,
    /// A newer token that is not accepted yet: an agent may have it before this control plane can check it.
    renewed: Option<Token>,
}

impl WatchedIdentity {
    /// Takes over the newer token, if there is one and it is accepted by now.
    async fn renew(&mut self) -> bool {
        let Some(token) = self.renewed.clone() else {
            return false;
        };
        match self.caller.again(&self.node, Some(token)).await {
            Ok(newer) => {
                self.end = newer.end();
                self.caller = newer;
                self.renewed = None;
                true
            }
            // The identity of before stays until it ends.
            Err(refusal) => {
                let action = format!("renew for node {}", self.node);
                self.caller.refused(&action, &refusal);
                false
            }
        }
    }

    /// Checks the identity again. While the API server is away, the last result stands.
    async fn check(&mut self) -> Result<(), Refusal> {
        match self.caller.again(&self.node, None).await {
            Ok(same) => self.caller = same,
            Err(refusal) if cannot_tell(refusal.reason) => {}
            Err(refusal) => return Err(refusal),
        }
        Ok(())
    }

    /// Records the reason why the agent may not speak for its node any more.
    fn over(&self, refusal: Refusal) -> Refusal {
        let action = format!("speak for node {}", self.node);
        self.caller.refused(&action, &refusal);
        refusal
    }
}
