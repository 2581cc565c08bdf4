//! Settings of the kernel that backends need. The agent sets them if it may: in a Pod, it may only read `/proc/sys`.

use std::fs;
use std::path::Path;

use kplane_dataplane::backend::{Kind, NeededSetting, iptables};
use kplane_dataplane::plan::NodeSettings;
use kplane_model::{Family, Reason, Severity};

use super::{Finding, finding};
use crate::sysctl::{self, ConntrackSettings};

/// A setting that is not as the agent needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnsetSetting {
    /// A setting of the backend is 0.
    Off(&'static NeededSetting),
    /// A limit of connection tracking has another value than the configuration says.
    Limit {
        /// The name, as `sysctl` has it.
        key: String,
        /// The kernel's value.
        now: u64,
        /// The configured value.
        wanted: u64,
    },
}

/// The settings that were not as needed at the last look. What differs for the first time, the agent may be about to set.
#[derive(Debug, Default)]
pub(super) struct Unset(Vec<UnsetSetting>);

impl Unset {
    /// Returns the settings that are not as needed for the second time at least. `localhost`: the backend serves node
    /// ports on loopback addresses if it serves them on all; `root` is the root of the file system.
    pub(super) fn look(
        &mut self,
        root: &Path,
        backend: Kind,
        localhost: bool,
        conntrack: &ConntrackSettings,
    ) -> Vec<UnsetSetting> {
        let needed = backend.describe().needs.iter();
        let needed = needed.filter(|needed| localhost || !needed.for_loopback);
        let off = needed.filter(|needed| is_off(root, needed.key));
        let limits = sysctl::compare(root, conntrack).differ.into_iter();
        let now: Vec<_> = off.map(UnsetSetting::Off).chain(limits.filter_map(limit)).collect();
        let before = std::mem::replace(&mut self.0, now.clone());
        now.into_iter().filter(|setting| before.contains(setting)).collect()
    }
}

/// Returns a limit that differs. The size of the hash table does not count: it costs time alone.
fn limit((wanted, now): (sysctl::Wanted, u64)) -> Option<UnsetSetting> {
    let key = wanted.path();
    let key = key.strip_prefix("proc/sys").ok()?;
    Some(UnsetSetting::Limit {
        key: key.display().to_string().replace('/', "."),
        now,
        wanted: wanted.value,
    })
}

fn is_off(root: &Path, key: &str) -> bool {
    let file = root.join("proc/sys").join(key.replace('.', "/"));
    fs::read_to_string(file).is_ok_and(|text| text.trim() == "0")
}

/// Returns what it means that the settings are not as needed.
pub(super) fn findings(unset: &[UnsetSetting], settings: &NodeSettings) -> Vec<Finding> {
    let counts = |needed: &NeededSetting| {
        !needed.for_loopback || {
            let ranges = settings.nodeport_ranges(Family::V4);
            ranges.iter().flatten().any(|range| iptables::meets_loopback(*range))
        }
    };
    let fix = |key: &str, value: u64| {
        format!("sysctl -w {key}={value} on the node, and a file in /etc/sysctl.d so that it stays")
    };
    let meaning = |setting: &UnsetSetting| match setting {
        UnsetSetting::Off(needed) => counts(needed).then(|| {
            let text = format!(
                "{} is 0, and the agent may not change it: {}",
                needed.key, needed.effect
            );
            finding(
                Reason::SettingOff,
                needed.severity,
                text,
                &fix(needed.key, 1),
            )
        }),
        UnsetSetting::Limit { key, now, wanted } => {
            let text = format!(
                "{key} is {now}, not {wanted} as configured: the agent may not change it, or another program did"
            );
            let fix = format!(
                "{}; or 0 for it in conntrack of the agents' configuration",
                fix(key, *wanted)
            );
            Some(finding(Reason::SettingOff, Severity::Warning, text, &fix))
        }
    };
    unset.iter().filter_map(meaning).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Returns what is found at two looks, between which the agent may set the setting.
    fn found(backend: Kind, key: &str, values: [&str; 2], ranges: &[&str]) -> [usize; 2] {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("proc/sys").join(key.replace('.', "/"));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let settings = NodeSettings {
            nodeport_addresses: ranges.iter().map(|range| range.parse().unwrap()).collect(),
            ..NodeSettings::default()
        };
        let mut unset = Unset::default();
        values.map(|value| {
            fs::write(&file, value).unwrap();
            let off = unset.look(root.path(), backend, true, &ConntrackSettings::default());
            findings(&off, &settings).len()
        })
    }

    #[test]
    fn a_setting_that_stays_off_is_found() {
        let key = "net.ipv4.vs.conntrack";
        assert_eq!(found(Kind::Ipvs, key, ["0\n", "0\n"], &[]), [0, 1]);
        assert_eq!(found(Kind::Ipvs, key, ["0\n", "1\n"], &[]), [0, 0]);
        assert_eq!(found(Kind::Nftables, key, ["0\n", "0\n"], &[]), [0, 0]);
    }

    /// F6: in a container, the agent may only read them. The size of the hash table costs time alone.
    #[test]
    fn f6_limits_that_the_agent_may_not_set_are_found() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, value: &str| {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, value).unwrap();
        };
        let established = "proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established";
        write("proc/sys/net/netfilter/nf_conntrack_max", "262144\n");
        write(established, "432000\n");
        write("sys/module/nf_conntrack/parameters/hashsize", "1\n");
        write("sys/devices/system/cpu/online", "0-3\n");
        let conntrack = ConntrackSettings {
            tcp_close_wait_timeout: Duration::ZERO,
            ..ConntrackSettings::default()
        };
        let mut unset = Unset::default();
        let mut look = || {
            let unset = unset.look(root.path(), Kind::Nftables, true, &conntrack);
            Vec::from_iter(findings(&unset, &NodeSettings::default()))
        };
        assert_eq!(look(), [], "the agent may be about to set it");
        let [found] = &look()[..] else {
            panic!("one finding");
        };
        assert_eq!(found.code, Reason::SettingOff);
        let text = "net.netfilter.nf_conntrack_tcp_timeout_established is 432000, not 86400";
        assert!(found.text.contains(text), "{}", found.text);
        assert!(
            found.fix.contains("nf_conntrack_tcp_timeout_established=86400"),
            "{}",
            found.fix
        );
        write(established, "86400\n");
        assert_eq!(look(), []);
    }

    /// A21: only node ports on loopback addresses need it.
    #[test]
    fn packets_from_loopback_addresses_count_if_node_ports_are_served_there() {
        let key = "net.ipv4.conf.all.route_localnet";
        let found = |ranges| found(Kind::Iptables, key, ["0", "0"], ranges);
        assert_eq!(found(&["0.0.0.0/0"]), [0, 1]);
        assert_eq!(found(&["127.0.0.0/8"]), [0, 1]);
        assert_eq!(found(&["192.0.2.0/24"]), [0, 0]);
        assert_eq!(found(&[]), [0, 0]);
    }
}
