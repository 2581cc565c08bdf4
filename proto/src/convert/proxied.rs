//! Conversion of what a Service asks of the userspace proxy.

use kplane_model::Proxied;

use crate::v1 as pb;

impl From<Proxied> for pb::Proxied {
    fn from(proxied: Proxied) -> Self {
        Self {
            no_retry: !proxied.retry,
        }
    }
}

impl From<pb::Proxied> for Proxied {
    fn from(wire: pb::Proxied) -> Self {
        Self {
            retry: !wire.no_retry,
        }
    }
}
