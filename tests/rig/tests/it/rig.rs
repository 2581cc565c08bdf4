//! The test rig itself, tested with real packets: what the other suites rely on.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use kplane_model::Family;
use kplane_rig::client::Protocol;
use kplane_rig::harness::{self, Arguments, Test};
use kplane_rig::topology::Topology;

mod browser;
mod handles;
mod topology;
mod traffic;

const TESTS: &[Test] = kplane_rig::tests!(
    topology::pods_reach_each_other,
    topology::outside_reaches_a_pod_through_a_node,
    topology::outcomes_are_told_apart,
    topology::a_lost_packet_is_a_failure,
    topology::pods_come_and_go,
    topology::a_pod_may_have_any_address,
    topology::nodes_come_late,
    topology::host_pods_have_the_nodes_addresses,
    topology::many_pods_are_built,
    traffic::servers_stop_gracefully,
    traffic::servers_start_and_stop_while_programs_start,
    traffic::load_counts_what_fails,
    traffic::sctp_arrives_unchanged,
    traffic::sctp_errors_are_told_apart,
    traffic::nat_on_a_node_works,
    traffic::captures_see_both_directions,
    handles::threads_and_commands_run_inside,
    handles::dropping_leaves_nothing,
    handles::packets_to_a_new_address_stay_at_home,
    handles::a_bridge_keeps_its_address_while_ports_come,
    browser::pages_are_opened_and_read,
    browser::faults_of_a_page_are_reported,
    browser::violations_of_a_policy_are_reported,
    browser::requests_to_other_hosts_are_seen_and_fail,
    browser::scripts_are_switched_off,
    browser::events_arrive,
    browser::looks_and_pictures,
    browser::keys_move_the_focus,
    browser::screen_readers_find_landmarks,
    browser::the_heap_grows_and_shrinks,
    browser::tabs_share_nothing_and_send_headers,
    browser::a_browser_leaves_nothing,
    browser::a_dead_browser_is_noticed,
);

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    harness::run(arguments, 1, TESTS.iter().copied())
}

pub(crate) const FAMILIES: [Family; 2] = [Family::V4, Family::V6];
pub(crate) const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];
/// Beyond any scheduling delay of a busy test machine, and beyond several times the 5 s that a load waits for an answer
/// that was lost when its server stopped.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);
/// For probes that shall time out.
pub(crate) const SHORT: Duration = Duration::from_millis(200);

/// Two standard nodes; pods `a` and `c` on the first, `b` on the second; all serve port 80.
pub(crate) fn two_nodes() -> Result<Topology> {
    let mut topology = Topology::standard(2)?;
    for (name, node, number) in [("a", 1, 1), ("b", 2, 1), ("c", 1, 2)] {
        add_pod(&mut topology, name, node, number)?;
    }
    Ok(topology)
}

pub(crate) fn add_pod(topology: &mut Topology, name: &str, node: u8, number: u8) -> Result<()> {
    let v6 = format!("fd44:0:0:{node:x}::{number:x}").parse()?;
    let ips = [IpAddr::from([10, 244, node, number]), v6];
    let pod = topology.add_pod(&format!("node-{node}"), name, &ips)?;
    PROTOCOLS.into_iter().try_for_each(|p| pod.serve(p, 80))
}

pub(crate) fn cases() -> impl Iterator<Item = (Family, Protocol)> {
    FAMILIES.into_iter().flat_map(|f| PROTOCOLS.map(|p| (f, p)))
}

/// An address that no pod, node or host has.
pub(crate) fn nobody(family: Family) -> Result<SocketAddr> {
    Ok(match family {
        Family::V4 => "198.51.100.1:7".parse()?,
        Family::V6 => "[2001:db8:1::1]:7".parse()?,
    })
}
