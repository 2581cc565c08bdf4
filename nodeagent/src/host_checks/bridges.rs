//! Bridges whose packets pass the rules by.

use std::fs;
use std::path::Path;

use kplane_model::{Family, Reason, Severity};

use super::{Finding, HostFacts};

/// Returns whether the node has bridges.
pub(super) fn exist(root: &Path) -> bool {
    fs::read_dir(root.join("sys/class/net"))
        .into_iter()
        .flatten()
        .flatten()
        .any(|link| link.path().join("bridge").is_dir())
}

/// Returns a finding for a node whose bridges pass the rules of Services by.
pub(super) fn passed_by(seen: &HostFacts, family: Family) -> Option<Finding> {
    let key = bridge_setting(family);
    seen.bridges_pass_by[family as usize].then(|| {
        let text = format!(
            "{key} is 0, and the node has bridges: if Pods are on a bridge, answers of an endpoint on the same bridge \
             come back from a wrong address"
        );
        let fix = format!("sysctl -w {key}=1 on the node, unless the CNI plugin does without");
        super::finding(Reason::BridgeNetfilterOff, Severity::Warning, text, &fix)
    })
}

/// Returns what keeps NetworkPolicies from holding on a node that has some.
pub fn unenforced(seen: &HostFacts) -> Option<Finding> {
    let mut passing =
        Family::ALL.into_iter().filter(|family| seen.bridges_pass_by[*family as usize]);
    let (key, whose) = match passing.next() {
        Some(family) => (bridge_setting(family), ""),
        None if seen.tagged_pass_by => (
            "net.bridge.bridge-nf-filter-vlan-tagged",
            " for frames with a VLAN tag, which Pods take with tag 0",
        ),
        None => return None,
    };
    let text = format!(
        "{key} is 0, and the node has bridges: NetworkPolicies do not hold between Pods on one bridge{whose}"
    );
    let fix =
        format!("sysctl -w {key}=1 on the node, and a file in /etc/sysctl.d so that it stays");
    Some(super::finding(
        Reason::BridgeNetfilterOff,
        Severity::Error,
        text,
        &fix,
    ))
}

fn bridge_setting(family: Family) -> &'static str {
    match family {
        Family::V4 => "net.bridge.bridge-nf-call-iptables",
        Family::V6 => "net.bridge.bridge-nf-call-ip6tables",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who may send raw frames reaches every Pod on its bridge with a tag that means none.
    #[test]
    fn settings_that_keep_policies_from_holding_are_named_one_after_the_other() {
        let mut seen = HostFacts {
            bridges_pass_by: [false, true],
            tagged_pass_by: true,
            ..HostFacts::default()
        };
        let named = |seen: &HostFacts| unenforced(seen).map(|found| found.text);
        assert!(named(&seen).unwrap().contains("bridge-nf-call-ip6tables"));
        seen.bridges_pass_by = [false; 2];
        assert!(named(&seen).unwrap().contains("bridge-nf-filter-vlan-tagged"));
        seen.tagged_pass_by = false;
        assert_eq!(named(&seen), None);
    }
}
