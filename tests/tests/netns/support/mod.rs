//! A small cluster whose nodes run the backend under test, Services for it, and questions to ask.

mod agent;
pub(crate) mod arrival;
mod ask;
pub(crate) mod cluster;
pub(crate) mod ipvs;
pub(crate) mod kube_proxy;
pub(crate) mod model;
pub(crate) mod model_fate;
pub(crate) mod model_objects;
pub(crate) mod model_pairs;
pub(crate) mod nft;
pub(crate) mod objects;
#[path = "../../../support/plane.rs"]
pub(crate) mod plane;
pub(crate) mod programs;
mod scenario;
mod service;
pub(crate) mod under_test;
pub(crate) mod world;

pub(crate) use agent::Agent;
pub(crate) use ask::{PATIENCE, Question, SILENCE, Seen, answers, ask};
pub(crate) use scenario::{
    ALL, ALL_MASQUERADED, DROPPED, HERE, HERE_MASQUERADED, REFUSED, Row, Scenario, Want,
};
pub(crate) use service::{At, Ep, PORT, Svc, TARGET, node_ip, node_name, pod_ips, svc};
pub(crate) use world::{Client, Net, Setup, World, cidrs, ep, facts, second_ip, take_address};
