//! Finds dead nodes: their streams ended or are silent, and their neighbours do not reach them.
//!
//! ```text
//! streams of agents -> Fleet::signs -> Judge <-> neighbours, by questions to their agents (`reach`)
//!                                        |
//!            other replicas <- words -> Suspects -> index: endpoints there count as terminating
//! ```
//!
//! `judge.rs` decides, and is pure. Nodes are asked nothing while all streams are alive.

mod choose;
mod judge;
mod watch;
mod words;

pub use watch::watch;
pub use words::hear;
