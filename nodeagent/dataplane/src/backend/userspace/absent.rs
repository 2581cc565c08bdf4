//! In the place of `userspace.rs` in a program without the feature `userspace`: its backends do not open, and the backends of
//! the kernel name the ServicePorts that lack the proxy.

mod localhost;

use std::time::Duration;

use kplane_model::{Family, ServiceName};

use self::localhost::Localhost;
use super::{
    Applied, ApplyError, Backend, Change, Description, Failure, Inspection, OpenError,
    ServerCounts, Settings, Side, Verification,
};

/// What the program lacks.
const MISSING: &str = "this program was built without the userspace proxy; take one that was built with it (cargo feature \
                       userspace)";

/// Refuses to open a backend.
pub(super) fn open(description: &Description, _: &Settings) -> Result<Backend, OpenError> {
    Err(OpenError::new(description.name, MISSING))
}

/// Has a backend of the kernel say what it serves in the proxy's place.
pub(super) fn on_request(backend: Backend, settings: &Settings) -> Backend {
    let side = |family, inner| -> Box<dyn Side> {
        Box::new(Alone {
            inner,
            localhost: Localhost::of(backend.description, family, settings),
        })
    };
    let [v4, v6] = backend.sides;
    Backend {
        sides: [side(Family::V4, v4), side(Family::V6, v6)],
        ..backend
    }
}

/// One family, which the kernel's backend serves alone.
struct Alone {
    inner: Box<dyn Side>,
    localhost: Localhost,
}

impl Side for Alone {
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        let mut applied = self.inner.apply(change)?;
        let failures = change.services.iter().filter_map(|(key, plan)| {
            let plan = plan.as_ref()?;
            let effect = match plan.proxied {
                Some(_) => "the kernel serves it instead of the userspace proxy",
                None => {
                    self.localhost.lacks(plan, change.node, |_| false)?;
                    "its node port is not served on loopback addresses"
                }
            };
            Some(Failure::degraded(key, format!("{effect}: {MISSING}")))
        });
        applied.failures.extend(failures);
        Ok(applied)
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        self.inner.verify()
    }

    fn repair(&mut self) -> Result<Verification, ApplyError> {
        self.inner.repair()
    }

    fn has_services(&mut self) -> bool {
        self.inner.has_services()
    }

    fn probe_interval(&self) -> Option<Duration> {
        self.inner.probe_interval()
    }

    fn servers(&self) -> Option<ServerCounts> {
        self.inner.servers()
    }

    fn inspect(&self, service: &ServiceName) -> Option<Inspection> {
        self.inner.inspect(service)
    }
}
