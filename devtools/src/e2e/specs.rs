//! The choice of specs.

/// All specs of networks.
const FOCUS: &str = r"\[sig-network\]";

/// What is left out: a regular expression, and the reason.
pub(super) const LEFT_OUT: [(&str, &str); 10] = [
    (
        r"\[Disruptive\]|KubeProxyDaemonSet",
        "They log in to nodes by SSH, or replace kube-proxy itself.",
    ),
    (
        "Netpol|NetworkPolicy",
        "They test NetworkPolicies: `cargo xtask test e2e --policies` runs them.",
    ),
    (
        "Ingress",
        "They test objects of the API that no Service proxy reads.",
    ),
    ("SCTP", "This kernel has no SCTP."),
    (
        r"Feature:Networking-|Provider:GCE",
        "They need the internet, or Google's cloud.",
    ),
    (
        "DNS configMap",
        "They change CoreDNS' configuration, which is the rig's own here.",
    ),
    (
        "PerformanceDNS",
        "It creates thousands of Services to measure CoreDNS.",
    ),
    (
        "IPerf2",
        "It measures the network's throughput, and passes with any proxy.",
    ),
    (
        "rolling update",
        "Two specs of load balancers take five minutes a node each.",
    ),
    (
        "pull an image from a registry",
        "The registry of the rig's agnhost has no image. Its answer comes through the node port on localhost: 404.",
    ),
];
/// What is left out of clusters with one family.
pub(super) const ONE_FAMILY: (&str, &str) = (
    "DualStack",
    "They need both families: `cargo xtask test e2e --dual-stack` runs them.",
);

/// Regular expressions of specs to run and to leave out.
#[derive(Debug)]
pub(super) struct Selection {
    pub(super) focus: Vec<String>,
    pub(super) skip: Vec<String>,
}

impl Selection {
    /// Selects the specs whose name matches, among all of networks that can run here.
    pub(super) fn new(focus: Option<&str>, dual_stack: bool) -> Self {
        let mut skip: Vec<_> = LEFT_OUT.iter().map(|(it, _)| (*it).to_owned()).collect();
        if !dual_stack {
            skip.push(ONE_FAMILY.0.to_owned());
        }
        let focus = focus.map_or_else(|| FOCUS.to_owned(), |it| format!("{FOCUS}.*({it})"));
        Self {
            focus: vec![focus],
            skip,
        }
    }

    /// Selects the specs of NetworkPolicies, or those of them whose name matches.
    pub(super) fn policies(focus: Option<&str>) -> Self {
        Self {
            focus: vec![format!("{FOCUS} Netpol.*({})", focus.unwrap_or_default())],
            // This kernel has no SCTP.
            skip: vec!["SCTP".to_owned()],
        }
    }

    /// Selects the specs with these names.
    pub(super) fn named<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        Self {
            focus: names.map(|name| format!("{}$", literal(name))).collect(),
            skip: Vec::new(),
        }
    }
}

/// Returns a regular expression of Go that matches a text and nothing else.
fn literal(text: &str) -> String {
    let mut escaped = String::new();
    for char in text.chars() {
        if char.is_ascii_punctuation() {
            escaped.push('\\');
        }
        escaped.push(char);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_becomes_an_expression_that_matches_it_alone() {
        assert_eq!(literal("[a] b's (c)"), r"\[a\] b\'s \(c\)");
    }
}
