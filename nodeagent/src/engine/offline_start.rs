//! Decides when the agent serves from its cache file because no control plane answers.
//!
//! ```text
//! start --an update----------------------> the file is a memory only
//! start --GRACE_EMPTY, nothing serves----> served from the file --an update--> as ever
//! start --GRACE_SERVING, all else--------> served from the file --an update--> as ever
//! ```
//!
//! The file is at most as new as what the previous process left in the kernel, and older if that process
//! was killed within seconds after a change. So an agent whose kernel still serves waits longer for a
//! control plane. A node that serves nothing gains from the first moment.

use std::time::{Duration, Instant};

use kplane_dataplane::leftovers::{CompetingProxy, Ports, running};

use crate::desired::Desired;

/// Time for a control plane to answer while the data path has no Services, as after a reboot.
const GRACE_EMPTY: Duration = Duration::from_millis(100);
/// Time for a control plane to answer while the data path has the Services of an earlier process.
const GRACE_SERVING: Duration = Duration::from_secs(2);
/// Time between two checks for a kube-proxy that runs. While it does, it serves the node, and with newer
/// data than the file has.
const COMPETING_PROXY_CHECK: Duration = Duration::from_secs(10);

/// Settings of serving from the cache file.
#[derive(Clone, Copy, Debug, Default)]
pub struct OfflineStartSettings {
    /// The ports on which a kube-proxy may listen; `None` = ignore kube-proxy.
    pub kube_proxy: Option<Ports>,
}

/// The wait for a control plane.
#[derive(Debug, Default)]
pub(super) struct OfflineStart {
    settings: OfflineStartSettings,
    begun: Option<Instant>,
    /// The end of the wait; `None` = the file is not served, or served already.
    due: Option<Instant>,
    /// Whether the log says that a kube-proxy runs.
    reported: bool,
}

impl OfflineStart {
    /// Begins to wait, if there is something to serve.
    pub(super) fn begin(
        settings: Option<OfflineStartSettings>,
        desired: &Desired,
        now: Instant,
    ) -> Self {
        let settings = if desired.remembers_services() { settings } else { None };
        Self {
            settings: settings.unwrap_or_default(),
            begun: settings.map(|_| now),
            due: settings.map(|_| now + GRACE_EMPTY),
            reported: false,
        }
    }

    /// Records that a control plane has answered.
    pub(super) fn answered(&mut self) {
        self.due = None;
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due.is_some_and(|at| at <= now)
    }

    /// Decides whether to serve from the file now, at the end of a wait. `serving` returns whether the data
    /// path has Services, which may take a while.
    pub(super) fn decide(&mut self, now: Instant, serving: impl FnOnce() -> bool) -> bool {
        let patient = self.begun.take().map(|begun| begun + GRACE_SERVING);
        if let Some(later) = patient.filter(|later| now < *later)
            && serving()
        {
            self.due = Some(later);
            return false;
        }
        if self.kube_proxy_runs() {
            self.due = Some(now + COMPETING_PROXY_CHECK);
            return false;
        }
        self.due = None;
        true
    }

    fn kube_proxy_runs(&mut self) -> bool {
        let certain = |competing_proxy: &CompetingProxy| {
            matches!(
                competing_proxy,
                CompetingProxy::Process(_) | CompetingProxy::Answers(..)
            )
        };
        let competing_proxy = self.settings.kube_proxy.and_then(running).filter(certain);
        if let Some(competing_proxy) = &competing_proxy
            && !self.reported
        {
            tracing::warn!(
                evidence = %competing_proxy,
                "no control plane answers, but kube-proxy runs on this node: the agent does not serve from its \
                 cache file while it does"
            );
            self.reported = true;
        }
        competing_proxy.is_some()
    }
}
