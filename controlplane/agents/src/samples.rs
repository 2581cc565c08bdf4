//! Samples for tests, here and in crates that use this one.

#![allow(clippy::unwrap_used, reason = "for tests")]

use std::sync::Arc;

use kplane_desired_state::admission::Admission;
use kplane_desired_state::index::CliffGuard;
use kplane_desired_state::source::Batch;
use kplane_proto::v1::Hello;
use tokio::sync::mpsc;

use crate::fleet::Session;
use crate::hub::Hub;

impl Hub {
    /// Returns a hub without an index: what is published comes from its caller.
    pub fn sample(epoch: u64, source: &'static str) -> Arc<Self> {
        let (_, batches) = mpsc::channel(1);
        let (admission, guard) = (Admission::default(), CliffGuard::default());
        Self::new(epoch, source, admission, guard, batches).0
    }

    /// Returns a hub of epoch 1 whose index runs, and the source's end.
    pub fn sample_with_index(
        source: &'static str,
        admission: Admission,
    ) -> (Arc<Self>, mpsc::Sender<Batch>) {
        let (sink, batches) = mpsc::channel(1);
        let (hub, index) = Self::new(1, source, admission, CliffGuard::default(), batches);
        tokio::spawn(index);
        (hub, sink)
    }
}

impl Session {
    /// Returns the session of an agent that has connected and is asked nothing.
    ///
    /// # Panics
    /// If the agent is refused.
    pub fn sample(hub: &Hub, node: &str) -> Self {
        let begun = Self::begin(hub.agents(), &node.into(), &Hello::default(), String::new());
        begun.unwrap().0
    }
}
