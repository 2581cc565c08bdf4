//! kplane's programs with a real Kubernetes API server: two replicas of the control plane, an agent
//! for each, real kernel tables. No test says how the tables must look where a fresh start from the
//! same objects can say it ([`support::oracle`]).

mod alarms;
mod announce;
mod broken;
mod chart;
mod events;
mod faults;
mod fleet;
mod freeze;
mod identity;
mod input;
mod kpctl;
mod migrate;
mod page;
mod questions;
mod random;
mod reasons;
mod record;
mod replicas;
mod rig;
mod rights;
mod rotation;
mod services;
mod startup;
mod stranger;
mod support;
mod tiers;
mod workloads;

use std::process::ExitCode;

use anyhow::Result;
use kplane_tests::cluster::{Programs, helm};
use kplane_tests::harness::{self, Arguments, Test};
use kplane_tests::privilege;
use kplane_tests::product::Product;

const TESTS: &[Test] = kplane_tests::tests!(
    rig::objects_are_made_changed_and_deleted,
    rig::deployments_have_endpoints_that_come_terminate_and_go,
    // Before those that take rights away: without them no event is tried for minutes.
    events::j1_an_agent_that_starts_is_an_event_of_its_node,
    events::two_replicas_tell_of_a_conflict_once,
    events::a_conflict_that_ends_is_told_and_one_that_returns_is_counted,
    events::without_the_right_to_write_events_everything_else_goes_on,
    random::after_random_operations_kernels_hold_what_a_fresh_start_would,
    faults::nothing_is_lost_when_the_api_server_crashes_under_changes,
    faults::a_compacted_history_is_no_harm,
    faults::a_list_that_lacks_many_is_looked_at_twice,
    faults::rights_taken_away_delete_nothing_and_heal,
    page::the_page_shows_the_fleet_live_and_runs_nothing_else,
    alarms::alerts_fire_in_real_faults_and_end_with_them,
    alarms::alerts_about_agents_fire_and_end_with_their_faults,
    alarms::alerts_about_a_kernel_that_refuses_fire_and_end_with_it,
    alarms::an_alert_says_that_changes_take_long,
    alarms::alerts_about_names_and_orders_fire_and_end_with_their_causes,
    alarms::alerts_about_replicas_fire_and_end_with_their_faults,
    alarms::an_alert_says_that_deletions_are_held,
    faults::an_older_etcd_is_followed_and_resurrects_nothing_else,
    replicas::an_agent_leaves_a_replica_that_is_cut_off_and_never_goes_back,
    replicas::any_replica_answers_for_all_and_kpctl_waits_for_all,
    freeze::a_node_is_frozen_at_any_replica_and_stays_so_over_restarts,
    freeze::orders_at_two_replicas_at_once_are_both_kept,
    startup::the_startup_taint_follows_the_data_path,
    tiers::cluster_policies_come_with_their_definition,
    record::history_names_the_object_its_version_and_the_time_of_each_node,
    record::history_names_the_field_that_changed,
    record::history_names_the_nodes_that_lack_a_change,
    record::history_outlives_its_service,
    fleet::agents_resume_at_other_replicas_and_lose_nothing,
    reasons::describe_names_the_cause_and_the_fix,
    broken::describe_names_addresses_that_cannot_be_served,
    broken::describe_names_what_is_wrong_with_agents,
    broken::why_says_what_came_back,
    questions::who_is_connected_is_asked_of_the_nodes_of_all_replicas,
    questions::who_talked_to_whom_is_asked_of_the_nodes_of_all_replicas,
    questions::a_client_that_is_remembered_is_listed,
    questions::a_service_that_asks_for_the_proxy_is_seen_in_it,
    questions::probe_tells_the_data_path_from_the_control_path,
    broken::status_names_why_the_api_server_cannot_be_used,
    reasons::describe_names_what_stands_in_the_way_on_a_node,
    workloads::a_deployment_is_scaled_and_rolled,
    workloads::b3_terminating_endpoints_serve_when_nothing_else_does,
    workloads::a_pod_that_is_being_deleted_is_out_before_its_slice_says_so,
    workloads::b2_traffic_distribution_keeps_zones_and_nodes_apart,
    workloads::nodes_come_move_and_go,
    workloads::a_service_of_both_families_is_in_both_tables,
    services::a_service_goes_through_all_types,
    services::a20_a_new_range_of_cluster_ips_is_guarded,
    migrate::nodes_move_one_after_the_other_and_back,
    identity::an_agent_speaks_for_the_node_of_its_pod_alone,
    identity::a_token_of_an_earlier_node_is_refused,
    identity::users_have_the_rights_that_the_cluster_gives_them,
    identity::known_agents_come_back_while_the_api_server_is_away,
    identity::replicas_make_one_authority_and_keep_it,
    announce::replicas_announce_the_addresses_of_their_service,
    rotation::the_authority_gets_a_successor_while_agents_work,
    input::credentials_that_do_not_work_are_said_to,
    input::control_planes_know_their_cluster,
    input::a_kubeconfig_that_is_none_is_one_line,
    input::absurd_objects_do_not_harm_their_neighbours,
    chart::the_api_server_accepts_every_combination_of_values,
    chart::pods_with_the_label_get_a_hook,
    chart::k34_an_upgrade_keeps_the_mode_that_agents_have,
    kpctl::each_missing_piece_on_the_way_to_the_control_plane_is_named,
    rights::control_planes_use_each_right_that_they_have,
    stranger::the_first_minute_goes_as_the_page_says,
);

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    let code = harness::prepared(arguments, 1, prepare, TESTS.iter().copied());
    support::world::end();
    code
}

/// Builds everything before the machine's network is left: Go may have to download. Returns whether that is
/// possible here.
fn prepare() -> Result<bool> {
    let programs = Programs::ensure().and_then(|_| helm());
    if privilege::available(programs)?.is_none() {
        return Ok(false);
    }
    support::world::set_product(Product::build()?);
    Ok(true)
}
