//! Tests of reading (I2).

use std::io::Write;

use proptest::prelude::*;

use super::*;

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

const KUBEADM: &str = include_str!("../../tests/data/kubeadm.conf");

fn read(fields: &str) -> Document {
    document(&format!("{HEAD}{fields}")).unwrap()
}

/// Returns the problems of a text, one line each.
fn problems(text: &str) -> Vec<String> {
    let problems = match document(text) {
        Ok(document) => document.problems,
        Err(problems) => problems,
    };
    problems.iter().map(ToString::to_string).collect()
}

#[test]
fn i2_a_file_of_kubeadm_is_strictly_valid_and_means_the_defaults() {
    let document = document(KUBEADM).unwrap();
    assert_eq!((&document.warning, &*document.problems), (&None, &[][..]));
    let mut expected = KubeProxyConfiguration {
        cluster_cidr: "10.244.0.0/16".to_owned(),
        ..KubeProxyConfiguration::default()
    };
    "/var/lib/kube-proxy/kubeconfig.conf".clone_into(&mut expected.client_connection.kubeconfig);
    assert_eq!(document.config, expected);
}

#[test]
fn i2_an_empty_configuration_has_the_defaults_of_kube_proxy() {
    let config = read("").config;
    assert_eq!(config, KubeProxyConfiguration::default());
    assert_eq!(
        (&*config.bind_address, &*config.healthz_bind_address),
        ("0.0.0.0", "0.0.0.0:10256")
    );
    assert_eq!(config.metrics_bind_address, "127.0.0.1:10249");
    assert_eq!(config.node_port_addresses, ["primary"]);
    assert_eq!(config.detect_local_mode, "ClusterCIDR");
    assert_eq!(config.oom_score_adj, -999);
    assert_eq!(config.iptables.masquerade_bit, 14);
    assert!(config.iptables.localhost_node_ports);
    assert_eq!(
        (config.conntrack.max_per_core, config.conntrack.min),
        (32_768, 131_072)
    );
    let periods = [
        (config.nftables.sync_period, "30s"),
        (config.nftables.min_sync_period, "1s"),
        (config.iptables.sync_period, "30s"),
        (config.iptables.min_sync_period, "1s"),
        (config.ipvs.sync_period, "30s"),
        (config.ipvs.min_sync_period, "0s"),
        (config.config_sync_period, "15m0s"),
        (config.conntrack.tcp_established_timeout, "24h0m0s"),
        (config.conntrack.tcp_close_wait_timeout, "1h0m0s"),
        (config.conntrack.udp_timeout, "0s"),
        (config.conntrack.udp_stream_timeout, "0s"),
        (config.logging.flush_frequency, "5s"),
    ];
    for (period, expected) in periods {
        assert_eq!(period.to_string(), expected);
    }
    let client = config.client_connection;
    assert_eq!((client.qps, client.burst), (5.0, 10));
    assert_eq!(client.content_type, "application/vnd.kubernetes.protobuf");
}

#[test]
fn i2_an_ipv6_bind_address_flips_the_default_addresses() {
    let config = read("bindAddress: '::'\n").config;
    assert_eq!(config.healthz_bind_address, "[::]:10256");
    assert_eq!(config.metrics_bind_address, "[::1]:10249");
    let config = read("bindAddress: fd00::7\nhealthzBindAddress: 10.0.0.1\n").config;
    assert_eq!(config.healthz_bind_address, "10.0.0.1:10256");
    assert_eq!(config.metrics_bind_address, "[::1]:10249");
}

/// Zeros that mean zero, and zeros that mean the default.
#[test]
fn i2_zeros_are_what_they_are_in_kube_proxy() {
    let config = read(
        "conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}\n\
         oomScoreAdj: 0\nnftables: {masqueradeBit: 0, syncPeriod: 0s}\n\
         iptables: {localhostNodePorts: false}\nclientConnection: {qps: 0}\n",
    )
    .config;
    assert_eq!(
        (config.conntrack.max_per_core, config.conntrack.min),
        (0, 0)
    );
    assert_eq!(config.conntrack.tcp_established_timeout.to_string(), "0s");
    assert_eq!(config.conntrack.tcp_close_wait_timeout.to_string(), "0s");
    assert_eq!(
        (config.oom_score_adj, config.nftables.masquerade_bit),
        (0, 0)
    );
    assert_eq!(config.nftables.sync_period.to_string(), "30s");
    assert!(!config.iptables.localhost_node_ports);
    assert_eq!(config.client_connection.qps, 5.0);
}

/// kube-proxy reads the first document, and says nothing of others.
#[test]
fn i2_of_several_documents_the_first_counts() {
    let kind = "kind: KubeProxyConfiguration\napiVersion: kubeproxy.config.k8s.io/v1alpha1\n";
    for (text, has_more) in [
        (format!("{kind}mode: ipvs\n"), false),
        (format!("---\n{kind}mode: ipvs\n---\n"), false),
        (format!("{kind}mode: ipvs\n---\n# nothing\n"), false),
        (
            format!("{kind}mode: ipvs\n---\n{kind}mode: nftables\n"),
            true,
        ),
        (format!("{kind}mode: ipvs\n---\n}} no YAML\n"), true),
    ] {
        let read = document(&text).unwrap();
        assert_eq!(read.config.mode, "ipvs");
        let warning = read.warning.unwrap_or_default();
        assert_eq!(
            warning.contains("several YAML documents"),
            has_more,
            "{text}"
        );
    }
}

#[test]
fn i2_json_is_read_too() {
    let text = r#"{"kind": "KubeProxyConfiguration", "mode": "nftables",
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "oomScoreAdj": null,
        "nodePortAddresses": ["10.0.0.0/8"], "conntrack": {"udpTimeout": "1m30s"}}"#;
    let config = document(text).unwrap().config;
    assert_eq!(config.mode, "nftables");
    assert_eq!(config.node_port_addresses, ["10.0.0.0/8"]);
    assert_eq!(config.conntrack.udp_timeout.to_string(), "1m30s");
}

#[test]
fn i2_unknown_fields_are_named_with_their_path_and_ignored() {
    let document = read(
        "mode: nftables\nclusterCidr: x\nnftables: {masqeradeAll: true, syncPeriod: 7s}\n\
         logging: {vmodule: [{filePattern: a, level: 1}]}\nfeatureGates: {Anything: true}\n",
    );
    assert_eq!(
        document.warning.unwrap(),
        "unknown fields ignored: clusterCidr (did you mean clusterCIDR?), \
         logging.vmodule[0].level, nftables.masqeradeAll"
    );
    assert_eq!(document.config.nftables.sync_period.to_string(), "7s");
    assert!(document.config.feature_gates["Anything"]);
    let many: String = (0..50).map(|i| format!("x{i}: 1\n")).collect();
    let warning = read(&many).warning.unwrap();
    assert!(warning.ends_with(" and 30 more"), "{warning}");
}

#[test]
fn i2_of_a_field_that_is_said_twice_the_last_counts() {
    let document = read("mode: iptables\nmode: nftables\n");
    assert_eq!(document.config.mode, "nftables");
    let warning = document.warning.unwrap();
    assert!(
        warning.starts_with("line 4: ") && warning.contains("mode"),
        "{warning}"
    );
}

#[test]
fn i2_a_value_of_the_wrong_type_is_an_error_with_its_path() {
    let text = format!(
        "{HEAD}oomScoreAdj: '5'\nnftables: {{syncPeriod: 5, masqueradeBit: 1.5}}\n\
         nodePortAddresses: [10.0.0.0/8, 7]\nconntrack: [1]\nmode: 5\nlogging: {{verbosity: -1}}\n\
         iptables: {{syncPeriod: 5x, masqueradeBit: 99999999999, masqueradeAll: 1}}\n\
         clientConnection: {{qps: fast}}\nportRange: {{}}\nipvs: text\n"
    );
    let i32 = "must be a whole number from -2147483648 to 2147483647";
    let duration = "must be a duration such as 30s, 1m30s or 24h0m0s";
    let mut expected = [
        "clientConnection.qps: \"fast\": must be a number".to_owned(),
        "conntrack: must be a mapping, not a list".to_owned(),
        "iptables.masqueradeAll: 1: must be true or false".to_owned(),
        format!("iptables.masqueradeBit: 99999999999: {i32}"),
        format!("iptables.syncPeriod: \"5x\": {duration}"),
        "ipvs: \"text\": must be a mapping".to_owned(),
        "logging.verbosity: -1: must be a whole number from 0 to 4294967295".to_owned(),
        "mode: 5: must be text (in quotes)".to_owned(),
        format!("nftables.masqueradeBit: 1.5: {i32}"),
        format!("nftables.syncPeriod: 5: {duration}"),
        "nodePortAddresses[1]: 7: must be text (in quotes)".to_owned(),
        format!("oomScoreAdj: \"5\": {i32}"),
        "portRange: a mapping: must be text (in quotes)".to_owned(),
    ];
    let mut found = problems(&text);
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

#[test]
fn i2_another_kind_or_version_is_an_error() {
    assert_eq!(
        problems("kind: Service\napiVersion: v1\n"),
        [
            "apiVersion: v1: must be kubeproxy.config.k8s.io/v1alpha1",
            "kind: Service: must be KubeProxyConfiguration"
        ]
    );
    assert_eq!(
        problems("mode: nftables\n"),
        [
            "apiVersion: is missing: must be kubeproxy.config.k8s.io/v1alpha1",
            "kind: is missing: must be KubeProxyConfiguration"
        ]
    );
}

#[test]
fn text_that_is_no_configuration() {
    for (text, expected) in [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("[1]", "must be a mapping of fields"),
        ("text", "must be a mapping of fields"),
        ("a: [", "line 1: unclosed bracket '['"),
    ] {
        let found = problems(text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with(expected), "{text:?}: {found:?}");
    }
}

#[test]
fn hostile_text_is_bounded() {
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for i in 1..20 {
        let aliases = vec![format!("*a{}", i - 1); 10].join(", ");
        bomb += &format!("a{i}: &a{i} [{aliases}]\n");
    }
    let deep = format!("{HEAD}a: {}", "[".repeat(100_000));
    let deep_json = format!("{{\"a\": {}", "{\"a\": ".repeat(100_000));
    let wide: String = (0..200_000).map(|i| format!("k{i}: 1\n")).collect();
    for text in [bomb, deep, deep_json, wide] {
        assert_eq!(problems(&text).len(), 1, "{:?}", problems(&text));
    }
    let names = format!("{HEAD}? \"a\\nb\\e[31m{}\"\n: 1\n", "x".repeat(1000));
    let warning = document(&names).unwrap().warning.unwrap();
    assert!(
        warning.len() < 200 && !warning.contains(['\n', '\u{1b}']),
        "{warning}"
    );
}

#[test]
fn what_a_file_says_stays_on_the_line_of_the_error() {
    let twice = format!("{HEAD}\"a\\n\\e[31m\": 1\n\"a\\n\\e[31m\": 2\n");
    let gate = format!("{HEAD}featureGates: {{\"a\\n\\e[31m\": 7}}\nmode: \"\\n\\e\"\n");
    let mut said: Vec<_> = document(&twice).unwrap().warning.into_iter().collect();
    said.extend(problems(&gate));
    assert_eq!(said.len(), 2, "{said:?}");
    for line in said {
        assert!(!line.contains(['\n', '\u{1b}']), "{line:?}");
    }
}

#[test]
fn files_that_are_not_read() {
    let folder = tempfile::TempDir::new().unwrap();
    let refused = |path: &Path| text_of(path).unwrap_err().to_string();
    assert_eq!(refused(folder.path()), "is not a regular file");
    assert_eq!(refused(Path::new("/dev/zero")), "is not a regular file");
    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(refused(&pipe), "is not a regular file");
    let missing = refused(&folder.path().join("missing"));
    assert!(
        missing.starts_with("cannot be read: No such file"),
        "{missing}"
    );
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"a: \xff\n").unwrap();
    assert_eq!(refused(file.path()), "is not UTF-8 text");
    let large = tempfile::NamedTempFile::new().unwrap();
    large.as_file().set_len(1 << 40).unwrap();
    let large = refused(large.path());
    assert!(large.starts_with("is larger than 1048576 bytes"), "{large}");
}

/// A field that exists, with a value that may be anything.
fn line() -> impl Strategy<Value = String> {
    let fields = [
        "mode",
        "clusterCIDR",
        "nodePortAddresses",
        "conntrack",
        "nftables",
        "logging",
        "kind",
        "featureGates",
        "bindAddress",
        "oomScoreAdj",
        "detectLocal",
        "unknown",
    ];
    let values = [
        "x",
        "-1",
        "1.5",
        "true",
        "null",
        "[a, 1]",
        "{syncPeriod: 1h, min: [1]}",
        "5s",
        "''",
        "{vmodule: [{verbosity: x}, 1, [2]]}",
        "10.0.0.0/8",
        "&a [*a]",
        "!!int x",
        "|",
        "{",
        "- ",
        "{options: {text: {infoBufferSize: 7, splitStream: 1}}, flushFrequency: [1]}",
    ];
    let known = (
        proptest::sample::select(fields.to_vec()),
        proptest::sample::select(values.to_vec()),
    );
    prop_oneof![
        8 => known.prop_map(|(field, value)| format!("{field}: {value}\n")),
        1 => "\\PC{0,40}\n",
    ]
}

proptest! {
    /// Any file yields a result, and each error is a single line.
    #[test]
    fn i2_no_text_is_a_surprise(lines in prop::collection::vec(line(), 0..8)) {
        let problems = match document(&format!("{HEAD}{}", lines.concat())) {
            Ok(document) => document.problems,
            Err(problems) => {
                prop_assert!(!problems.is_empty());
                problems
            }
        };
        for problem in problems {
            let line = problem.to_string();
            prop_assert!(!line.contains(['\n', '\u{1b}']) && line.len() < 500, "{line:?}");
        }
    }
}
