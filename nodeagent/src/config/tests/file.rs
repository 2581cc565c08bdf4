//! Tests of the command line with a file (I2).

use std::io::Write;

use tempfile::NamedTempFile;

use super::*;

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

pub(super) const KUBEADM: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/kube-proxy-config/tests/data/kubeadm.conf"
);

fn file(fields: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    write!(file, "{HEAD}{fields}").unwrap();
    file
}

fn checked(file: &NamedTempFile, flags: &str) -> Result<Checked, ConfigError> {
    let path = file.path().display();
    check(&format!(
        "kp-nodeagent --control-plane localhost --config {path} {flags}"
    ))
}

fn config_of(checked: Checked) -> Config {
    match checked.task {
        Task::Run(config) => *config,
        task => panic!("{task:?}"),
    }
}

/// The command line of kubeadm's DaemonSet, with a control plane from elsewhere.
#[test]
fn i1_i2_the_command_line_of_kubeadm_works_unchanged() {
    let line = format!(
        "kp-nodeagent --control-plane localhost --config={KUBEADM} --hostname-override=Node-7 --v=2"
    );
    let checked = check(&line).unwrap();
    assert_eq!(checked.log.verbosity, 2);
    let mode = "mode is not set: kplane uses nftables";
    let infos = notes(&checked, Level::Info);
    assert!(infos.iter().any(|note| note.starts_with(mode)), "{infos:?}");
    assert!(
        infos.iter().any(|note| note.starts_with("clientConnection.kubeconfig")),
        "{infos:?}"
    );
    let config = config_of(checked);
    assert!(config.mode_unset, "K21");
    assert_eq!(&*config.node_name, "node-7");
    assert_eq!(config.node_settings.cluster_cidrs.len(), 1);
    assert_eq!(config.healthz.unwrap().to_string(), "0.0.0.0:10256");
    assert_eq!(config.metrics.unwrap().to_string(), "127.0.0.1:10249");
    assert_eq!(config.oom_score_adj, -999);
    assert_eq!(config.sync_period, Duration::from_secs(30));
    assert_eq!(config.conntrack, sysctl::ConntrackSettings::default());
}

#[test]
fn i2_beside_a_file_only_the_name_and_logging_count_and_the_rest_is_named() {
    let file =
        file("mode: nftables\nhostnameOverride: of-file\nlogging: {verbosity: 1, format: json}\n");
    let flags = "--masquerade_all --oom-score-adj=5 --node-name N2 --log-format text -vv \
                 --healthz-bind-address=";
    let checked = checked(&file, flags).unwrap();
    assert_eq!(
        checked.log,
        LogSettings {
            json: false,
            verbosity: 6
        }
    );
    let ignored = format!(
        "ignored, since the configuration comes from {}: --oom-score-adj --masquerade-all \
         --healthz-bind-address",
        file.path().display()
    );
    assert!(
        notes(&checked, Level::Warning).contains(&&*ignored),
        "{:?}",
        checked.notes
    );
    let config = config_of(checked);
    assert_eq!(&*config.node_name, "n2");
    assert!(!config.node_settings.masquerade_all && config.healthz.is_some());
    assert_eq!(config.oom_score_adj, -999);
}

#[test]
fn i2_without_flags_the_file_counts() {
    let file = file("hostnameOverride: Of-File\nlogging: {verbosity: 4, format: json}\n");
    let checked = checked(&file, "--hostname-override=").unwrap();
    assert_eq!(
        checked.log,
        LogSettings {
            json: true,
            verbosity: 4
        }
    );
    assert_eq!(&*config_of(checked).node_name, "of-file");
}

#[test]
fn i2_a_lenient_file_is_one_warning() {
    let file = file("mode: nftables\nmodus: x\nmode: nftables\nclusterCIDR: 10.0.0.0/8\n");
    let checked = checked(&file, "").unwrap();
    let warnings = notes(&checked, Level::Warning);
    let lenient: Vec<_> = warnings.iter().filter(|w| w.contains("leniently")).collect();
    assert_eq!(lenient.len(), 1, "{warnings:?}");
    let path = file.path().display().to_string();
    for part in [&*path, "line 5", "unknown field ignored: modus"] {
        assert!(lenient[0].contains(part), "{lenient:?}");
    }
}

/// Each line stands alone: file, field, value, and what is accepted.
#[test]
fn i7_everything_that_is_wrong_with_a_file_is_named_at_once() {
    let file = file(
        "mode: nftables\nnftables: {syncPeriod: -1s, masqueradeBit: x}\nhostnameOverride: a_b\n",
    );
    let error = checked(&file, "--logging-format xml").unwrap_err().to_string();
    let path = file.path().display();
    assert_eq!(
        error.lines().collect::<Vec<_>>(),
        [
            format!(
                "{path}: nftables.masqueradeBit: \"x\": must be a whole number from -2147483648 to \
                 2147483647"
            ),
            "--logging-format: xml: must be text or json".to_owned(),
            format!("{path}: nftables.syncPeriod: -1s: must be greater than 0"),
        ]
    );
    let file = self::file("hostnameOverride: a_b\n");
    let error = checked(&file, "").unwrap_err().to_string();
    let path = file.path().display();
    assert!(error.starts_with(&format!(
        "{path}: hostnameOverride: a_b: must be a node's name"
    )));
}

#[test]
fn i1_a_file_goes_with_our_own_flags() {
    let file = file("mode: nftables\n");
    let path = file.path().display();
    let line = format!("kp-nodeagent --standalone --manifests src --config {path} --backend noop");
    let config = config_of(check(&line).unwrap());
    assert!(matches!(config.source, Source::Standalone { .. }));
    assert_eq!(config.backend, backend::Kind::Noop);
    assert_eq!(config.file.unwrap().path(), file.path());
    let error = check(&format!("kp-nodeagent --config {path}")).unwrap_err();
    assert!(
        error.to_string().starts_with("no source of desired state"),
        "{error}"
    );
}

#[test]
fn i4_cleanup_takes_the_settings_of_the_file() {
    let file = file("mode: nftables\nnftables: {masqueradeBit: 7}\n");
    let task = checked(&file, "--cleanup").unwrap().task;
    let Task::Cleanup(cleanup) = task else {
        panic!("{task:?}");
    };
    assert_eq!(cleanup.settings.masquerade_bit, 7);
}
