//! A watch of how far a Service has come.

use kp_controlplane::app::Bound;
use kplane_proto::v1::{self as pb, LagState};
use tokio::time::{Instant, timeout};
use tonic::{Status, Streaming};

use super::{DEADLINE, status};

/// A watch of one Service of the namespace shop.
pub(crate) struct Watch(pub(crate) Streaming<pb::Convergence>);

impl Watch {
    pub(crate) async fn begin(bound: &Bound, name: &str) -> Self {
        Self::ask(bound, name, true).await.unwrap()
    }

    /// Begins a watch; fails if the control plane refuses.
    pub(crate) async fn ask(bound: &Bound, name: &str, absent_ok: bool) -> Result<Self, Status> {
        let request = pb::ConvergenceRequest {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            absent_ok,
        };
        let stream = status(bound).await.watch_convergence(request).await?;
        Ok(Self(stream.into_inner()))
    }

    pub(crate) async fn next(&mut self) -> pb::Convergence {
        let next = timeout(DEADLINE, self.0.message()).await;
        next.expect("an answer in time").unwrap().unwrap()
    }

    /// Waits until an answer is as wanted.
    pub(crate) async fn until(
        &mut self,
        wanted: impl Fn(&pb::Convergence) -> bool,
    ) -> pb::Convergence {
        let until = Instant::now() + DEADLINE;
        loop {
            let answer = self.next().await;
            if wanted(&answer) {
                return answer;
            }
            assert!(Instant::now() < until, "{answer:?}");
        }
    }

    /// Waits until these numbers of nodes are programmed and verified.
    pub(crate) async fn counts(&mut self, programmed: u64, verified: u64) -> pb::Convergence {
        let counts = (programmed, verified);
        self.until(|answer| (answer.programmed, answer.verified) == counts).await
    }
}

/// Returns the nodes that lag, and how.
pub(crate) fn lags(answer: &pb::Convergence) -> Vec<(&str, LagState)> {
    answer.laggards.iter().map(|l| (l.node.as_str(), l.state())).collect()
}
