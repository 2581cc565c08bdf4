//! F6: the values, and a file system that contains them.

use super::*;

const SYSCTLS: [(&str, &str); 6] = [
    ("nf_conntrack_max", "65536"),
    ("nf_conntrack_tcp_timeout_established", "432000"),
    ("nf_conntrack_tcp_timeout_close_wait", "60"),
    ("nf_conntrack_tcp_be_liberal", "0"),
    ("nf_conntrack_udp_timeout", "30"),
    ("nf_conntrack_udp_timeout_stream", "120"),
];

/// A kernel's files as a fresh machine has them.
fn kernel() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for folder in [
        NETFILTER,
        "sys/module/nf_conntrack/parameters",
        "sys/devices/system/cpu",
    ] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    for (name, value) in SYSCTLS {
        fs::write(root.path().join(NETFILTER).join(name), format!("{value}\n")).unwrap();
    }
    fs::write(root.path().join(HASHSIZE), "16384\n").unwrap();
    root
}

fn read(root: &Path, name: &str) -> u64 {
    let text = fs::read_to_string(root.join(NETFILTER).join(name)).unwrap();
    text.trim().parse().unwrap()
}

fn hashsize(root: &Path) -> u64 {
    fs::read_to_string(root.join(HASHSIZE)).unwrap().trim().parse().unwrap()
}

#[test]
fn f6_sizes_follow_the_processors_between_bounds() {
    let max = |max_per_core, min, cores| {
        let settings = ConntrackSettings {
            max_per_core,
            min,
            ..ConntrackSettings::default()
        };
        settings.max_entries(cores)
    };
    assert_eq!(max(32_768, 131_072, 2), 131_072);
    assert_eq!(max(32_768, 131_072, 8), 262_144);
    assert_eq!(max(32_768, 131_072, 512), 1_048_576);
    assert_eq!(max(u32::MAX, u32::MAX, usize::MAX), 1_048_576);
    assert_eq!(max(0, 131_072, 8), 0, "left alone");
}

#[test]
fn f6_defaults_on_a_fresh_machine() {
    let machine = kernel();
    let root = machine.path();
    let outcome = apply(root, &ConntrackSettings::default(), 8);
    assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
    assert_eq!(outcome.written.len(), 4);
    assert_eq!((read(root, MAX), hashsize(root)), (262_144, 65_536));
    assert_eq!(read(root, "nf_conntrack_tcp_timeout_established"), 86_400);
    assert_eq!(read(root, "nf_conntrack_tcp_timeout_close_wait"), 3_600);
    for (name, value) in &SYSCTLS[3..] {
        assert_eq!(read(root, name).to_string(), *value, "{name} is left alone");
    }
    let again = apply(root, &ConntrackSettings::default(), 8);
    assert!(again.written.is_empty() && again.errors.is_empty());
}

#[test]
fn f6_sizes_are_never_lowered_and_nothing_is_set_to_zero() {
    let machine = kernel();
    let root = machine.path();
    fs::write(root.join(NETFILTER).join(MAX), "2000000").unwrap();
    fs::write(root.join(HASHSIZE), "500000").unwrap();
    let settings = ConntrackSettings {
        tcp_established_timeout: Duration::ZERO,
        tcp_close_wait_timeout: Duration::from_millis(999),
        ..ConntrackSettings::default()
    };
    let outcome = apply(root, &settings, 8);
    assert!(outcome.written.is_empty(), "{:?}", outcome.written);
    assert_eq!((read(root, MAX), hashsize(root)), (2_000_000, 500_000));
}

#[test]
fn f6_everything_can_be_asked_for() {
    let machine = kernel();
    let root = machine.path();
    let settings = ConntrackSettings {
        max_per_core: 0,
        min: 131_072,
        tcp_established_timeout: Duration::from_secs(10),
        tcp_close_wait_timeout: Duration::from_secs(11),
        tcp_be_liberal: true,
        udp_timeout: Duration::from_secs(12),
        udp_stream_timeout: Duration::from_secs(13),
    };
    let outcome = apply(root, &settings, 8);
    assert!(outcome.errors.is_empty());
    let values = SYSCTLS.map(|(name, _)| read(root, name));
    assert_eq!(values, [65_536, 10, 11, 1, 12, 13]);
    assert_eq!(hashsize(root), 16_384);
}

/// An error with one file does not keep others from being set, and each error names the remedy.
#[test]
fn f6_failures_are_told_and_stop_nothing() {
    let machine = kernel();
    let root = machine.path();
    let file = |name: &str| root.join(NETFILTER).join(name);
    fs::remove_file(root.join(HASHSIZE)).unwrap();
    fs::write(
        file("nf_conntrack_tcp_timeout_established"),
        "x".repeat(10_000),
    )
    .unwrap();
    let outcome = apply(root, &ConntrackSettings::default(), 8);
    let texts: Vec<_> = outcome.errors.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert!(texts[0].contains("hashsize") && texts[0].contains("nf_conntrack loaded"));
    assert!(texts[1].contains("not a number") && texts[1].len() < 200);
    assert_eq!(read(root, "nf_conntrack_tcp_timeout_close_wait"), 3_600);
    for (kind, path, words) in [
        (
            ErrorKind::ReadOnlyFilesystem,
            HASHSIZE,
            "mount /sys writable",
        ),
        (
            ErrorKind::ReadOnlyFilesystem,
            NETFILTER,
            "mount /proc/sys writable",
        ),
        (ErrorKind::PermissionDenied, HASHSIZE, "host's network"),
        (ErrorKind::PermissionDenied, NETFILTER, "run privileged"),
    ] {
        let text = what_to_do(Path::new(path), &kind.into());
        assert!(text.contains(words), "{text}");
    }
}

/// The quota of a container is not the machine's size.
#[test]
fn processors_are_the_machines() {
    let root = kernel();
    fs::write(root.path().join(CORES), "0-3,6,8-9\n").unwrap();
    assert_eq!(cores(root.path()), 7);
    for text in ["", "x", "3-1", "0-", "1,,2", "0-18446744073709551615"] {
        assert_eq!(count_list(text), None, "{text:?}");
    }
    fs::remove_file(root.path().join(CORES)).unwrap();
    assert!(cores(root.path()) >= 1);
}
