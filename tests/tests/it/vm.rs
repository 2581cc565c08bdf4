//! kube-proxy itself in mode ipvs, and kplane in its place: in a virtual machine whose kernel has
//! IPVS, with a real API server outside of it.
//!
//! This program starts the API server and the machine; started again inside, it runs the tests.

mod node;
mod taking_over;
mod units;

use std::env;
use std::process::{Command, ExitCode};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_tests::cluster::{Cluster, Options};
use kplane_tests::harness::{self, Arguments, Test};
use kplane_tests::netns::NetNs;
use kplane_tests::product::Product;
use kplane_tests::vm::{self, Run, Vm};

const TESTS: &[Test] = kplane_tests::tests!(
    taking_over::i4_kplane_takes_kube_proxys_place_and_back_without_a_failed_connection,
    units::a_unit_serves_before_kubelet_and_after_nftables_and_agent_start_again,
);

/// The machine is killed after this.
const DEADLINE: Duration = Duration::from_secs(1200);
/// What the program inside is told.
const KUBECONFIG: &str = "KPLANE_TEST_KUBECONFIG";
const KUBE_PROXY: &str = "KPLANE_TEST_KUBE_PROXY";
const NODE_AGENT: &str = "KPLANE_TEST_NODE_AGENT";

/// The network namespace in which the machine started: the one that reaches the API server.
static MACHINE: OnceLock<NetNs> = OnceLock::new();

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    if vm::is_inside() {
        match NetNs::current("machine") {
            Ok(ns) => drop(MACHINE.set(ns)),
            Err(error) => eprintln!("{error:#}"),
        }
        return harness::run(arguments, 1, TESTS.iter().copied());
    }
    if !vm::is_wanted() {
        println!("these tests run in a virtual machine: cargo xtask test vm");
        return harness::skip(arguments, TESTS.iter().copied());
    }
    vm::or_skip(outside)
}

/// An API server, and a machine that reaches it.
fn outside() -> Result<u8> {
    let product = Product::build()?;
    kplane_tests::userns::enter()?;
    let mut vm = Vm::ensure()?;
    vm.network = true;
    let cluster = Cluster::start(&Options {
        service_ranges: "10.96.0.0/16,fd96::/64".to_owned(),
        ..Options::default()
    })?;
    let mut again = Command::new(env::current_exe().context("this program's path")?);
    again
        .args(env::args_os().skip(1))
        .env(KUBECONFIG, cluster.kubeconfig())
        .env(KUBE_PROXY, cluster.programs().bin().join("kube-proxy"))
        .env(NODE_AGENT, &product.node_agent);
    let run = Run::new(&again, DEADLINE);
    cluster.ns().run(|| vm.run(&run))
}
