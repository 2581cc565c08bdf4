//! The views of what `kpctl` does itself, and not the control plane.

pub(crate) mod check;
pub(crate) mod migration;
