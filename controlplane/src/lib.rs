//! kplane's control plane as a library: puts the picture of the cluster (`kplane_picture`), the fleet (`kplane_fleet`) and
//! what people ask (`kplane_operate`) together.

mod admin;
pub mod app;
pub mod check;
pub mod flags;
pub mod signals;
