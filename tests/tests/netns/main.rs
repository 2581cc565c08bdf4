//! The data path with real packets: the backend programs nodes, clients connect, endpoints tell
//! what reached them. No control plane, no gRPC.
//!
//! Most tests are [`support::Scenario`]s: tables of what must happen, which say nothing about how a
//! backend does it. Test names begin with the behaviour they stand for.

mod addresses;
mod churn;
mod health;
mod limits;
mod listing;
mod policies;
mod restart;
mod spread;
mod strangers;
mod support;
mod unserved;
mod walk;

kplane_tests::main!(
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
    unserved::a18_without_endpoints_everybody_is_refused_everywhere,
    unserved::a18_refusals_follow_the_endpoints,
    unserved::a18_refusals_come_at_once,
    unserved::a18_addresses_that_the_node_has_itself_are_refused_too,
    unserved::a18_an_endpoint_may_be_where_another_service_refuses,
    unserved::a20_an_unused_port_of_a_cluster_ip_is_refused,
    unserved::a20_an_address_that_no_service_has_is_dropped,
    unserved::a21_node_ports_are_served_on_the_primary_address_and_never_on_loopback,
    unserved::a21_node_ports_are_not_served_on_addresses_of_others,
    unserved::a8_source_ranges_drop_others_at_load_balancer_addresses_only,
    unserved::a8_ranges_may_overlap_and_hold_everybody,
    unserved::a9_a_node_inside_the_ranges_reaches_an_address_that_it_has_itself,
    unserved::a10_source_ranges_count_without_endpoints_too,
    spread::b10_connections_to_cluster_ips_are_spread_evenly,
    spread::b10_connections_to_node_ports_are_spread_evenly,
    spread::b10_connections_of_pods_to_local_load_balancers_are_spread_evenly,
    spread::b10_connections_of_pods_to_local_node_ports_are_spread_evenly,
    spread::b10_connections_from_outside_to_local_load_balancers_are_spread_evenly,
    strangers::traffic_that_is_no_services_keeps_its_addresses,
    strangers::a_foreign_table_keeps_working_and_no_other_mark_is_touched,
    strangers::foreign_commits_between_ours_are_no_drift,
    strangers::what_others_do_to_our_table_is_found_and_repaired,
    strangers::a_deleted_rule_is_found_and_repaired,
    strangers::a_change_onto_a_tampered_table_is_refused_and_then_repairs,
    churn::endpoints_come_and_go_without_a_failed_connection,
    churn::other_properties_change_without_a_failed_connection,
    churn::source_ranges_change_without_a_failed_connection,
    churn::other_services_change_without_a_failed_connection,
    churn::complete_changes_do_not_disturb_anybody,
    churn::a19_what_is_connected_stays_connected,
    churn::servers_stop_after_and_start_before_their_endpoints,
    churn::an_address_passes_to_another_service_in_one_change,
    listing::a_printed_ruleset_loads_again_and_does_the_same,
    listing::a_printed_ruleset_is_readable,
    listing::json_listings_agree_with_what_we_read_back,
    restart::a_restart_adopts_everything_without_an_operation,
    restart::a_restart_repairs_what_changed_meanwhile,
    restart::a_table_of_another_layout_is_replaced_under_load,
    restart::a_table_with_another_layouts_number_is_replaced,
    restart::cleanup_removes_both_tables_and_may_be_repeated,
    limits::many_services_are_loaded_through_a_small_socket_buffer,
    limits::too_many_endpoints_are_refused_by_name_and_the_rest_works,
    limits::a_poisoned_service_port_does_not_stop_others,
    limits::of_two_services_with_one_address_the_second_is_refused_by_name,
    limits::nothing_is_deleted_before_everything_is_known,
    health::a23_health_checks_follow_the_nodes_own_addresses,
    walk::after_any_walk_the_table_is_that_of_a_fresh_start,
);
