//! In the place of `handover.rs` in a program without the userspace proxy: nothing outlives an agent.

use std::future::{Pending, Ready, pending, ready};
use std::sync::Arc;

use kplane_dataplane::backend::{Proxy, ProxyHandle, UserspaceSettings};
use kplane_model::NodeName;

/// A successor, which never comes.
#[derive(Clone, Copy)]
pub(crate) enum Successor {}

pub(crate) fn inherit(_: &UserspaceSettings, _: &NodeName) -> Ready<()> {
    ready(())
}

/// The readiness to be succeeded.
#[derive(Debug, Default)]
pub(crate) struct Handover(());

impl Handover {
    pub(crate) fn open(_: &UserspaceSettings, _: &NodeName) -> Self {
        Self(())
    }

    pub(crate) fn successor(&mut self, _: &ProxyHandle) -> Pending<Successor> {
        pending()
    }

    pub(crate) fn hand_over(&self, _: Option<Arc<dyn Proxy>>, to: Successor) -> Ready<bool> {
        match to {}
    }

    pub(crate) fn drain(&mut self, _: Option<Arc<dyn Proxy>>) -> Ready<()> {
        ready(())
    }
}
