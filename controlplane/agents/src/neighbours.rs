//! Finds nodes that are probably dead by asking their neighbours. `judge.rs` decides, and is pure; nothing is asked while
//! all streams are alive.

mod choose;
mod judge;
mod watch;
mod words;

pub use watch::watch;
pub use words::hear;
