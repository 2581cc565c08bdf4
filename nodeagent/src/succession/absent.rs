//! In the place of `succession.rs` in a program without the userspace proxy: nothing outlives an agent.

use std::future::{Pending, Ready, pending, ready};
use std::sync::Arc;

use kplane_dataplane::backend::{Proxy, ProxyHandle, UserspaceSettings};
use kplane_model::NodeName;

/// A successor, which never comes.
#[derive(Clone, Copy)]
pub(crate) enum Visitor {}

pub(crate) fn inherit(_: &UserspaceSettings, _: &NodeName) -> Ready<()> {
    ready(())
}

/// The readiness to be succeeded.
#[derive(Debug, Default)]
pub(crate) struct Succession(());

impl Succession {
    pub(crate) fn open(_: &UserspaceSettings, _: &NodeName) -> Self {
        Self(())
    }

    pub(crate) fn successor(&mut self, _: &ProxyHandle) -> Pending<Visitor> {
        pending()
    }

    pub(crate) fn hand_over(&self, _: Option<Arc<dyn Proxy>>, to: Visitor) -> Ready<bool> {
        match to {}
    }

    pub(crate) fn drain(&mut self, _: Option<Arc<dyn Proxy>>) -> Ready<()> {
        ready(())
    }
}
