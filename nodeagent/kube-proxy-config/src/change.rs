//! The parts of a new configuration that take effect at once, and those that need a restart (I3).

use serde_json::Value;

use crate::problem::shown;
use crate::types::KubeProxyConfiguration;

/// Fields that the running agent applies. They only shape plans, or the log.
const LIVE: [&str; 6] = [
    "bindAddress",
    "clusterCIDR",
    "iptables.masqueradeAll",
    "logging.verbosity",
    "nftables.masqueradeAll",
    "nodePortAddresses",
];

/// Modes of detecting pods that are part of the plans. The others are rules that the backend writes
/// at its start.
const LIVE_DETECT_MODES: [&str; 2] = ["ClusterCIDR", "NodeCIDR"];

/// The difference between a new configuration and the running one.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The running configuration with all changes that can be applied.
    pub effective: KubeProxyConfiguration,
    /// The fields that were applied.
    pub applied: Vec<String>,
    /// The fields that need a restart and keep their values until then.
    pub needs_restart: Vec<String>,
}

/// Returns which changes of `wanted` can be applied.
pub fn change(running: &KubeProxyConfiguration, wanted: &KubeProxyConfiguration) -> Change {
    let is_live = |field: &String| match &**field {
        "detectLocalMode" => [running, wanted]
            .iter()
            .all(|config| LIVE_DETECT_MODES.contains(&&*config.detect_local_mode)),
        field => LIVE.contains(&field),
    };
    let changed = changed_fields(running, wanted);
    let (applied, needs_restart): (Vec<_>, Vec<_>) = changed.into_iter().partition(is_live);
    Change {
        effective: take_over(running, wanted, &applied),
        applied,
        needs_restart,
    }
}

fn take_over(
    running: &KubeProxyConfiguration,
    wanted: &KubeProxyConfiguration,
    fields: &[String],
) -> KubeProxyConfiguration {
    let mut effective = running.clone();
    for field in fields {
        match &**field {
            "bindAddress" => effective.bind_address.clone_from(&wanted.bind_address),
            "clusterCIDR" => effective.cluster_cidr.clone_from(&wanted.cluster_cidr),
            "detectLocalMode" => {
                effective.detect_local_mode.clone_from(&wanted.detect_local_mode);
            }
            "iptables.masqueradeAll" => {
                effective.iptables.masquerade_all = wanted.iptables.masquerade_all;
            }
            "logging.verbosity" => effective.logging.verbosity = wanted.logging.verbosity,
            "nftables.masqueradeAll" => {
                effective.nftables.masquerade_all = wanted.nftables.masquerade_all;
            }
            "nodePortAddresses" => {
                effective.node_port_addresses.clone_from(&wanted.node_port_addresses);
            }
            _ => {}
        }
    }
    effective
}

/// Returns the paths of the fields that differ, by name. A list counts as one field.
pub fn changed_fields(one: &KubeProxyConfiguration, other: &KubeProxyConfiguration) -> Vec<String> {
    let mut changed = Vec::new();
    // A configuration can always be serialized: JSON can represent every field.
    if let (Ok(one), Ok(other)) = (serde_json::to_value(one), serde_json::to_value(other)) {
        compare(&one, &other, "", &mut changed);
    }
    changed
}

fn compare(one: &Value, other: &Value, path: &str, changed: &mut Vec<String>) {
    let (Value::Object(ones), Value::Object(others)) = (one, other) else {
        if one != other {
            changed.push(path.to_owned());
        }
        return;
    };
    let added = others.keys().filter(|field| !ones.contains_key(*field));
    for field in ones.keys().chain(added) {
        let path = match path {
            "" => shown(field),
            path => format!("{path}.{}", shown(field)),
        };
        let value = |fields: &'_ serde_json::Map<String, Value>| {
            fields.get(field).cloned().unwrap_or(Value::Null)
        };
        compare(&value(ones), &value(others), &path, changed);
    }
}

#[cfg(test)]
mod tests;
