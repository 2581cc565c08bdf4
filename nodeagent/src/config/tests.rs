//! Tests of the flags.

use super::*;

fn task(line: &str) -> Result<Task, ConfigError> {
    // `''` is an empty value.
    let args = line.split_whitespace().map(|arg| arg.replace("''", ""));
    Flags::try_parse_from(args).unwrap().check()
}

fn config(flags: &str) -> Config {
    match task(&format!("kp-nodeagent --node-name n1 {flags}")).unwrap() {
        Task::Run(config) => *config,
        Task::Cleanup(..) => panic!("a cleanup"),
    }
}

#[test]
fn defaults() {
    let config = config("--control-plane http://a");
    assert_eq!(&*config.node_name, "n1");
    assert_eq!(config.backend, backend::Kind::Nftables);
    assert_eq!(config.backend_settings.masquerade_bit, 14);
    assert_eq!(config.node_settings, NodeSettings::default());
    assert_eq!(config.healthz.unwrap().to_string(), "0.0.0.0:10256");
    assert_eq!(config.metrics.unwrap().to_string(), "127.0.0.1:10249");
    assert!(!config.bind_address_hard_fail);
}

#[test]
fn addresses_of_control_planes() {
    let all = "--control-plane http://a --control-plane b:99 --control-plane http://[fd00::1]:1/";
    let Source::ControlPlane(endpoints) = config(all).source else {
        panic!("another source");
    };
    let uris: Vec<_> = endpoints
        .iter()
        .map(|endpoint| endpoint.uri().to_string())
        .collect();
    assert_eq!(
        uris,
        ["http://a:7443/", "http://b:99/", "http://[fd00::1]:1/"]
    );
}

#[test]
fn a_node_of_its_own() {
    let config = config(
        "--standalone --manifests src --backend noop --cluster-cidr 10.0.0.0/8,fd00::/8 \
         --masquerade-all --masquerade-bit 31 --nodeport-addresses all --healthz-bind-address ''",
    );
    let Source::Standalone { manifests, status } = config.source else {
        panic!("another source");
    };
    assert_eq!(manifests, PathBuf::from("src"));
    assert_eq!(status.unwrap().to_string(), "127.0.0.1:7444");
    assert_eq!(config.node_settings.cluster_cidrs.len(), 2);
    assert_eq!(config.node_settings.nodeport_addresses.len(), 2);
    assert!(config.node_settings.masquerade_all);
    assert_eq!(
        (config.healthz, config.backend),
        (None, backend::Kind::Noop)
    );
}

#[test]
fn cleanup_needs_nothing_else() {
    let task = task("kp-nodeagent --cleanup").unwrap();
    assert!(matches!(task, Task::Cleanup(backend::Kind::Nftables, _)));
}

#[test]
fn node_names_are_trimmed_and_lowered() {
    assert_eq!(
        &*node_name(Some(" Node-1.EU \n".into())).unwrap(),
        "node-1.eu"
    );
    assert!(!node_name(None).unwrap().is_empty(), "the host's");
}

/// Each refusal is one line that names the flag.
#[test]
fn what_makes_no_sense_is_refused_in_one_line() {
    let cases = [
        ("", "no source of desired state"),
        ("--manifests x", "--manifests is for --standalone"),
        ("--standalone", "--standalone needs --manifests"),
        (
            "--standalone --manifests x --control-plane a",
            "leave --control-plane out",
        ),
        (
            "--standalone --manifests /no/such",
            "--manifests \"/no/such\": No such file",
        ),
        (
            "--control-plane a --status-bind-address [::1]:1",
            "--status-bind-address is for",
        ),
        ("--control-plane https://a:1", "TLS is not supported yet"),
        (
            "--control-plane ftp://a:1",
            "--control-plane \"ftp://a:1\": not an address",
        ),
        ("--control-plane http://a:1/x", "not an address such as"),
        (
            "--control-plane a --cluster-cidr 10.0.0.0",
            "--cluster-cidr \"10.0.0.0\": not an",
        ),
        (
            "--control-plane a --nodeport-addresses all,10.0.0.0/8",
            "stands alone",
        ),
        (
            "--control-plane a --nodeport-addresses x",
            "--nodeport-addresses \"x\": not an",
        ),
        (
            "--control-plane a --healthz-bind-address :1",
            "--healthz-bind-address \":1\": not an",
        ),
        (
            "--control-plane a --node-name a_b",
            "--node-name \"a_b\": not a node's name",
        ),
    ];
    for (flags, reason) in cases {
        let error = task(&format!("kp-nodeagent {flags}"))
            .unwrap_err()
            .to_string();
        assert!(error.contains(reason), "{flags}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn values_out_of_range_are_refused() {
    for flags in [
        "--masquerade-bit 32",
        "--backend iptables",
        "--log-format xml",
        "stray",
    ] {
        let args = format!("kp-nodeagent {flags}");
        assert!(
            Flags::try_parse_from(args.split_whitespace()).is_err(),
            "{flags}"
        );
    }
}
