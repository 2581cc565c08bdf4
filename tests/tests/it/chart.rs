//! The Helm chart: what Helm renders, compared with what kplane's programs accept. The API server's opinion is in the
//! suite `cluster`. Here is also what else needs neither namespaces nor a cluster.

mod benches;
mod documents;
mod flags;
mod monitoring;
mod rendered;
mod settings;
mod values;

use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::{Result, anyhow};
use kplane_tests::chart::{Chart, combinations};
use kplane_tests::harness::{self, Arguments, Test};
use kplane_tests::privilege;
use serde_json::Value;

const TESTS: &[Test] = kplane_tests::tests!(
    benches::an_endpoint_says_which_change_made_it,
    documents::each_documented_command_is_run_on_a_real_cluster,
    documents::blocks_without_a_mark_have_commands,
    flags::the_programs_accept_all_arguments,
    flags::agents_start_with_the_arguments_and_kube_proxys_file,
    rendered::the_base_of_kustomize_is_the_rendered_chart,
    rendered::kustomize_changes_nothing_of_the_chart,
    rendered::the_rights_without_helm_are_those_of_the_chart,
    rendered::containers_have_no_more_rights_than_they_need,
    rendered::an_agent_that_hangs_is_replaced_within_half_a_minute,
    rendered::nothing_waits_for_a_cluster_ip,
    rendered::the_api_servers_own_address_is_what_replicas_use,
    rendered::during_a_migration_agents_run_on_nodes_with_the_label_only,
    settings::every_value_of_a_program_is_compared_with_its_flag,
    settings::values_have_the_range_and_the_default_of_their_flags,
    settings::each_value_becomes_its_flag,
    values::the_schema_and_the_file_have_the_same_values,
    values::every_value_is_documented_in_the_file,
    values::what_is_no_value_or_contradicts_another_is_refused,
    values::helm_has_no_complaint,
    monitoring::alerts::expressions_and_texts_use_what_the_programs_export,
    monitoring::alerts::every_alert_has_a_page_with_a_command,
    monitoring::alerts::prometheus_accepts_the_rules,
    monitoring::alerts::every_alert_fires_alone_and_only_when_it_must,
    monitoring::alerts::the_cases_have_series_that_exist,
    monitoring::alerts::the_chart_has_all_alerts_but_those_that_are_left_out,
    monitoring::alerts::rules_come_through_helm_unchanged,
    monitoring::dashboards::panels_ask_for_what_the_programs_export,
    monitoring::dashboards::every_panel_has_the_datasource_of_the_variable,
    monitoring::dashboards::the_chart_has_every_dashboard_in_a_config_map,
    monitoring::exported::names_that_no_program_exports_are_refused,
    monitoring::query::names_are_told_from_functions_labels_and_numbers,
    monitoring::reference::the_page_lists_all_metrics,
);

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    harness::run_here(arguments, TESTS.iter().copied())
}

/// Returns the chart. A test ends here if Helm cannot be built.
fn chart() -> Result<Chart> {
    privilege::needed(Chart::open())
}

/// What Helm makes of some values.
struct Rendering {
    settings: Vec<&'static str>,
    objects: Vec<Value>,
}

/// Returns the renderings of all combinations of values, which Helm makes once for all tests.
fn renderings() -> Result<&'static [Rendering]> {
    static ALL: OnceLock<Result<Vec<Rendering>>> = OnceLock::new();
    let chart = chart()?;
    let render = |settings: Vec<&'static str>| {
        let objects = chart.objects(&settings)?;
        Ok(Rendering { settings, objects })
    };
    let all = ALL.get_or_init(|| combinations().into_iter().map(render).collect());
    match all {
        Ok(all) => Ok(all),
        Err(error) => Err(anyhow!("{error:#}")),
    }
}
