//! Finds nodes that are probably dead by asking their neighbours. `judge.rs` decides, and is pure; nothing is asked while
//! all streams are alive.

mod choose;
mod dead;
mod judge;
mod messages;
mod watch;

pub use messages::receive;
pub use watch::watch;
