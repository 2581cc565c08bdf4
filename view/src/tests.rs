//! Tests of the views that people and programs see.

mod fields;
mod filled;
mod fleet;
mod folded;
mod node;
mod policies;
mod replicas;
mod servers;
mod services;
mod wait;
mod why;
