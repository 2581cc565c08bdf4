//! Tests of the flags (I1).

use std::collections::BTreeSet;

use super::super::settings::resolve;
use super::*;

/// Every flag of kube-proxy 1.36 except those that concern the program itself.
const ALL: &str = "
    feature-gates kubeconfig master kube-api-content-type kube-api-burst kube-api-qps
    hostname-override bind-address bind-address-hard-fail healthz-bind-address metrics-bind-address
    profiling show-hidden-metrics-for-version proxy-mode iptables-masquerade-bit
    iptables-localhost-nodeports iptables-sync-period iptables-min-sync-period masquerade-all
    ipvs-sync-period ipvs-min-sync-period ipvs-scheduler ipvs-exclude-cidrs ipvs-strict-arp
    ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout detect-local-mode pod-bridge-interface
    pod-interface-name-prefix cluster-cidr nodeport-addresses oom-score-adj conntrack-max-per-core
    conntrack-min conntrack-tcp-timeout-established conntrack-tcp-timeout-close-wait
    conntrack-tcp-be-liberal conntrack-udp-timeout conntrack-udp-timeout-stream config-sync-period
    healthz-port metrics-port source-vip network-name enable-dsr root-hnsendpoint-name
    forward-healthcheck-vip windows-service v vmodule log-flush-frequency logging-format
    log-text-split-stream log-text-info-buffer-size log-json-split-stream log-json-info-buffer-size";

fn parse(line: &str) -> Result<KubeProxyFlags, clap::Error> {
    let command = KubeProxyFlags::augment_args(Command::new("p")).args_override_self(true);
    // `''` is an empty value.
    let args = line.split_whitespace().map(|arg| arg.replace("''", "").into());
    let args = std::iter::once("p".into()).chain(args);
    let matches = command.try_get_matches_from(with_dashes(args))?;
    KubeProxyFlags::from_arg_matches(&matches)
}

fn config(line: &str) -> KubeProxyConfiguration {
    let (config, problems) = parse(line).unwrap().configuration();
    assert_eq!(problems, [], "{line}");
    config
}

fn rows() -> impl Iterator<Item = &'static Row> {
    GROUPS.iter().flat_map(|group| group.rows)
}

#[test]
fn i1_every_flag_of_kube_proxy_is_there() {
    let ours: BTreeSet<_> = rows().map(|row| row.flag).collect();
    assert_eq!(ours, ALL.split_whitespace().collect());
    assert_eq!(ours.len(), rows().count(), "none is there twice");
}

/// The defaults in `--help` are the defaults of the configuration.
#[test]
fn i1_defaults_of_flags_are_those_of_the_configuration() {
    for row in rows().filter(|row| !row.default.is_empty()) {
        let line = format!("--{}={}", row.flag, row.default);
        assert_eq!(config(&line), KubeProxyConfiguration::default(), "{line}");
    }
    assert_eq!(config(""), KubeProxyConfiguration::default());
}

/// Each flag changes the fields that it names, and no others.
#[test]
fn i1_every_flag_sets_its_fields() {
    for row in rows().filter(|row| !row.fields.is_empty()) {
        let values = [
            "7",
            "true",
            "false",
            "7s",
            "a=true",
            "a=7",
            "text",
            "10.0.0.7:7",
        ];
        let default = KubeProxyConfiguration::default();
        let mut changed = values
            .iter()
            .find_map(|value| {
                let flags = parse(&format!("--{}={value}", row.flag)).ok()?;
                let (config, problems) = flags.configuration();
                let changed = kplane_kube_proxy_config::changed_fields(&default, &config);
                (problems.is_empty() && !changed.is_empty()).then_some(changed)
            })
            .unwrap_or_else(|| panic!("--{} does nothing", row.flag));
        // A gate is a field of its own below the map.
        for field in &mut changed {
            if field.starts_with("featureGates.") {
                "featureGates".clone_into(field);
            }
        }
        assert_eq!(changed, row.fields, "--{}", row.flag);
    }
}

#[test]
fn i1_values_are_written_as_for_go_programs() {
    let config_ = config(
        "--masquerade_all --iptables-localhost-nodeports=F --proxy-mode nftables \
         --nodeport-addresses 10.0.0.0/8,fd00::/8 --nodeport_addresses=192.168.0.0/16 \
         --feature-gates A=true,B=false --kube-api-qps 2.5 --vmodule=a=1,b=2 \
         --oom-score-adj -7 --conntrack-tcp-timeout-established=1h30m --oom-score-adj=-8",
    );
    assert!(config_.nftables.masquerade_all && !config_.iptables.localhost_node_ports);
    assert_eq!(
        config_.node_port_addresses,
        ["10.0.0.0/8", "fd00::/8", "192.168.0.0/16"]
    );
    assert_eq!(config_.feature_gates.len(), 2);
    assert_eq!(config_.client_connection.qps, 2.5);
    assert_eq!(config_.logging.vmodule.len(), 2);
    assert_eq!(config_.oom_score_adj, -8, "the last one counts");
    let established = config_.conntrack.tcp_established_timeout;
    assert_eq!(established.to_string(), "1h30m0s");
    assert!(!config("--masquerade-all=false").nftables.masquerade_all);
    // A value of a switch stands behind `=` only.
    assert!(parse("--masquerade-all true").is_err());
}

#[test]
fn i1_levels_of_the_log() {
    for (line, level) in [
        ("", 0),
        ("-v", 4),
        ("-vv", 6),
        ("-v=2", 2),
        ("-v2", 2),
        ("-v 3", 3),
        ("--v=5", 5),
        ("--v 7", 7),
        ("-v --profiling", 4),
    ] {
        assert_eq!(config(line).logging.verbosity, level, "{line}");
    }
    let (_, problems) = parse("--v=x").unwrap().configuration();
    assert_eq!(
        problems[0].to_string(),
        "--v: x: must be a level such as 2, or nothing"
    );
}

#[test]
fn i1_addresses_and_deprecated_ports() {
    let addresses = |line: &str| {
        let config = config(line);
        [config.healthz_bind_address, config.metrics_bind_address]
    };
    for (line, expected) in [
        ("", ["0.0.0.0:10256", "127.0.0.1:10249"]),
        ("--bind-address fd00::1", ["[::]:10256", "[::1]:10249"]),
        (
            "--healthz-bind-address 10.0.0.1 --metrics-bind-address ::",
            ["10.0.0.1:10256", "[::]:10249"],
        ),
        (
            "--healthz-bind-address= --metrics-bind-address ''",
            ["", ""],
        ),
        ("--healthz-port 0 --metrics-port 80", ["", "127.0.0.1:80"]),
        (
            "--healthz-port 81 --healthz-bind-address 10.0.0.1",
            ["10.0.0.1:81", "127.0.0.1:10249"],
        ),
        (
            "--healthz-port 81 --healthz-bind-address 10.0.0.1:82",
            ["10.0.0.1:82", "127.0.0.1:10249"],
        ),
    ] {
        assert_eq!(addresses(line), expected, "{line}");
    }
    let (_, problems) = parse("--healthz-port 65536").unwrap().configuration();
    assert_eq!(problems.len(), 1, "{problems:?}");
}

/// Every problem with a field's value names the flag that set the field.
#[test]
fn i7_fields_lead_back_to_flags() {
    let flags = parse("--nodeport-addresses x --masquerade-all --bind-address y").unwrap();
    assert_eq!(
        flags.of_field("nodePortAddresses[0]"),
        Some("nodeport-addresses")
    );
    assert_eq!(
        flags.of_field("nftables.masqueradeAll"),
        Some("masquerade-all")
    );
    assert_eq!(flags.of_field("oomScoreAdj"), None);
    let (config, _) = flags.configuration();
    for problem in resolve(&config).unwrap_err() {
        assert!(flags.of_field(&problem.place).is_some(), "{problem}");
    }
}
