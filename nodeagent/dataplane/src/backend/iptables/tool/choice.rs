//! Which of two kinds of iptables a node uses. Pure.

/// kubelet's chains in table mangle, which show the kind of iptables that kubelet uses.
const HINTS: [&str; 2] = [":KUBE-IPTABLES-HINT ", ":KUBE-KUBELET-CANARY "];

/// Returns whether a node uses the legacy kind, by the listings of both. A kind that cannot be listed is not used: the kernel
/// lacks it.
pub(super) fn is_legacy(
    in_nft: Option<&str>,
    in_legacy: Option<&str>,
    is_plain: impl FnOnce() -> bool,
) -> bool {
    let (nft, legacy) = match (in_nft, in_legacy) {
        (Some(nft), Some(legacy)) => (nft, legacy),
        (None, None) => return is_plain(),
        (nft, _) => return nft.is_none(),
    };
    let [nfts, legacies] = [nft, legacy].map(|text| text.matches("\n-A ").count());
    match [nft, legacy].map(has_hint) {
        [true, _] => false,
        [false, true] => true,
        _ if nfts != legacies => legacies > nfts,
        _ => is_plain(),
    }
}

fn has_hint(listing: &str) -> bool {
    let mut table = "";
    listing.lines().any(|line| {
        if let Some(name) = line.strip_prefix('*') {
            table = name;
        }
        table == "mangle" && HINTS.iter().any(|hint| line.starts_with(hint))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_that_the_kernel_lacks_is_not_chosen() {
        let (empty, hint) = ("*nat\nCOMMIT\n", "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\n");
        let rule = "*nat\n-A OUTPUT -j RETURN\nCOMMIT\n";
        let by_plain = |nft, legacy| [false, true].map(|plain| is_legacy(nft, legacy, || plain));
        assert_eq!(by_plain(None, Some(empty)), [true; 2]);
        assert_eq!(by_plain(Some(empty), None), [false; 2]);
        assert_eq!(by_plain(None, None), [false, true]);
        assert_eq!(by_plain(Some(empty), Some(empty)), [false, true]);
        assert_eq!(by_plain(Some(empty), Some(rule)), [true; 2]);
        assert_eq!(by_plain(Some(hint), Some(rule)), [false; 2]);
        assert_eq!(by_plain(Some(rule), Some(hint)), [true; 2]);
    }

    #[test]
    fn hints_count_in_mangle_only() {
        assert!(has_hint(
            "*nat\nCOMMIT\n*mangle\n:KUBE-IPTABLES-HINT - [0:0]\n"
        ));
        assert!(has_hint("*mangle\n:KUBE-KUBELET-CANARY - [0:0]\n"));
        assert!(!has_hint(
            "*mangle\nCOMMIT\n*nat\n:KUBE-KUBELET-CANARY - [0:0]\n"
        ));
        assert!(!has_hint("*mangle\n:KUBE-PROXY-CANARY - [0:0]\n"));
    }
}
