//! kplane's control plane as a library: puts the picture of the cluster (`kplane_desired_state`), the fleet (`kplane_agents`) and
//! what people ask (`kplane_status_api`) together.

mod admin;
pub mod app;
pub mod check;
pub mod flags;
pub mod signals;
