//! What people ask a kplane control plane, and what they order: the status API and the page.

mod findings;
pub mod page;
pub mod server;
