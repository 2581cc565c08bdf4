//! What people ask a kplane control plane, and what they order: the status API, the page, and traces of changes.

mod findings;
pub mod page;
pub mod server;
pub mod traces;
