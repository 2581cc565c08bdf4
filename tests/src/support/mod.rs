//! A small cluster whose nodes run the backend under test, Services for it, and questions to ask.

#![allow(
    missing_docs,
    reason = "the fields and builders of scenarios read as sentences"
)]

mod agent;
mod ask;
pub mod cluster;
pub mod fate;
pub mod ipvs;
pub mod kube_proxy;
pub mod model;
pub mod model_fate;
pub mod model_objects;
pub mod model_pairs;
pub mod nft;
pub mod objects;
pub mod play;
pub mod programs;
pub mod proxy;
mod scenario;
mod service;
pub mod under_test;
pub mod world;

pub use agent::Agent;
pub use ask::{PATIENCE, Question, SILENCE, Seen, answers, ask, hit, pairs, refused, silent};
pub use scenario::{
    ALL, ALL_MASQUERADED, DROPPED, HERE, HERE_MASQUERADED, REFUSED, Row, Scenario, Want,
};
pub use service::{At, Ep, PORT, Svc, TARGET, node_ip, node_name, pod_ips, svc};
pub use world::{
    Client, Net, Setup, World, cidrs, ep, facts, loopback, second_ip, take_address, tcp_service,
};
