//! Settings of the kernel that backends need. The agent sets them if it may: in a Pod, it may only read `/proc/sys`.

use std::fs;
use std::path::Path;

use kplane_dataplane::backend::{Kind, NeededSetting, iptables};
use kplane_dataplane::plan::NodeSettings;
use kplane_model::{Family, Reason};

use super::{Finding, finding};

/// The settings that were 0 at the last look. What is 0 for the first time, the agent may be about to set.
#[derive(Debug, Default)]
pub(super) struct Unset(Vec<&'static NeededSetting>);

impl Unset {
    /// Returns the settings of a backend that are 0 for the second time at least. `localhost`: it serves node ports on
    /// loopback addresses if it serves them on all; `root` is the root of the file system.
    pub(super) fn look(
        &mut self,
        root: &Path,
        backend: Kind,
        localhost: bool,
    ) -> Vec<&'static NeededSetting> {
        let needed = backend.describe().needs.iter();
        let needed = needed.filter(|needed| localhost || !needed.for_loopback);
        let now: Vec<_> = needed.filter(|needed| is_off(root, needed.key)).collect();
        let before = std::mem::replace(&mut self.0, now.clone());
        let stays = |needed: &&&NeededSetting| before.contains(*needed);
        now.iter().filter(stays).copied().collect()
    }
}

fn is_off(root: &Path, key: &str) -> bool {
    let file = root.join("proc/sys").join(key.replace('.', "/"));
    fs::read_to_string(file).is_ok_and(|text| text.trim() == "0")
}

/// Returns what the settings mean that are 0.
pub(super) fn findings<'a>(
    unset: &'a [&'static NeededSetting],
    settings: &'a NodeSettings,
) -> impl Iterator<Item = Finding> + 'a {
    let counts = |needed: &&&NeededSetting| {
        !needed.for_loopback || {
            let ranges = settings.nodeport_ranges(Family::V4);
            let mut ranges = ranges.iter().flatten();
            ranges.any(|range| iptables::meets_loopback(*range))
        }
    };
    unset.iter().filter(counts).map(|needed| {
        let text = format!(
            "{} is 0, and the agent may not change it: {}",
            needed.key, needed.effect
        );
        let fix = format!(
            "sysctl -w {}=1 on the node, and a file in /etc/sysctl.d so that it stays",
            needed.key
        );
        finding(Reason::SettingOff, needed.severity, text, &fix)
    })
}

#[cfg(test)]
mod tests {
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
            let off = unset.look(root.path(), backend, true);
            findings(&off, &settings).count()
        })
    }

    #[test]
    fn a_setting_that_stays_off_is_found() {
        let key = "net.ipv4.vs.conntrack";
        assert_eq!(found(Kind::Ipvs, key, ["0\n", "0\n"], &[]), [0, 1]);
        assert_eq!(found(Kind::Ipvs, key, ["0\n", "1\n"], &[]), [0, 0]);
        assert_eq!(found(Kind::Nftables, key, ["0\n", "0\n"], &[]), [0, 0]);
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
