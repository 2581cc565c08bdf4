//! What a node's kernel has of IPVS mode, as the tools of others show it.

use std::process::Command;

use anyhow::{Result, ensure};
use kplane_model::Family;
use kplane_rig::netns::NetNs;

/// The device that has the addresses of Services.
pub const LINK: &str = "kube-ipvs0";

/// Runs a line of words in a node's namespace and returns its output.
pub fn run(node: &NetNs, line: &str) -> Result<String> {
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    node.output(command)
}

/// Virtual and real servers, sorted, in the words that would add them:
/// `-a -t 10.96.0.1:80 -r 10.244.1.1:8080 -m -w 1`.
pub fn servers(node: &NetNs) -> Result<Vec<String>> {
    let listing = run(node, "ipvsadm -Sn")?;
    let mut lines: Vec<String> = listing.lines().map(|line| line.trim().to_owned()).collect();
    lines.sort();
    Ok(lines)
}

/// The weights of all real servers with an address, in the order of [`servers`].
pub fn weights(node: &NetNs, real: &str) -> Result<Vec<u32>> {
    let real = format!(" -r {real} ");
    let lines = servers(node)?;
    lines
        .iter()
        .filter(|line| line.contains(&real))
        .map(|line| {
            let last = line.rsplit(' ').next().unwrap_or_default();
            Ok(last.parse()?)
        })
        .collect()
}

/// IP sets and their entries, sorted, in the words that would add them, without sizes.
pub fn sets(node: &NetNs) -> Result<Vec<String>> {
    let listing = run(node, "ipset save")?;
    let mut lines: Vec<String> = listing
        .lines()
        .map(|line| {
            if line.starts_with("create ") {
                line.split(' ').take(3).collect::<Vec<_>>().join(" ")
            } else {
                line.to_owned()
            }
        })
        .collect();
    lines.sort();
    Ok(lines)
}

/// Addresses of the device, sorted.
pub fn addresses(node: &NetNs) -> Result<Vec<String>> {
    let listing = run(node, "busybox ip addr show")?;
    let own = listing
        .split("\n")
        .skip_while(|line| !line.contains(LINK))
        .skip(1)
        .take_while(|line| line.starts_with(' '));
    let words = own.filter_map(|line| {
        let mut words = line.split_whitespace();
        matches!(words.next(), Some("inet" | "inet6")).then(|| words.next().unwrap_or_default())
    });
    let mut all: Vec<String> = words.map(str::to_owned).collect();
    all.sort();
    Ok(all)
}

/// Everything.
pub fn everything(node: &NetNs) -> Result<Vec<String>> {
    let mut all = [servers(node)?, sets(node)?, addresses(node)?].concat();
    for family in Family::ALL {
        let save = match family {
            Family::V4 => "iptables-nft-save",
            Family::V6 => "ip6tables-nft-save",
        };
        let rules = run(node, save)?;
        let rules = rules.lines().filter(|line| !line.starts_with('#'));
        // Counters of packets stand at the end of a chain's line.
        let rules = rules.map(|line| line.split(" [").next().unwrap_or_default());
        all.extend(rules.map(str::to_owned));
    }
    Ok(all)
}

/// Wants nothing of IPVS mode on a node, apart from what is another's.
pub fn ensure_nothing(node: &NetNs) -> Result<()> {
    let all = everything(node)?;
    let hint = |line: &&String| !line.contains("KUBE-IPTABLES-HINT");
    let firewall = |line: &&String| !line.contains("KUBE-FIREWALL");
    let ours = |line: &&String| line.contains("KUBE-") || line.starts_with("-a ");
    let left: Vec<_> = all.iter().filter(ours).filter(hint).filter(firewall).collect();
    ensure!(left.is_empty(), "left: {left:#?}");
    let links = run(node, "busybox ip link show")?;
    ensure!(!links.contains(LINK), "{LINK} is left");
    Ok(())
}
