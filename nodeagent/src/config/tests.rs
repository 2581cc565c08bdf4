//! Tests of the command line and the file together.

mod file;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use kplane_desired_state::admission::{Enforce, Proxying};
use kplane_desired_state::convert::ExternalIps;
use kplane_desired_state::inside::Origin;
use kplane_desired_state::kubernetes::Access;
use kplane_model::{Cidr, Family};

use super::flags::node_name;
use super::kube_proxy::{Level, with_dashes};
use super::source::ApiFlags;
use super::*;

fn check(line: &str) -> Result<Checked, ConfigError> {
    // `''` is an empty value.
    let args = line.split_whitespace().map(|arg| arg.replace("''", ""));
    let args = with_dashes(args.map(Into::into));
    Flags::try_parse_from(args).unwrap().check()
}

fn task(line: &str) -> Result<Task, ConfigError> {
    check(line).map(|checked| checked.task)
}

fn config(flags: &str) -> Config {
    match task(&format!("kp-nodeagent --node-name n1 {flags}")).unwrap() {
        Task::Run(config) => *config,
        task => panic!("{task:?}"),
    }
}

/// Notes of a level.
fn notes(checked: &Checked, level: Level) -> Vec<&str> {
    checked
        .notes
        .iter()
        .filter(|note| note.level == level)
        .map(|note| &*note.text)
        .collect()
}

#[test]
fn defaults() {
    let config = config("--insecure --control-plane http://a");
    assert_eq!(&*config.node_name, "n1");
    // A port of Pods is theirs, unless hooks are asked for.
    assert_eq!(config.prestop, None);
    assert_eq!(config.backend, backend::Kind::Nftables);
    assert_eq!(config.backend_settings.masquerade_bit, 14);
    assert_eq!(config.node_settings, NodeSettings::default());
    assert_eq!(config.healthz.unwrap().to_string(), "0.0.0.0:10256");
    assert_eq!(config.metrics.unwrap().to_string(), "127.0.0.1:10249");
    assert!(!config.bind_address_hard_fail);
}

#[test]
fn what_is_not_named_is_guarded_and_remembered_by_default() {
    let default = config("--insecure --control-plane a");
    assert_eq!(default.cliff_guard, CliffGuard::default());
    assert_eq!(default.cache_dir, Some("/var/lib/kplane".into()));
    assert_eq!(
        config("--insecure --control-plane a --backend noop").cache_dir,
        None
    );
    let dry_run = config("--insecure --control-plane a --backend noop --cache-dir /c");
    assert_eq!(dry_run.cache_dir, Some("/c".into()));
    let other = config(
        "--insecure --control-plane a --cache-dir= --cliff-guard off --cliff-guard-share 100 \
         --cliff-guard-minimum 0",
    );
    let guard = CliffGuard {
        enabled: false,
        share_percent: 100,
        minimum: 0,
    };
    assert_eq!((other.cache_dir, other.cliff_guard), (None, guard));
    for wrong in [
        "--cliff-guard-share=101",
        "--cliff-guard-minimum=-1",
        "--cliff-guard=all",
    ] {
        let line = ["kp-nodeagent", "--control-plane", "a", wrong];
        assert!(Flags::try_parse_from(line).is_err(), "{wrong}");
    }
}

#[test]
fn addresses_of_control_planes() {
    // Commas separate values as in the environment variable.
    let all = "--insecure --control-plane http://a,b:99 --control-plane http://[fd00::1]:1/";
    let Source::ControlPlane { endpoints, tls, .. } = config(all).source else {
        panic!("another source");
    };
    let uris: Vec<_> = endpoints.iter().map(|endpoint| endpoint.uri().to_string()).collect();
    assert_eq!(
        uris,
        ["http://a:7465/", "http://b:99/", "http://[fd00::1]:1/"]
    );
    assert_eq!(tls, None);
    let secure =
        "--control-plane a --certificate-authority ca --client-certificate c --client-key k";
    let Source::ControlPlane { endpoints, tls, .. } = config(secure).source else {
        panic!("another source");
    };
    assert_eq!(endpoints[0].uri().to_string(), "https://a:7465/");
    assert_eq!(tls.unwrap().pair.unwrap().certificate.to_str(), Some("c"));
    let listed = "--control-plane-file list --tls-server-name kplane --certificate-authority ca --token-file t";
    let Source::ControlPlane {
        endpoints,
        list,
        tls,
        ..
    } = config(listed).source
    else {
        panic!("another source");
    };
    assert_eq!((endpoints.len(), list), (0, Some("list".into())));
    assert!(tls.is_some());
    config("--control-plane http://localhost --control-plane 127.0.0.2:1");
    config("--standalone --manifests src --status-bind-address 0.0.0.0:7466 --insecure");
}

#[test]
fn a_node_of_its_own() {
    let config = config(
        "--standalone --manifests src --backend noop --cluster-cidr 10.0.0.0/8,fd00::/8 \
         --masquerade-all --masquerade-bit 31 --nodeport-addresses all --healthz-bind-address '' \
         --external-ip-cidr 192.0.2.0/24,2001:db8::/32 --reserved-ports 22,192.0.2.1:80 \
         --allow-external-ips 443,192.0.2.1:53 --own-mark 0x70 --network-policy",
    );
    let Source::Standalone {
        origin: Origin::Manifests(manifests),
        status,
        external_ips,
        reserved,
        excepted,
        proxying,
        network_policies,
    } = config.source
    else {
        panic!("another source");
    };
    assert_eq!(manifests, PathBuf::from("src"));
    assert_eq!(status.unwrap().to_string(), "127.0.0.1:7466");
    let ranges = ["192.0.2.0/24", "2001:db8::/32"].map(|range| range.parse().unwrap());
    assert_eq!(external_ips, ExternalIps::Within(ranges.to_vec()));
    let listed = ["22", "192.0.2.1:80"].map(|place| place.parse().unwrap());
    assert_eq!(reserved, listed);
    let listed = ["443", "192.0.2.1:53"].map(|place| place.parse().unwrap());
    assert_eq!(excepted, listed);
    assert_eq!(proxying, Proxying::default());
    assert_eq!(network_policies, Some(Enforce::On));
    assert_eq!(config.backend_settings.own_mark, 0x70);
    assert_eq!(config.node_settings.cluster_cidrs.len(), 2);
    assert_eq!(config.node_settings.nodeport_addresses.len(), 2);
    assert!(config.node_settings.masquerade_all);
    assert_eq!(
        (config.healthz, config.backend),
        (None, backend::Kind::Noop)
    );
}

#[test]
fn all_services_may_ask_for_the_proxy_in_its_own_mode_only() {
    for (flags, services, endpoints) in [
        ("--backend nftables", "none", "pods"),
        ("--backend userspace", "all", "pods"),
        ("--proxy-mode userspace", "all", "pods"),
        ("--backend userspace-loopback", "all", "any"),
        (
            "--backend userspace --userspace-services shop --userspace-endpoints any",
            "shop",
            "any",
        ),
    ] {
        let config = config(&format!("--standalone --manifests src {flags}"));
        let Source::Standalone { proxying, .. } = config.source else {
            panic!("another source");
        };
        let expected = Proxying {
            services: services.parse().unwrap(),
            endpoints: endpoints.parse().unwrap(),
        };
        assert_eq!(proxying, expected, "{flags}");
    }
}

/// A5.
#[test]
fn a5_external_ips_are_allowed_unless_told_otherwise() {
    for (flags, expected) in [
        ("", ExternalIps::All),
        ("--allow-external-ips true", ExternalIps::All),
        ("--allow-external-ips=false", ExternalIps::Nothing),
        (
            "--allow-external-ips=false --external-ip-cidr ::/0",
            ExternalIps::Nothing,
        ),
    ] {
        let config = config(&format!("--standalone --manifests src {flags}"));
        let Source::Standalone { external_ips, .. } = config.source else {
            panic!("another source");
        };
        assert_eq!(external_ips, expected, "{flags}");
    }
}

/// I1, I2: kube-proxy's ways to the API, with its own Node and no other.
#[test]
fn i1_i2_standalone_reads_the_api_as_kube_proxy_does() {
    let kubeconfig = |file: &str, master: Option<&str>| Access::Kubeconfig {
        file: file.into(),
        master: master.map(Into::into),
    };
    let of_kubeadm = kubeconfig("/var/lib/kube-proxy/kubeconfig.conf", None);
    for (flags, expected) in [
        ("", Access::InCluster { master: None }),
        ("--kubeconfig a", kubeconfig("a", None)),
        (
            "--kubeconfig a --master https://b",
            kubeconfig("a", Some("https://b")),
        ),
        (
            "--master b:8080",
            Access::Anonymous {
                master: "b:8080".to_owned(),
            },
        ),
        ("--config KUBEADM", of_kubeadm),
        ("--config KUBEADM --kubeconfig a", kubeconfig("a", None)),
    ] {
        let flags = flags.replace("KUBEADM", file::KUBEADM);
        let config = config(&format!("--standalone --node-name Node-7 {flags}"));
        let Source::Standalone { origin, .. } = config.source else {
            panic!("another source");
        };
        let Origin::Kubernetes(source) = origin else {
            panic!("another source: {origin:?}");
        };
        assert_eq!(source.access, expected, "{flags}");
    }
}

/// The environment supplies an address, but never credentials.
#[test]
fn an_address_of_the_environment_goes_with_any_credentials() {
    let access = |kubeconfig, master| {
        let server = "https://c";
        let api = ApiFlags {
            kubeconfig,
            explicit: false,
            master,
            server,
        };
        api.access()
    };
    let master = Some("https://c".to_owned());
    let in_cluster = Access::InCluster {
        master: master.clone(),
    };
    assert_eq!(access("", ""), in_cluster);
    let file = "a".into();
    assert_eq!(access("a", ""), Access::Kubeconfig { file, master });
    let master = "https://b".to_owned();
    assert_eq!(access("", "https://b"), Access::Anonymous { master });
}

#[test]
fn cleanup_needs_nothing_else() {
    let task = task("kp-nodeagent --cleanup").unwrap();
    let Task::Cleanup(cleanup) = task else {
        panic!("{task:?}");
    };
    assert_eq!(cleanup.backend, backend::Kind::Nftables);
    assert_eq!(cleanup.settings, backend::Settings::default());
    assert!(!cleanup.kube_proxy && !cleanup.dry_run);
    assert_eq!(cleanup.cache_dir, Some("/var/lib/kplane".into()));
}

/// kube-proxy's rules are removed only by the flag that names them.
#[test]
fn i4_cleanup_of_kube_proxys_is_a_flag_of_its_own() {
    let task = task("kp-nodeagent --cleanup-kube-proxy --dry-run --backend ipvs").unwrap();
    let Task::Cleanup(cleanup) = task else {
        panic!("{task:?}");
    };
    assert!(cleanup.kube_proxy && cleanup.dry_run);
    assert_eq!(cleanup.backend, backend::Kind::Ipvs);
}

#[test]
fn node_names_are_trimmed_and_lowered() {
    let name = node_name("place", " Node-1.EU \n").unwrap();
    assert_eq!(&*name, "node-1.eu");
    assert!(!node_name("place", "").unwrap().is_empty(), "the host's");
}

/// Each refusal is one line that names the flag. The values of fields are checked as those of a file (`settings`).
#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn what_makes_no_sense_is_refused_in_one_line() {
    let cases = [
        ("", "no source of desired state"),
        ("--dry-run", "--dry-run is for --cleanup"),
        ("--manifests x", "--manifests is for --standalone"),
        (
            "--standalone --control-plane a",
            "leave --control-plane out",
        ),
        (
            "--standalone --manifests src --kubeconfig x",
            "leave one of them out",
        ),
        (
            "--standalone --manifests x --control-plane a",
            "leave --control-plane out",
        ),
        (
            "--standalone --manifests /no/such",
            "--manifests: /no/such: No such file",
        ),
        (
            "--control-plane localhost --status-bind-address [::1]:1",
            "--status-bind-address is for",
        ),
        (
            "--control-plane localhost --allow-external-ips false",
            "--reserved-ports, --userspace-services and --network-policy are for --standalone",
        ),
        (
            "--standalone --manifests src --external-ip-cidr 192.0.2.1",
            "--external-ip-cidr: 192.0.2.1: not an address range",
        ),
        (
            "--standalone --manifests src --status-bind-address 0.0.0.0:7466",
            "serves other machines in plain text",
        ),
        (
            "--control-plane https://a:1",
            "needs --certificate-authority",
        ),
        (
            "--control-plane http://a:1",
            "plain text to another machine",
        ),
        (
            "--control-plane https://a --control-plane http://b --certificate-authority c",
            "both http:// and https://",
        ),
        (
            "--control-plane http://a --certificate-authority c",
            "for a --control-plane with https://",
        ),
        (
            "--control-plane ftp://a:1",
            "--control-plane: ftp://a:1: must be an address",
        ),
        ("--control-plane http://a:1/x", "must be an address such as"),
        (
            "--control-plane localhost --masquerade-bit 32",
            "--iptables-masquerade-bit: 32: must be from 0 to 31",
        ),
        (
            "--control-plane localhost --proxy-mode kernelspace",
            "--proxy-mode: kernelspace: is for Windows: must be nftables, iptables, ipvs, userspace or empty",
        ),
        (
            "--control-plane localhost --node-name a_b",
            "--hostname-override: a_b: must be a node's name",
        ),
    ];
    for (flags, reason) in cases {
        let error = task(&format!("kp-nodeagent {flags}")).unwrap_err().to_string();
        assert!(error.contains(reason), "{flags}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn everything_that_is_wrong_is_said_at_once() {
    let error = task(
        "kp-nodeagent --iptables-sync-period 5x --oom-score-adj 2000 --node-name a_b \
         --metrics-bind-address foo --feature-gates a --conntrack-min -1",
    )
    .unwrap_err()
    .to_string();
    let places: Vec<_> = error.lines().map(|line| line.split(": ").next()).collect();
    let expected = [
        "--iptables-sync-period",
        "--feature-gates",
        "--metrics-bind-address",
        "--oom-score-adj",
        "--conntrack-min",
    ];
    assert_eq!(places[..5], expected.map(Some), "{error}");
    assert!(error.contains("no source of desired state"), "{error}");
}

/// A21: the addresses on which mode iptables serves node ports; a flag of kplane's overrules the
/// mode.
#[test]
fn i1_the_mode_chooses_the_backend() {
    let everything = Family::ALL.map(Cidr::everything).to_vec();
    for (flags, kind, node_ports) in [
        ("", backend::Kind::Nftables, vec![]),
        ("--proxy-mode nftables", backend::Kind::Nftables, vec![]),
        ("--proxy-mode ipvs", backend::Kind::Ipvs, everything.clone()),
        ("--proxy-mode userspace", backend::Kind::Userspace, vec![]),
        ("--proxy-mode iptables", backend::Kind::Iptables, everything),
        (
            "--proxy-mode iptables --nodeport-addresses primary",
            backend::Kind::Iptables,
            vec![],
        ),
        (
            "--proxy-mode iptables --backend nftables --nodeport-addresses primary",
            backend::Kind::Nftables,
            vec![],
        ),
    ] {
        let config = config(&format!("--control-plane localhost {flags}"));
        assert_eq!(config.backend, kind, "{flags}");
        assert_eq!(
            config.node_settings.nodeport_addresses, node_ports,
            "{flags}"
        );
        let named = flags.contains("addresses primary");
        assert_eq!(config.node_settings.nodeport_primary, named, "{flags}");
    }
    let config = config(
        "--control-plane localhost --iptables-localhost-nodeports=false --iptables-layout compat \
         --iptables-probe-interval 1m30s",
    );
    let settings = config.backend_settings;
    assert!(!settings.localhost_nodeports);
    assert_eq!(settings.iptables_layout, backend::iptables::Layout::Compat);
    assert_eq!(settings.probe_interval, Duration::from_secs(90));
    let config = config_of_ipvs();
    let ipvs = backend::ipvs::IpvsSettings {
        scheduler: kplane_model::IpvsScheduler::parse("wlc").unwrap(),
        exclude_cidrs: vec!["10.1.0.0/16".parse().unwrap()],
        strict_arp: true,
        timeouts: backend::ipvs::Timeouts {
            tcp_s: 90,
            tcp_fin_s: 0,
            udp_s: 7,
        },
        strict_local: true,
        drop_invalid: true,
    };
    assert_eq!(config.backend_settings.ipvs, ipvs);
}

/// D6-D8.
fn config_of_ipvs() -> Config {
    config(
        "--control-plane localhost --proxy-mode ipvs --ipvs-scheduler wlc --ipvs-exclude-cidrs 10.1.0.0/16 \
         --ipvs-strict-arp --ipvs-tcp-timeout 90s --ipvs-udp-timeout 7s --ipvs-strict-local \
         --ipvs-drop-invalid",
    )
}

#[test]
fn flags_that_clap_refuses() {
    for flags in [
        "--backend ebpf",
        "--iptables-layout list",
        "--iptables-probe-interval 0s",
        "stray",
        "--cleanup=perhaps",
        "--config",
    ] {
        let args = format!("kp-nodeagent {flags}");
        assert!(
            Flags::try_parse_from(args.split_whitespace()).is_err(),
            "{flags}"
        );
    }
}

#[test]
fn i5_init_only_needs_nothing_else() {
    let task =
        task("kp-nodeagent --init-only --conntrack-max-per-core=0 --conntrack-udp-timeout 9s");
    let Task::InitOnly { conntrack, .. } = task.unwrap() else {
        panic!("not what was asked");
    };
    assert_eq!(conntrack.max_per_core, 0);
    assert_eq!(conntrack.udp_timeout, Duration::from_secs(9));
}

#[test]
fn i5_c8_init_only_prepares_node_ports_on_loopback_where_they_are_served() {
    let served = |flags: &str| {
        let task = task(&format!("kp-nodeagent --init-only {flags}"));
        let Task::InitOnly { localhost, .. } = task.unwrap() else {
            panic!("not what was asked");
        };
        localhost
    };
    assert!(served("--proxy-mode iptables"));
    assert!(served(
        "--proxy-mode iptables --nodeport-addresses 127.0.0.0/8"
    ));
    assert!(!served(
        "--proxy-mode iptables --nodeport-addresses 192.0.2.0/24"
    ));
    assert!(!served(
        "--proxy-mode iptables --iptables-localhost-nodeports=false"
    ));
    assert!(!served("--proxy-mode nftables --nodeport-addresses all"));
}

#[test]
fn i1_write_config_to_comes_before_everything_else() {
    let task = task("kp-nodeagent --write-config-to /f --cleanup --masquerade-all").unwrap();
    let Task::WriteConfig { path, config } = task else {
        panic!("{task:?}");
    };
    assert_eq!(path, PathBuf::from("/f"));
    assert!(config.iptables.masquerade_all && config.nftables.masquerade_all);
}

/// In kube-proxy's file, 0 for connection tracking means "leave the kernel's value", and an absent value a default.
#[test]
fn i1_zeros_are_written_and_what_a_file_cannot_say_is_told() {
    let written = |flags: &str| {
        let checked = check(&format!("kp-nodeagent --write-config-to /f {flags}")).unwrap();
        let reported = checked.notes.iter().any(|note| note.text.contains("minSyncPeriod"));
        let Task::WriteConfig { config, .. } = checked.task else {
            panic!("not what was asked");
        };
        (
            reported,
            kplane_kube_proxy_config::to_yaml(&config).unwrap(),
        )
    };
    let (reported, yaml) = written(
        "--conntrack-max-per-core=0 --conntrack-min=0 --conntrack-tcp-timeout-established=0 \
         --conntrack-tcp-timeout-close-wait=0s --ipvs-min-sync-period=0",
    );
    for line in [
        "maxPerCore: 0\n",
        "min: 0\n",
        "tcpEstablishedTimeout: 0s\n",
        "tcpCloseWaitTimeout: 0s\n",
    ] {
        assert!(yaml.contains(line), "{line}: {yaml}");
    }
    assert!(!reported, "a file says all of that");
    for flag in [
        "--iptables-min-sync-period=0",
        "--kube-api-qps=0",
        "--healthz-bind-address=",
    ] {
        assert!(written(flag).0, "{flag}");
    }
}

/// The same command line as kube-proxy's, without a mode: kube-proxy takes another one than kplane.
#[test]
fn i7_flags_of_kube_proxy_without_a_mode_are_warned_about_as_a_file_is() {
    let warned = |flags: &str| {
        let line = format!("kp-nodeagent --control-plane localhost --insecure {flags}");
        let checked = check(&line).unwrap();
        checked.notes.iter().any(|note| note.text.contains("No longer served: "))
    };
    assert!(warned("--cluster-cidr 10.0.0.0/8"));
    assert!(!warned("--cluster-cidr 10.0.0.0/8 --proxy-mode nftables"));
    assert!(!warned(
        "--cluster-cidr 10.0.0.0/8 --nodeport-addresses 192.0.2.0/24"
    ));
    assert!(!warned("--cluster-cidr 10.0.0.0/8 --backend nftables"));
    assert!(
        !warned("--hostname-override n1"),
        "never a command line of kube-proxy"
    );
}

#[test]
fn i1_help_is_in_groups_and_hides_what_has_no_use_here() {
    let help = |flag| {
        let error = Flags::try_parse_from(["kp-nodeagent", flag]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DisplayHelp);
        error.to_string()
    };
    let (long, short) = (help("--help"), help("-h"));
    for heading in [
        "Configuration file:",
        "Instead of serving:",
        "The node:",
        "Rules:",
        "Distinguishing pods from other clients:",
        "Health checks and metrics:",
        "Connection tracking:",
        "Logging:",
    ] {
        assert!(
            long.contains(heading) && short.contains(heading),
            "{heading}"
        );
    }
    let command = Flags::command();
    let without = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set())
        .filter(|arg| arg.get_help_heading().is_none());
    assert_eq!(
        Vec::from_iter(without.map(clap::Arg::get_id)),
        Vec::<&clap::Id>::new()
    );
    assert!(long.contains("--ipvs-min-sync-period") && !short.contains("--ipvs-min-sync-period"));
    for hidden in ["--healthz-port", "--source-vip", "--windows-service"] {
        assert!(!long.contains(hidden), "{hidden}");
    }
}
