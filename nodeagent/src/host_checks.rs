//! What stands in the way of packets on the node, besides kplane's own rules: settings of the kernel, and rules of other
//! programs.
//!
//! A task of its own examines the node at the start and every ten seconds ([`watch()`]). The engine only reads the
//! latest facts, and puts what they mean into its report ([`findings`], pure).

mod bridges;
mod mtu;
mod needed;
pub mod node_ports;
pub mod pod_ranges;

pub use self::bridges::unenforced;
pub use self::needed::UnsetSetting;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kplane_dataplane::backend::Kind;
use kplane_dataplane::obstacles::Obstacles;
use kplane_dataplane::plan::NodeSettings;
use kplane_model::{Cidr, Family, NodeFacts, Reason, Severity};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::sysctl::ConntrackSettings;

/// Interval between two looks.
const INTERVAL: Duration = Duration::from_secs(10);
/// Share of the connection tracking table that must be free, as a divisor.
const FREE: u64 = 10;
/// The device that kube-proxy makes in mode ipvs.
const IPVS_LINK: &str = "kube-ipvs0";
/// Maximum number of chains that a finding names.
const NAMED: usize = 5;

/// Facts of the node that decide about packets. Each is `None` if it cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// Whether the kernel forwards packets of each family.
    pub forwarding: [Option<bool>; 2],
    /// Chains of other programs that drop forwarded packets of each family unless a rule accepts them.
    pub dropping: [Vec<String>; 2],
    /// Those of them that have no rule.
    pub closed: [Vec<String>; 2],
    /// The strict reverse path filter is on for all interfaces.
    pub strict_reverse_path: bool,
    /// There are bridges, and their packets pass iptables' rules by, for each family.
    pub bridges_pass_by: [bool; 2],
    /// There are bridges, and their frames with a VLAN tag pass all of these rules by.
    pub tagged_pass_by: bool,
    /// Rules of kube-proxy, such as `table ip kube-proxy`.
    pub kube_proxy: Vec<String>,
    /// firewalld has a table in nf_tables.
    pub firewalld: bool,
    /// Entries of the connection tracking table, and their maximum.
    pub conntrack: Option<(u64, u64)>,
    /// The largest packets of interfaces.
    pub sizes: mtu::Sizes,
    /// Settings that stay other than the agent needs them.
    pub unset: Vec<UnsetSetting>,
}

impl HostFacts {
    /// Examines the network namespace of the calling thread; `root` is the root of the file system.
    pub fn look(root: &Path, backend: Kind, obstacles: &mut Obstacles) -> Self {
        if let Err(error) = obstacles.refresh() {
            tracing::debug!(%error, "cannot read the chains of nf_tables");
        }
        let number = |path: &str| -> Option<u64> {
            let text = fs::read_to_string(root.join(path)).ok()?;
            text.trim().parse().ok()
        };
        let is_on = |path| number(path).map(|value| value != 0);
        let netfilter = "proc/sys/net/netfilter/nf_conntrack_";
        let bridges = bridges::exist(root);
        let off = |path| bridges && is_on(path) == Some(false);
        Self {
            forwarding: [
                is_on("proc/sys/net/ipv4/ip_forward"),
                is_on("proc/sys/net/ipv6/conf/all/forwarding"),
            ],
            dropping: obstacles.dropping.clone(),
            closed: obstacles.closed.clone(),
            kube_proxy: rules_of_kube_proxy(root, backend, obstacles),
            firewalld: obstacles.firewalld,
            strict_reverse_path: number("proc/sys/net/ipv4/conf/all/rp_filter") == Some(1),
            bridges_pass_by: [
                off("proc/sys/net/bridge/bridge-nf-call-iptables"),
                off("proc/sys/net/bridge/bridge-nf-call-ip6tables"),
            ],
            tagged_pass_by: off("proc/sys/net/bridge/bridge-nf-filter-vlan-tagged"),
            conntrack: number(&format!("{netfilter}count")).zip(number(&format!("{netfilter}max"))),
            sizes: mtu::Sizes::read(root),
            unset: Vec::new(),
        }
    }
}

/// Returns what kube-proxy has in the kernel. Rules of a mode that the agent's own backend shares with it do not count.
fn rules_of_kube_proxy(root: &Path, backend: Kind, obstacles: &Obstacles) -> Vec<String> {
    let mut found: Vec<String> = obstacles
        .kube_proxy_tables
        .iter()
        .map(|table| format!("table {table}"))
        .collect();
    let backend = backend.describe();
    if backend.serves_in_kernel() && !backend.shares_names {
        let chains = obstacles.kube_proxy_chains.iter();
        found.extend(chains.map(|chain| format!("chain {chain}")));
        let link = root.join("sys/class/net").join(IPVS_LINK);
        found.extend(link.exists().then(|| format!("device {IPVS_LINK}")));
    }
    found
}

/// Something that stands in the way of packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The name.
    pub code: Reason,
    /// The severity.
    pub severity: Severity,
    /// The cause, and what clients see.
    pub text: String,
    /// What to do or to type.
    pub fix: String,
}

/// Returns what the facts mean for a node that serves Services of these families. Allocates nothing if all is well.
pub fn findings(
    seen: &HostFacts,
    node: Option<&NodeFacts>,
    settings: &NodeSettings,
    served: [bool; 2],
) -> Vec<Finding> {
    let mut found = Vec::new();
    for family in Family::ALL.into_iter().filter(|family| served[*family as usize]) {
        found.extend(forwarding(seen, family));
        found.extend(dropping(seen, family));
        found.extend(bridges::passed_by(seen, family));
        found.extend(node.and_then(|node| pod_range(node, settings, family)));
    }
    found.extend(kube_proxy(seen));
    found.extend(needed::findings(&seen.unset, settings));
    found.extend(firewalld(seen));
    found.extend(conntrack(seen));
    found.extend(reverse_path(seen, served));
    found.extend(node.and_then(|node| seen.sizes.finding(&node.pod_cidrs)));
    found
}

fn finding(code: Reason, severity: Severity, text: String, fix: &str) -> Finding {
    Finding {
        code,
        severity,
        text,
        fix: fix.to_owned(),
    }
}

fn forwarding(seen: &HostFacts, family: Family) -> Option<Finding> {
    let key = family.pick("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding");
    (seen.forwarding[family as usize] == Some(false)).then(|| {
        let text = format!(
            "{key} is 0: the node does not forward {family} packets, so Pods reach no endpoint on another node, and no \
             client outside reaches a Pod"
        );
        let fix = format!("sysctl -w {key}=1 on the node, and a file in /etc/sysctl.d so that it stays");
        finding(Reason::ForwardingOff, Severity::Error, text, &fix)
    })
}

fn dropping(seen: &HostFacts, family: Family) -> Option<Finding> {
    let [chains, closed] = [&seen.dropping, &seen.closed].map(|of| &of[family as usize]);
    if let Some(chain) = closed.first() {
        let text = format!(
            "{chain} has policy drop and no rule: all {family} packets that the node forwards to and from Pods are dropped"
        );
        let fix = format!(
            "let the program that made the chain, or the CNI plugin, accept the Pods' packets there, or: {}",
            accept(chain)
        );
        return Some(finding(
            Reason::ForwardPolicyDrop,
            Severity::Error,
            text,
            &fix,
        ));
    }
    chains.first().map(|first| {
        let named: Vec<&str> = chains.iter().take(NAMED).map(String::as_str).collect();
        let text = format!(
            "{} has policy drop: packets to and from Pods are dropped unless a rule of that chain accepts them",
            named.join(", ")
        );
        let fix = format!(
            "nft list chain {first} shows its rules; the CNI plugin must accept the Pods' ranges there, or: {}",
            accept(first)
        );
        finding(Reason::ForwardPolicyDrop, Severity::Warning, text, &fix)
    })
}

/// Returns the command that ends a chain's policy drop. Chains of iptables get one of iptables.
fn accept(chain: &str) -> String {
    match chain {
        "ip filter FORWARD" => "iptables -P FORWARD ACCEPT".to_owned(),
        "ip6 filter FORWARD" => "ip6tables -P FORWARD ACCEPT".to_owned(),
        chain => format!("nft chain {chain} '{{ policy accept; }}'"),
    }
}

fn kube_proxy(seen: &HostFacts) -> Option<Finding> {
    (!seen.kube_proxy.is_empty()).then(|| {
        let named: Vec<&str> = seen.kube_proxy.iter().take(NAMED).map(String::as_str).collect();
        let text = format!(
            "kube-proxy's rules are in the kernel as well: {}. If they are old, they lead connections to endpoints that \
             are gone",
            named.join(", ")
        );
        let fix = "kpctl migrate status shows who serves the node; if kube-proxy does not run there any more, kube-proxy \
                   --cleanup removes its rules";
        finding(Reason::OtherProxyRules, Severity::Warning, text, fix)
    })
}

fn firewalld(seen: &HostFacts) -> Option<Finding> {
    seen.firewalld.then(|| {
        let text = "firewalld runs on the node: its zones decide about packets to Pods and node ports after kplane's \
                    rules, and with FlushAllOnReload=yes a reload deletes kplane's rules until the agent repairs them";
        let fix = "accept the Pods' ranges and node ports in firewalld's zones, and set FlushAllOnReload=no, or stop \
                   firewalld";
        finding(Reason::Firewalld, Severity::Info, text.to_owned(), fix)
    })
}

/// Returns a finding for a node whose Pods count as clients outside of the cluster.
fn pod_range(node: &NodeFacts, settings: &NodeSettings, family: Family) -> Option<Finding> {
    let of_family = |range: &&Cidr| range.family() == family;
    let mut ranges = settings.cluster_cidrs.iter().filter(of_family).peekable();
    ranges.peek()?;
    let known: Vec<Cidr> = ranges.copied().collect();
    let mut own = node.pod_cidrs.iter().filter(of_family);
    let outside = own.find(|own| !known.iter().any(|range| range.covers(**own)))?;
    let known: Vec<String> = known.iter().map(ToString::to_string).collect();
    let text = format!(
        "the node's range of Pods {outside} is not within clusterCIDR {}: its Pods count as clients outside of the \
         cluster, and their packets to ClusterIPs are masqueraded",
        known.join(", ")
    );
    let fix = "correct clusterCIDR in the agents' configuration";
    Some(finding(
        Reason::PodRangeNotCovered,
        Severity::Warning,
        text,
        fix,
    ))
}

fn conntrack(seen: &HostFacts) -> Option<Finding> {
    let (count, max) = seen.conntrack?;
    (max > 0 && count >= max - max / FREE).then(|| {
        let text = format!(
            "the connection tracking table has {count} of {max} entries: when it is full, the kernel drops new connections"
        );
        let fix = "raise conntrack.maxPerCore or conntrack.min in the agents' configuration; conntrack -L shows what fills it";
        finding(Reason::ConntrackFull, Severity::Error, text, fix)
    })
}

fn reverse_path(seen: &HostFacts, served: [bool; 2]) -> Option<Finding> {
    (seen.strict_reverse_path && served[0]).then(|| {
        let text = "net.ipv4.conf.all.rp_filter is 1: packets are dropped whose answers would leave by another \
                    interface, as with several uplinks or some CNI plugins";
        let fix = "if packets are lost: sysctl -w net.ipv4.conf.all.rp_filter=2 on the node";
        finding(Reason::ReversePathFilter, Severity::Info, text.to_owned(), fix)
    })
}

/// Creates a task that examines the node, and the receiver of what it sees. `localhost`: node ports on all addresses
/// include loopback addresses.
pub fn watch(
    backend: Kind,
    localhost: bool,
    conntrack: ConntrackSettings,
) -> (watch::Receiver<HostFacts>, impl Future<Output = ()>) {
    let (sender, receiver) = watch::channel(HostFacts::default());
    let task = async move {
        let conntrack = Arc::new(conntrack);
        let mut known = (Obstacles::default(), needed::Unset::default());
        while !sender.is_closed() {
            let mut last = std::mem::take(&mut known);
            let conntrack = Arc::clone(&conntrack);
            let look = move || {
                let (root, (obstacles, unset)) = (Path::new("/"), &mut last);
                let seen = HostFacts {
                    unset: unset.look(root, backend, localhost, &conntrack),
                    ..HostFacts::look(root, backend, obstacles)
                };
                (seen, last)
            };
            if let Ok((seen, read)) = tokio::task::spawn_blocking(look).await {
                known = read;
                // The number of connections alone is no news.
                sender.send_if_modified(|known| {
                    let is_new = means_more(known, &seen);
                    *known = seen;
                    is_new
                });
            }
            sleep(INTERVAL).await;
        }
    };
    (receiver, task)
}

/// Returns whether two looks differ in more than the number of connections.
fn means_more(before: &HostFacts, after: &HostFacts) -> bool {
    conntrack(before).is_some() != conntrack(after).is_some()
        || HostFacts {
            conntrack: None,
            ..before.clone()
        } != HostFacts {
            conntrack: None,
            ..after.clone()
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a healthy node shows.
    fn healthy() -> HostFacts {
        HostFacts {
            forwarding: [Some(true), Some(false)],
            conntrack: Some((100, 1_000)),
            ..HostFacts::default()
        }
    }

    fn codes(seen: &HostFacts, served: [bool; 2]) -> Vec<Reason> {
        let settings = NodeSettings {
            cluster_cidrs: vec!["10.244.0.0/16".parse().unwrap()],
            ..NodeSettings::default()
        };
        let node = NodeFacts {
            pod_cidrs: vec![
                "10.244.1.0/24".parse().unwrap(),
                "fd00::/64".parse().unwrap(),
            ],
            ..NodeFacts::default()
        };
        let found = findings(seen, Some(&node), &settings, served);
        found.iter().map(|finding| finding.code).collect()
    }

    #[test]
    fn a_healthy_node_has_none_and_a_family_that_is_not_served_does_not_count() {
        assert_eq!(codes(&healthy(), [true, false]), []);
        assert_eq!(codes(&healthy(), [true, true]), [Reason::ForwardingOff]);
        assert_eq!(codes(&HostFacts::default(), [true, true]), []);
    }

    #[test]
    fn each_obstacle_is_named() {
        let cases = [
            (
                HostFacts {
                    forwarding: [Some(false), None],
                    ..healthy()
                },
                Reason::ForwardingOff,
            ),
            (
                HostFacts {
                    dropping: [vec!["ip filter FORWARD".to_owned()], vec![]],
                    ..healthy()
                },
                Reason::ForwardPolicyDrop,
            ),
            (
                HostFacts {
                    kube_proxy: vec!["table ip kube-proxy".to_owned()],
                    ..healthy()
                },
                Reason::OtherProxyRules,
            ),
            (
                HostFacts {
                    firewalld: true,
                    ..healthy()
                },
                Reason::Firewalld,
            ),
            (
                HostFacts {
                    strict_reverse_path: true,
                    ..healthy()
                },
                Reason::ReversePathFilter,
            ),
            (
                HostFacts {
                    bridges_pass_by: [true, false],
                    ..healthy()
                },
                Reason::BridgeNetfilterOff,
            ),
            (
                HostFacts {
                    conntrack: Some((900, 1_000)),
                    ..healthy()
                },
                Reason::ConntrackFull,
            ),
        ];
        for (seen, expected) in cases {
            assert_eq!(codes(&seen, [true, false]), [expected]);
        }
    }

    /// Rules may accept the Pods' packets; a chain without any drops all.
    #[test]
    fn a_chain_that_accepts_nothing_is_an_error() {
        let mut seen = healthy();
        seen.dropping[0].push("ip filter FORWARD".to_owned());
        let found = |seen: &HostFacts| {
            let found = dropping(seen, Family::V4).unwrap();
            (found.severity, found.fix)
        };
        let (severity, fix) = found(&seen);
        assert_eq!(severity, Severity::Warning);
        assert!(fix.starts_with("nft list chain ip filter FORWARD shows"));
        assert!(fix.ends_with("or: iptables -P FORWARD ACCEPT"));
        seen.closed[0].push("inet docker forward".to_owned());
        let (severity, fix) = found(&seen);
        assert_eq!(severity, Severity::Error);
        assert!(fix.ends_with("or: nft chain inet docker forward '{ policy accept; }'"));
        assert_eq!(dropping(&seen, Family::V6), None);
    }

    #[test]
    fn a_range_outside_of_the_clusters_is_named() {
        let settings = NodeSettings {
            cluster_cidrs: vec!["10.200.0.0/16".parse().unwrap()],
            ..NodeSettings::default()
        };
        let node = NodeFacts {
            pod_cidrs: vec!["10.244.1.0/24".parse().unwrap()],
            ..NodeFacts::default()
        };
        let found = findings(&healthy(), Some(&node), &settings, [true, false]);
        assert_eq!(found[0].code, Reason::PodRangeNotCovered);
        assert!(found[0].text.contains("10.244.1.0/24"), "{}", found[0].text);
        let unknown = NodeSettings::default();
        assert_eq!(
            findings(&healthy(), Some(&node), &unknown, [true, false]),
            []
        );
    }

    #[test]
    fn connections_that_come_and_go_are_no_news() {
        let more = HostFacts {
            conntrack: Some((200, 1_000)),
            ..healthy()
        };
        let full = HostFacts {
            conntrack: Some((950, 1_000)),
            ..healthy()
        };
        assert!(!means_more(&healthy(), &more));
        assert!(means_more(&healthy(), &full));
    }
}
