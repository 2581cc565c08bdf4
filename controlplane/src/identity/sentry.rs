//! The sentry at an agent's stream: ends the stream when the agent's identity ends.
//!
//! The sentry checks the identity again and again, because a pod, a node or a listed token may be gone. It does
//! nothing while the API server is away: an agent that was admitted stays.

use std::time::Duration;

use kplane_model::NodeName;
use kplane_tls::Token;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::{Reason, Refusal, Visitor};

/// Shortest and longest time between two checks of an identity: a revoked one ends within a minute, together with the
/// time for which the API server itself may be wrong.
const RECHECK: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(45)];
/// Shortest time between two renewals, so that an agent with many costs little.
const RENEWAL_PAUSE: Duration = Duration::from_secs(1);

/// A sentry. Dropping it ends the checks.
#[derive(Debug)]
pub struct Sentry(Option<Post>);

#[derive(Debug)]
struct Post {
    renewals: mpsc::Sender<Token>,
    ended: oneshot::Receiver<Refusal>,
    _task: AbortOnDropHandle<()>,
}

impl Sentry {
    /// Creates a sentry that never ends the stream.
    #[must_use]
    pub fn idle() -> Self {
        Self(None)
    }

    /// Starts the checks of an agent's identity.
    pub(super) fn post(visitor: Visitor, node: NodeName) -> Self {
        let (renewals, renewed) = mpsc::channel(1);
        let (end, ended) = oneshot::channel();
        let task = tokio::spawn(async move {
            let refusal = watch(visitor, node, renewed).await;
            // The stream may have ended already.
            let _ = end.send(refusal);
        });
        Self(Some(Post {
            renewals,
            ended,
            _task: AbortOnDropHandle::new(task),
        }))
    }

    /// Hands over the newer token of the agent. A token that comes while another is checked is dropped: the agent
    /// sends its latest again.
    pub fn renew(&self, token: Token) {
        if let Some(post) = &self.0 {
            let _ = post.renewals.try_send(token);
        }
    }

    /// Waits until the identity has ended.
    pub async fn ended(&mut self) -> Refusal {
        match &mut self.0 {
            // The sender goes without a word only when the runtime ends.
            Some(post) => match (&mut post.ended).await {
                Ok(refusal) => refusal,
                Err(_) => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }
}

async fn watch(
    mut visitor: Visitor,
    node: NodeName,
    mut renewed: mpsc::Receiver<Token>,
) -> Refusal {
    let mut end = visitor.end();
    loop {
        let pause = rand::random_range(RECHECK[0]..RECHECK[1]);
        let ends = async {
            match end {
                Some(end) => sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = ends => {
                let text = "the credential has ended; the agent must connect with a renewed one";
                let refusal = Refusal::new(Reason::Ended, text);
                visitor.refused(&format!("speak for node {node}"), &refusal);
                return refusal;
            }
            Some(token) = renewed.recv() => {
                match visitor.again(&node, Some(token)).await {
                    Ok(newer) => {
                        end = newer.end();
                        visitor = newer;
                    }
                    // The identity of before stays until it ends.
                    Err(refusal) => visitor.refused(&format!("renew for node {node}"), &refusal),
                }
                sleep(RENEWAL_PAUSE).await;
            }
            () = sleep(pause) => match visitor.again(&node, None).await {
                Ok(same) => visitor = same,
                Err(refusal) if refusal.reason == Reason::Unavailable => {}
                Err(refusal) => {
                    visitor.refused(&format!("speak for node {node}"), &refusal);
                    return refusal;
                }
            },
        }
    }
}
