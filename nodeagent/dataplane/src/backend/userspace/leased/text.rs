//! The chain that leads to the proxy, as `iptables-restore` reads it and `iptables-save` prints it. Pure.

use std::fmt::Write as _;

use kplane_model::Family;

use super::sets::SetId;
use crate::backend::iptables::words;
use crate::backend::nftables::CaptureSettings;

/// Name of the chain, one per family.
pub(super) const CHAIN: &str = "KPLANE-CAPTURE";
/// The table of the chain.
pub(super) const TABLE: &str = "nat";

/// Chains from which packets come.
const HOOKS: [&str; 2] = ["PREROUTING", "OUTPUT"];
/// The chain that leads to endpoints, in modes iptables and ipvs.
const KERNELS: &str = "KUBE-SERVICES";
/// The jump from a built-in chain.
const JUMP: &str =
    "-m comment --comment \"kplane: the userspace proxy comes first\" -j KPLANE-CAPTURE";

/// Returns the rules of the chain, whatever the number of places.
pub(super) fn rules(family: Family, settings: CaptureSettings) -> Vec<String> {
    let set = |id: SetId| id.name(family);
    let loopback = match family {
        Family::V4 => "127.0.0.0/8",
        Family::V6 => "::1/128",
    };
    let lead = format!("-j DNAT --to-destination {}", settings.socket);
    let mut rules = vec![format!(
        "-m set ! --match-set {} dst -j RETURN",
        set(SetId::Lease)
    )];
    rules.push(format!("-m mark --mark {:#x} -j RETURN", settings.own_mark));
    // Packets from other machines pass PREROUTING before the kernel checks such an address, and have no output interface.
    rules.push(format!("-d {loopback} ! -o lo -j RETURN"));
    let protocols = [
        ("tcp", SetId::Tcp, SetId::LoopbackTcp),
        ("udp", SetId::Udp, SetId::LoopbackUdp),
    ];
    for (protocol, ports, on_loopback) in protocols {
        let (places, nodes) = (set(SetId::Places), set(SetId::Nodes));
        let (ports, on_loopback) = (set(ports), set(on_loopback));
        rules.extend([
            format!("-p {protocol} -m set --match-set {places} dst,dst {lead}"),
            format!(
                "-p {protocol} -m set --match-set {nodes} dst -m addrtype --dst-type LOCAL \
                 -m set --match-set {ports} dst {lead}"
            ),
            format!("-d {loopback} -p {protocol} -m set --match-set {on_loopback} dst {lead}"),
        ]);
    }
    rules
}

/// The chain in a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Its lines; `None` if there is no chain.
    pub(super) chain: Option<Vec<String>>,
    /// The rules that jump to it, each with the name of its own chain.
    jumps: Vec<String>,
    /// Whether it comes before the kernel's own rules for Services, in both built-in chains.
    pub(super) is_first: bool,
}

impl Found {
    /// Reads a listing of table nat, or of all tables.
    pub(super) fn parse(text: &str) -> Self {
        let mut found = Self::default();
        let mut first = [None; HOOKS.len()];
        let mut is_here = false;
        for line in text.lines() {
            if let Some(table) = line.strip_prefix('*') {
                is_here = table == TABLE;
            } else if !is_here {
            } else if let Some(chain) = line.strip_prefix(':') {
                if chain.split(' ').next() == Some(CHAIN) {
                    found.chain.get_or_insert_default();
                }
            } else if let Some(rule) = line.strip_prefix("-A ") {
                found.rule(rule, &mut first);
            }
        }
        found.is_first = first == [Some(true); HOOKS.len()];
        found
    }

    fn rule(&mut self, rule: &str, first: &mut [Option<bool>; HOOKS.len()]) {
        let chain = rule.split(' ').next().unwrap_or_default();
        if chain == CHAIN {
            let lines = self.chain.get_or_insert_default();
            lines.push(rule.to_owned());
            return;
        }
        let mut words = words(rule);
        let target = words.find(|word| matches!(*word, "-j" | "-g"));
        let to = target.and_then(|_| words.next());
        if to == Some(CHAIN) {
            self.jumps.push(rule.to_owned());
        }
        let hook = HOOKS.iter().position(|hook| *hook == chain);
        if let (Some(hook), Some(CHAIN | KERNELS)) = (hook, to) {
            first[hook].get_or_insert(to == Some(CHAIN));
        }
    }

    /// Returns the text that writes the chain anew, before all others.
    pub(super) fn writing(&self, rules: &[String]) -> String {
        let mut text = self.beginning();
        for rule in rules {
            let _ = writeln!(text, "-A {CHAIN} {rule}");
        }
        for hook in HOOKS {
            let _ = writeln!(text, "-I {hook} {JUMP}");
        }
        text.push_str("COMMIT\n");
        text
    }

    /// Returns the text that removes the chain; `None` if there is nothing to remove.
    pub(super) fn removal(&self) -> Option<String> {
        self.chain.as_ref()?;
        let mut text = self.beginning();
        let _ = write!(text, "-X {CHAIN}\nCOMMIT\n");
        Some(text)
    }

    /// Returns the text that empties the chain, and creates it if it is missing, without jumps to it.
    fn beginning(&self) -> String {
        let mut text = format!("*{TABLE}\n:{CHAIN} - [0:0]\n");
        // A rule in any other form is not kplane's.
        let plain = |jump: &&String| jump.bytes().all(|b| b == b' ' || b.is_ascii_graphic());
        for jump in self.jumps.iter().filter(plain) {
            let _ = writeln!(text, "-D {jump}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "# Generated by iptables-save\n\
        *filter\n:KPLANE-CAPTURE - [0:0]\nCOMMIT\n\
        *nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:KPLANE-CAPTURE - [0:0]\n:KUBE-SERVICES - [0:0]\n\
        -A PREROUTING -j CNI-X\n\
        -A PREROUTING -m comment --comment \"kplane: -j KUBE-SERVICES\" -j KPLANE-CAPTURE\n\
        -A PREROUTING -j KUBE-SERVICES\n\
        -A OUTPUT -j KUBE-SERVICES\n\
        -A OUTPUT -j KPLANE-CAPTURE\n\
        -A KPLANE-CAPTURE -j RETURN\n\
        COMMIT\n";

    #[test]
    fn the_chain_must_come_before_the_kernels_rules_for_services() {
        let found = Found::parse(LISTING);
        assert_eq!(
            found.chain.as_deref(),
            Some(&["KPLANE-CAPTURE -j RETURN".to_owned()][..])
        );
        assert!(!found.is_first, "behind in OUTPUT");
        assert!(Found::parse(&LISTING.replace("-A OUTPUT -j KUBE-SERVICES\n", "")).is_first);
        assert!(!Found::parse("*nat\n:KPLANE-CAPTURE - [0:0]\nCOMMIT\n").is_first);
        assert_eq!(Found::parse("*filter\nCOMMIT\n"), Found::default());
    }

    #[test]
    fn removal_leaves_no_jump() {
        assert_eq!(
            Found::parse(LISTING).removal().unwrap(),
            "*nat\n:KPLANE-CAPTURE - [0:0]\n\
             -D PREROUTING -m comment --comment \"kplane: -j KUBE-SERVICES\" -j KPLANE-CAPTURE\n\
             -D OUTPUT -j KPLANE-CAPTURE\n\
             -X KPLANE-CAPTURE\nCOMMIT\n"
        );
        assert_eq!(Found::parse("*nat\nCOMMIT\n").removal(), None);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read(text in "\\PC*", lines in "(\\*nat|:KPLANE-CAPTURE|-A [A-Z\" -]*\n)*") {
            let _ = (Found::parse(&text), Found::parse(&lines));
        }
    }
}
