//! Notes about a configuration that is valid (I7): what it will not do, what is probably a mistake,
//! and what has no meaning here.

use std::time::Duration;

use kplane_model::{Cidr, Family};

use super::settings::{LOCALHOST_GATE, Settings};
use kplane_kube_proxy_config::KubeProxyConfiguration;
use kplane_kube_proxy_config::changed_fields;
use kplane_kube_proxy_config::{Problem, listed};

/// The importance of a note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Good to know.
    Info,
    /// Probably not what the operator meant.
    Warning,
}

/// One line for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The importance of the note.
    pub level: Level,
    /// The text of the line.
    pub text: String,
}

impl Note {
    pub(crate) fn info(text: impl Into<String>) -> Self {
        let (level, text) = (Level::Info, text.into());
        Self { level, text }
    }

    pub(crate) fn warning(text: impl Into<String>) -> Self {
        let (level, text) = (Level::Warning, text.into());
        Self { level, text }
    }
}

/// Facts of the host that a configuration is checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Whether the kernel has IPv6 and it is switched on.
    pub ipv6: bool,
}

impl Host {
    /// Reads the facts of this host.
    pub fn this() -> Self {
        let off = std::fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6")
            .is_ok_and(|text| text.trim() == "1");
        Self {
            ipv6: !off && std::path::Path::new("/proc/net/if_inet6").exists(),
        }
    }
}

/// Times for UDP flows that are shorter probably are not what the operator meant.
const SHORT_IDLE: Duration = Duration::from_secs(5);

/// Fields that have no effect in any mode, each including all fields inside it.
const UNUSED: [&str; 16] = [
    "clientConnection.acceptContentTypes",
    "clientConnection.burst",
    "clientConnection.contentType",
    "clientConnection.qps",
    "configSyncPeriod",
    "enableProfiling",
    "featureGates",
    "iptables.localhostNodePorts",
    "ipvs",
    "logging.flushFrequency",
    "logging.options",
    "logging.vmodule",
    "portRange",
    "showHiddenMetricsForVersion",
    "windowsRunAsService",
    "winkernel",
];

/// Returns the notes to log when an agent starts with a configuration.
///
/// # Errors
/// A configuration that cannot work on this host.
pub fn start_up(
    config: &KubeProxyConfiguration,
    settings: &Settings,
    host: Host,
) -> Result<Vec<Note>, Problem> {
    let mut notes = Vec::new();
    notes.extend(mode(config));
    notes.extend(udp_idle(config));
    notes.extend(detector(config, settings));
    families(config, settings, host, &mut notes)?;
    notes.extend(unused(config));
    Ok(notes)
}

fn mode(config: &KubeProxyConfiguration) -> Option<Note> {
    let where_ = "see docs/kube-proxy-compat.md";
    match &*config.mode {
        "nftables" | "iptables" => None,
        "" => Some(Note::info(format!(
            "mode is not set: kplane uses nftables unless --backend says otherwise, kube-proxy \
             before v1.40 uses iptables; {where_} for the differences"
        ))),
        "userspace" => Some(Note::info(
            "mode userspace: kube-proxy had it until 1.25; docs/userspace.md describes that of kplane",
        )),
        // D1.
        _ => Some(Note::warning(
            "mode ipvs: Kubernetes has deprecated it (off by default from 1.40, removed from \
             kube-proxy in 1.43). This agent keeps mode ipvs. To move to mode nftables, change \
             the mode and restart the agent",
        )),
    }
}

/// Returns a warning about a short time for UDP flows, such as kube-proxy's old default of 250 ms (U55).
fn udp_idle(config: &KubeProxyConfiguration) -> Option<Note> {
    let idle = config.udp_idle_timeout?;
    if config.mode != "userspace" {
        let text = "udpIdleTimeout is for mode userspace, and has no effect in other modes";
        return Some(Note::info(text));
    }
    (idle.to_std()? < SHORT_IDLE).then(|| {
        Note::warning(format!(
            "udpIdleTimeout {idle}: a client whose server takes longer to answer gets no answer. Remove the field for 30s"
        ))
    })
}

fn detector(config: &KubeProxyConfiguration, settings: &Settings) -> Option<Note> {
    let by_range = config.detect_local_mode == "ClusterCIDR";
    (by_range && settings.node.cluster_cidrs.is_empty()).then(|| {
        Note::warning(
            "clusterCIDR is empty, so the agent cannot distinguish pods from other clients: it \
             masquerades only hairpin traffic to ClusterIPs, and treats pods as external clients \
             for externalTrafficPolicy Local",
        )
    })
}

/// Returns notes about ranges of one family only on a host with both, and about ranges of a family
/// that the host does not have.
fn families(
    config: &KubeProxyConfiguration,
    settings: &Settings,
    host: Host,
    notes: &mut Vec<Note>,
) -> Result<(), Problem> {
    let node = &settings.node;
    let lists = [
        ("clusterCIDR", &node.cluster_cidrs),
        ("nodePortAddresses", &node.nodeport_addresses),
    ];
    for (field, cidrs) in lists {
        let Some(only) = single_family(cidrs) else {
            continue;
        };
        let (other, there) = match only {
            Family::V4 => (Family::V6, host.ipv6),
            Family::V6 => (Family::V4, true),
        };
        let lost = match field {
            "clusterCIDR" => {
                format!("the agent cannot distinguish {other} pods from other clients")
            }
            _ => format!(
                "node ports are served on all {other} addresses of the node, as by kube-proxy"
            ),
        };
        if field == "clusterCIDR" && !host.ipv6 && only == Family::V6 {
            return Err(Problem::new(
                field,
                &config.cluster_cidr,
                "must have an IPv4 range: this host has no IPv6",
            ));
        }
        if there {
            let text =
                format!("{field} has no range of {other}: in a cluster that has {other}, {lost}");
            // A cluster with only one family works. The first Service of the other family causes a
            // warning.
            notes.push(if names_family(settings, other) {
                Note::warning(text)
            } else {
                Note::info(text)
            });
        }
    }
    Ok(())
}

/// Returns whether the configuration has a range of a family that is smaller than all its
/// addresses.
fn names_family(settings: &Settings, family: Family) -> bool {
    let node = &settings.node;
    node.cluster_cidrs
        .iter()
        .chain(&node.nodeport_addresses)
        .any(|range| range.family() == family && range.prefix_len() > 0)
        || node.node_ip.is_some_and(|ip| Family::of(ip) == family)
}

fn single_family(cidrs: &[Cidr]) -> Option<Family> {
    let first = cidrs.first()?.family();
    cidrs.iter().all(|c| c.family() == first).then_some(first)
}

/// Returns one line with all fields that are set and have no effect.
fn unused(config: &KubeProxyConfiguration) -> Option<Note> {
    let mut default = KubeProxyConfiguration::default();
    // The defaults of these two depend on another field.
    default.bind_address.clone_from(&config.bind_address);
    default.mode.clone_from(&config.mode);
    let set = changed_fields(&default, config);
    let section = match &*config.mode {
        "nftables" => "iptables",
        _ => "nftables",
    };
    let minimum = [
        "iptables.minSyncPeriod",
        "ipvs.minSyncPeriod",
        "nftables.minSyncPeriod",
    ];
    let is_unused = |field: &&String| {
        let inside = |part: &str| {
            let rest = field.strip_prefix(part);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let of_mode = matches!(
            (&*config.mode, field.as_str()),
            ("iptables", "iptables.localhostNodePorts")
        ) || config.mode == "ipvs" && field.starts_with("ipvs.")
            || field.strip_prefix("featureGates.") == Some(LOCALHOST_GATE);
        minimum.contains(&field.as_str())
            || !of_mode && (inside(section) || UNUSED.into_iter().any(inside))
    };
    let names: Vec<_> = set.iter().filter(is_unused).map(String::as_str).collect();
    (!names.is_empty()).then(|| {
        Note::info(format!(
            "set, but without effect in kplane: {}",
            listed(&names)
        ))
    })
}

#[cfg(test)]
mod tests;
