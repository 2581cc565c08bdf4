//! The data path with real packets: the backend programs nodes, clients connect, endpoints tell
//! what reached them. No gRPC.
//!
//! Most tests are [`support::Scenario`]s: tables of what must happen, which say nothing about how a
//! backend does it. Others begin with Kubernetes objects and have a control plane and engines
//! ([`support::cluster`]); of these, [`generated`] ones play thousands of cases against a plain model
//! of the rules. Test names begin with the behaviour they stand for.
//!
//! Every test runs on every backend ([`support::under_test`], which also says which tests are of one
//! only, and why): the names of nftables' are bare, the others begin with the backend.

mod addresses;
mod affinity;
mod alone;
mod asked;
mod churn;
mod combined;
mod coming_from_kube_proxy;
mod connected;
mod conntrack;
mod counted;
mod dead;
mod emptied;
mod generated;
mod handed;
mod health;
mod iptables;
mod iptables_faults;
mod latency;
mod limits;
mod listing;
mod network_policies;
mod own_way;
mod policies;
mod prestop;
mod proxied;
mod remembered;
mod reported;
mod restart;
mod rolled;
mod ruleset;
mod runtime;
mod shared;
mod spread;
mod strangers;
mod talked;
mod tampering;
mod told;
mod transparent;
mod unserved;
mod virtual_server_faults;
mod virtual_servers;
mod walk;
mod whole;

use std::process::ExitCode;
use std::time::Duration;

use kplane_tests::harness::{self, Arguments, Test};
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::vm;

const TESTS: &[Test] = kplane_tests::tests!(
    addresses::a15_external_addresses_masquerade_and_pods_keep_their_source_to_cluster_ips,
    addresses::a15_without_pod_ranges_nobody_is_masqueraded_to_cluster_ips,
    addresses::a17_masquerade_all_masquerades_cluster_ips_for_everybody,
    addresses::a17_masquerade_all_leaves_external_policy_local_alone,
    addresses::a15_an_endpoint_reaches_itself_through_its_service,
    addresses::a15_a_pod_keeps_its_source_to_endpoints_that_are_not_itself,
    addresses::a15_a_pod_reaches_the_node_port_of_another_node,
    addresses::a15_endpoints_with_the_nodes_address_are_reached_by_everybody,
    addresses::a3_the_same_port_of_other_protocols_is_independent,
    policies::a16_outside_reaches_local_endpoints_and_pods_and_nodes_all_of_a_local_policy,
    policies::a16_without_pod_ranges_pods_reach_local_endpoints_only,
    policies::a18_outside_is_dropped_where_a_local_policy_has_no_endpoint,
    policies::a18_without_pod_ranges_pods_are_dropped_too,
    policies::a18_a_local_policy_without_endpoints_anywhere_refuses,
    policies::a12_internal_policy_local_is_for_cluster_ips_only,
    policies::a18_internal_policy_local_drops_where_no_endpoint_is,
    policies::a12_a13_both_policies_local,
    policies::b3_draining_endpoints_serve_when_nothing_is_ready,
    policies::b5_a_draining_endpoint_serves_a_local_policy_when_no_other_is_on_the_node,
    prestop::servers_end_right_after_their_hooks_and_no_connection_fails,
    prestop::hooks_are_answered_at_their_bound_at_the_latest,
    prestop::hooks_outlive_a_restart_of_their_agent,
    prestop::a_pod_that_serves_at_the_port_of_hooks_is_left_alone,
    counted::each_connection_through_a_service_is_reported_once,
    asked::a_kernel_says_what_it_does,
    asked::a_kernel_says_what_others_have_left,
    remembered::a_client_is_listed_with_its_endpoint,
    connected::who_is_connected_is_listed_in_every_mode,
    talked::who_talked_to_whom_is_counted_with_failures_and_bytes,
    unserved::a18_without_endpoints_everybody_is_refused_everywhere,
    unserved::a18_refusals_follow_the_endpoints,
    unserved::a18_refusals_come_at_once,
    unserved::a18_addresses_that_the_node_has_itself_are_refused_too,
    unserved::a18_an_endpoint_may_be_where_another_service_refuses,
    unserved::a20_an_unused_port_of_a_cluster_ip_is_refused,
    unserved::a20_an_endpoint_that_is_a_cluster_ip_is_refused,
    unserved::a20_an_address_that_no_service_has_is_dropped,
    unserved::a21_node_ports_are_served_on_the_primary_address_and_never_on_loopback,
    unserved::k6_node_ports_on_loopback_are_refused_and_counted,
    unserved::a21_node_ports_are_not_served_on_addresses_of_others,
    unserved::a8_source_ranges_drop_others_at_load_balancer_addresses_only,
    unserved::a8_ranges_may_overlap_and_hold_everybody,
    unserved::a9_a_node_inside_the_ranges_reaches_an_address_that_it_has_itself,
    unserved::a10_source_ranges_count_without_endpoints_too,
    affinity::a11_a_client_stays_at_its_endpoint_at_all_addresses,
    affinity::a11_protocols_and_clients_choose_apart,
    affinity::a11_a_client_is_forgotten_when_its_time_is_over_and_use_prolongs_it,
    affinity::a11_choices_survive_other_changes_and_a_restart,
    affinity::a11_an_endpoint_that_goes_lets_its_clients_go,
    affinity::a11_a16_a_local_policy_remembers_among_local_endpoints,
    affinity::a11_a_node_port_and_another_services_port_of_the_same_number_are_kept_apart,
    affinity::a11_affinity_comes_and_goes_without_a_failed_connection,
    affinity::a11_what_is_remembered_is_printed_and_loads_again,
    spread::b10_connections_to_cluster_ips_are_spread_evenly,
    spread::b10_connections_to_node_ports_are_spread_evenly,
    spread::b10_connections_of_pods_to_local_load_balancers_are_spread_evenly,
    spread::b10_connections_of_pods_to_local_node_ports_are_spread_evenly,
    spread::b10_connections_from_outside_to_local_load_balancers_are_spread_evenly,
    strangers::traffic_that_is_no_services_keeps_its_addresses,
    strangers::a_foreign_table_keeps_working_and_no_other_mark_is_touched,
    strangers::foreign_commits_between_ours_are_no_drift,
    strangers::what_others_do_to_our_table_is_found_and_repaired,
    strangers::an_engine_at_rest_puts_right_what_others_do,
    strangers::a_deleted_rule_is_found_and_repaired,
    strangers::a_change_onto_a_tampered_table_repairs_it_first,
    strangers::foreign_commits_without_a_pause_starve_nobody,
    churn::endpoints_come_and_go_without_a_failed_connection,
    churn::other_properties_change_without_a_failed_connection,
    churn::source_ranges_change_without_a_failed_connection,
    churn::other_services_change_without_a_failed_connection,
    churn::complete_changes_do_not_disturb_anybody,
    churn::a19_what_is_connected_stays_connected,
    churn::servers_stop_after_and_start_before_their_endpoints,
    churn::an_address_passes_to_another_service_in_one_change,
    conntrack::f1_f2_a_client_moves_when_its_endpoint_goes,
    conntrack::f2_serving_endpoints_keep_their_flows,
    conntrack::f2_flows_to_a_server_on_the_node_itself,
    conntrack::f2_local_policies_do_not_cut_flows,
    conntrack::f3_f4_addresses_served_after_the_first_packet,
    conntrack::f4_node_ports_served_after_the_first_packet,
    conntrack::f4_a_service_without_endpoints_has_no_flows,
    conntrack::f4_a_deleted_service_has_no_flows,
    conntrack::f5_tcp_connections_outlive_their_endpoint,
    conntrack::a_connect_moves_when_its_endpoint_goes,
    conntrack::an_address_that_comes_back_in_another_service_gets_no_old_connects,
    conntrack::flows_that_are_no_services_are_not_touched,
    conntrack::a_restart_looks_at_all_flows_once,
    conntrack::a_flow_is_deleted_once,
    conntrack::f3_flows_that_began_while_the_rules_were_away,
    conntrack::an_address_passes_to_another_service,
    conntrack::nobody_is_left_behind_by_many_changes,
    conntrack::the_engine_cleans_up_and_reports_it,
    listing::a_printed_ruleset_loads_again_and_does_the_same,
    listing::a_printed_ruleset_is_readable,
    listing::json_listings_agree_with_what_we_read_back,
    restart::a_restart_adopts_everything_without_an_operation,
    restart::a_restart_repairs_what_changed_meanwhile,
    restart::a_table_of_another_layout_is_replaced_under_load,
    restart::a_table_with_another_layouts_number_is_replaced,
    restart::an_older_layout_is_replaced_under_load_both_ways,
    restart::cleanup_removes_both_tables_and_may_be_repeated,
    emptied::a_start_beside_an_emptied_folder_cuts_nobody_off,
    alone::a_reboot_without_a_control_plane_is_served_from_the_cache,
    alone::policies_hold_after_a_reboot_without_a_control_plane,
    rolled::replicas_are_replaced_under_changes_and_no_connection_fails,
    coming_from_kube_proxy::i4_nothing_fails_while_its_nftables_rules_are_replaced,
    coming_from_kube_proxy::i4_nothing_fails_while_its_legacy_iptables_rules_are_replaced,
    coming_from_kube_proxy::i4_nothing_fails_while_its_nft_iptables_rules_are_replaced,
    coming_from_kube_proxy::i4_rules_of_kubelet_and_others_stay_as_they_were,
    coming_from_kube_proxy::i4_chains_that_others_need_are_kept_and_named,
    coming_from_kube_proxy::i4_what_ipvs_mode_left_is_removed,
    coming_from_kube_proxy::i4_cleanup_removes_everything_of_both_and_may_be_repeated,
    coming_from_kube_proxy::i4_looking_creates_nothing,
    limits::many_services_are_loaded_through_a_small_socket_buffer,
    limits::too_many_endpoints_are_refused_by_name_and_the_rest_works,
    limits::a_poisoned_service_port_does_not_stop_others,
    limits::of_two_services_with_one_address_the_second_is_refused_by_name,
    limits::nothing_is_deleted_before_everything_is_known,
    generated::cases_are_the_same_for_a_seed_and_hold_every_pair,
    generated::generated_cases_meet_the_fate_that_the_rules_say,
    told::why_tells_the_fate_that_the_rules_say,
    combined::a8_a16_source_ranges_together_with_external_policy_local,
    combined::a8_a18_source_ranges_where_a_local_policy_has_no_endpoint,
    combined::a8_source_ranges_hold_where_another_program_translates,
    combined::a15_a16_pods_are_told_by_one_interface,
    combined::b2_b3_b5_hints_together_with_draining_endpoints,
    combined::b8_only_hints_decide_about_topology,
    combined::b2_b9_traffic_follows_the_zone_label_of_the_node,
    combined::a4_leading_zeros_are_decimal_up_to_the_packet,
    combined::a11_a16_affinity_never_leads_past_a_local_policy,
    combined::a11_b5_affinity_is_released_with_the_endpoint_under_policy_local,
    combined::a30_nothing_but_ready_endpoints_of_ports,
    reported::endpoints_in_two_slices_serve_as_their_conditions_say,
    reported::slices_of_two_managers_precede_their_service,
    reported::a_shared_address_has_source_ranges_for_one_service,
    reported::one_node_port_number_serves_three_protocols,
    reported::addresses_of_the_other_family_disturb_nothing,
    reported::a_health_check_port_that_is_a_node_port_disturbs_nothing,
    shared::a3_a8_services_share_a_load_balancer_address_on_ports_and_protocols,
    shared::a5_of_two_services_with_an_external_ip_the_older_is_served_and_the_other_told,
    shared::a6_of_two_services_with_a_load_balancer_address_the_older_is_served_and_the_other_told,
    shared::a21_of_two_services_with_a_node_port_the_older_is_served_and_the_other_told,
    shared::a5_an_external_ip_never_shadows_a_cluster_ip,
    shared::a1_a2_what_is_not_ours_is_left_alone,
    runtime::a21_node_port_addresses_by_range_follow_the_node,
    runtime::a21_e10_node_ports_follow_the_primary_address_of_the_node,
    runtime::a21_node_ports_stay_restricted_when_the_node_goes,
    runtime::a21_ranges_of_one_family_leave_the_other_open,
    runtime::a20_e10_a_change_of_service_cidrs_counts_at_once,
    runtime::a15_a16_a17_a_restart_with_other_settings_leaves_nothing_stale,
    runtime::c5_e7_any_bit_of_the_mark_and_no_other,
    runtime::e12_a_failed_transaction_is_followed_by_a_new_change,
    runtime::a19_connections_from_before_a_service_has_their_address_go_on,
    runtime::f5_established_connections_live_through_every_change,
    ruleset::e1_one_table_in_each_family_and_nothing_else,
    ruleset::e2_base_chains_have_the_priorities_that_others_count_on,
    ruleset::e4_hairpins_are_known_of_local_endpoints_only,
    ruleset::e3_e5_e6_e9_services_add_elements_only,
    ruleset::e11_nothing_is_left_of_deleted_services,
    ruleset::a26_e8_no_hole_is_punched_into_others_firewalls,
    ruleset::e8_no_rule_looks_for_invalid_packets,
    health::a23_health_checks_follow_the_nodes_own_addresses,
    health::a23_with_primary_health_checks_are_on_the_nodes_own_address,
    latency::h_both_families_measure_each_change_once,
    handed::a_service_changes_its_way_without_a_failed_connection,
    handed::a_service_with_the_nodes_address_stays_the_kernels,
    handed::u37_only_the_service_that_asks_is_the_proxys,
    handed::f1_udp_flows_follow_their_service_to_the_kernel_and_back,
    handed::u17_u22_node_ports_on_loopback_addresses,
    transparent::u16_u51_endpoints_on_this_node_see_the_clients_address,
    transparent::u51_the_delivery_of_answers_is_repaired,
    proxied::u37_no_connection_fails_while_an_endpoint_refuses,
    network_policies::np1_np2_np3_np4_isolation_is_per_direction_and_policies_add_up,
    network_policies::np5_np6_selectors,
    network_policies::np7_blocks,
    network_policies::np8_np9_np10_ports,
    network_policies::np11_np12_nodes,
    network_policies::np13_connections_that_are_denied_now_are_cut,
    network_policies::np13_connections_do_not_pass_to_heirs,
    network_policies::np13_a_server_that_goes_on_talking_keeps_nothing_alive,
    network_policies::np13_a_connection_that_was_forgotten_ends_at_once,
    network_policies::np20_neighbour_discovery_is_no_tunnel,
    network_policies::np20_errors_about_no_connection_are_no_tunnel,
    network_policies::np14_np15_services,
    network_policies::np14_why_tells_what_packets_meet,
    network_policies::np14_services_are_as_before_where_everything_is_allowed,
    network_policies::np17_labels_of_pods_and_namespaces_change,
    network_policies::np18_addresses_pass_to_other_pods,
    network_policies::np19_unknown_pods_are_cut_off,
    network_policies::np19_nodes_open_when_there_are_no_policies,
    network_policies::np19_a_new_range_is_closed_at_once,
    network_policies::np_reported_shapes_of_policies,
    network_policies::np18_phases_and_deletion_leave_policies_in_force,
    network_policies::np19_an_address_that_the_status_lacks_is_closed,
    network_policies::np11_egress_to_nodes,
    network_policies::host_ports_of_other_programs_show_the_client,
    network_policies::relayed_connections_are_a_failure_of_the_node,
    network_policies::tiers_come_before_and_behind_network_policies,
    network_policies::what_is_not_understood_opens_nothing,
    network_policies::tiers_follow_labels_and_cut,
    network_policies::other_programs_change_the_tables,
    network_policies::no_verdict_is_wrong_while_everything_changes,
    network_policies::each_wrong_reading_of_the_api_fails_a_case,
    network_policies::what_nodes_enforce_is_counted,
    network_policies::denied_packets_are_counted_and_followed,
    proxied::a11_the_kernel_does_not_remember_the_proxy,
    proxied::a_removed_address_of_the_proxy_comes_back,
    proxied::the_kernel_serves_once_the_proxy_has_ended,
    dead::a_node_whose_links_are_cut_is_out_in_seconds_and_back_with_them,
    dead::connects_that_wait_for_a_dead_node_reach_another,
    dead::connections_to_a_dead_node_end_with_the_next_packet,
    dead::connections_to_a_dead_node_end_where_policies_isolate_both_ends,
    dead::connections_to_a_dead_node_stay_if_they_are_to_be_kept,
    dead::connections_outlive_a_node_that_flaps,
    dead::to_observe_a_dead_node_changes_nothing,
    dead::a_control_plane_that_is_cut_off_suspects_nobody,
    dead::a_node_without_its_agent_is_not_dead,
    dead::replicas_suspect_the_same_nodes,
    dead::agents_that_move_to_another_replica_are_not_lost,
    dead::a_node_that_dies_with_its_replica_is_found,
    own_way::what_is_marked_as_ours_is_no_services_to_take,
    own_way::a_service_at_the_control_planes_place_locks_no_agent_out,
    iptables::a10_without_endpoints_source_ranges_do_not_count,
    iptables::a20_unused_ports_and_addresses_are_left_alone,
    iptables::a21_node_ports_are_served_on_all_addresses_and_on_loopback,
    iptables::c7_c8_dropped_and_local_packets_are_counted,
    iptables::a11_a_client_is_forgotten_when_its_time_is_over,
    iptables::i4_nothing_fails_while_kube_proxys_rules_are_adopted,
    iptables::i4_nothing_fails_between_kube_proxys_layout_and_ours,
    iptables::i4_nothing_fails_on_the_way_to_nftables_and_back,
    iptables::cleanup_removes_everything_and_may_be_repeated,
    iptables_faults::what_others_do_to_our_rules_is_found_and_repaired,
    iptables_faults::c11_what_others_flush_is_back_within_the_probe_interval,
    iptables_faults::c9_a_held_lock_is_waited_for_and_named,
    iptables_faults::c10_a_refused_service_port_is_named_and_the_others_are_served,
    iptables_faults::chains_that_others_hold_on_to_do_not_stop_anything,
    iptables_faults::a_restore_that_is_killed_anywhere_is_made_up_for,
    virtual_servers::d2_addresses_are_on_the_device_while_a_service_has_them,
    virtual_servers::d4_other_ports_of_service_addresses_are_closed,
    virtual_servers::d5_connections_outlive_their_endpoint_and_an_agent,
    virtual_servers::d5_what_drains_is_in_the_report,
    virtual_servers::d5_endpoints_of_udp_and_sctp_go_at_once,
    virtual_servers::d6_strict_arp_keeps_service_addresses_to_the_node,
    virtual_servers::d7_every_scheduler_serves_and_takes_anothers_place,
    virtual_servers::d7_a_service_has_the_scheduler_that_it_asks_for,
    virtual_servers::d7_affinity_is_persistence_with_its_timeout,
    virtual_servers::d8_excluded_and_foreign_virtual_servers_are_left_alone,
    virtual_servers::a29_strict_local_policies_refuse_where_no_endpoint_is,
    virtual_servers::i4_nothing_fails_on_the_way_to_nftables_and_back,
    virtual_servers::i4_connections_of_ipvs_outlive_it,
    virtual_servers::cleanup_removes_everything_and_may_be_repeated,
    virtual_server_faults::what_others_do_is_found_and_repaired,
    virtual_server_faults::what_others_do_is_repaired_by_itself,
    virtual_server_faults::a_restart_adopts_everything_and_writes_only_what_changed,
    virtual_server_faults::every_crash_point_serves_and_is_recovered_from,
    virtual_server_faults::a_scheduler_that_is_missing_is_named_with_its_module,
    walk::after_any_walk_the_table_is_that_of_a_fresh_start,
);

/// A virtual machine is killed after this, and after that if it runs all tests.
const IN_VM: Duration = Duration::from_secs(1800);
const IN_VM_ALL: Duration = Duration::from_secs(4 * 3600);

/// Tests mostly wait: for packets, and for what must not come. Not so in a virtual machine.
const AT_A_TIME: usize = 3;

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    if vm::is_wanted() {
        return vm::run_myself(if vm::runs_all() { IN_VM_ALL } else { IN_VM });
    }
    let tests = UnderTest::here().flat_map(|backend| {
        TESTS
            .iter()
            .filter(move |(name, _)| backend.runs(name))
            .map(move |(name, body)| (backend.name_of(name), move || backend.test(*body)))
    });
    let at_a_time = if vm::is_inside() { 1 } else { AT_A_TIME };
    harness::run(arguments, at_a_time, tests)
}
