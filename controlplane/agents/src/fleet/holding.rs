//! Objects that agents serve although the control plane's picture does not name them.

use kplane_proto::v1::Held;
use kplane_util::bounded::cut;

/// Maximum number of example names in a report; agents send at most as many.
const EXAMPLES: usize = 8;
/// Longest name of a Service with its namespace: two DNS labels.
const MAX_NAME: usize = 127;
/// Longest reason, in bytes.
const MAX_REASON: usize = 300;

/// Cuts off what exceeds the limits of kplane's agents.
pub(crate) fn bound(held: &mut Held) {
    cut(&mut held.examples, EXAMPLES);
    for name in &mut held.examples {
        name.truncate(name.floor_char_boundary(MAX_NAME));
    }
    let reason = held.reason.floor_char_boundary(MAX_REASON);
    held.reason.truncate(reason);
}

/// Returns whether the agent does not touch its kernel, because it does not know what the kernel
/// holds.
pub fn is_untouched(held: &Held) -> bool {
    held.services == 0 && held.without_endpoints == 0 && held.policies == 0
}

/// Describes on one line what a node keeps, why, and how to resolve it.
pub fn describe(held: &Held) -> String {
    let services = |count: u64| match count {
        1 => "1 Service".to_owned(),
        count => format!("{count} Services"),
    };
    let what = match (held.services, held.without_endpoints) {
        (0, 0) if held.policies > 0 => {
            let policies = held.policies;
            format!("keeps {policies} NetworkPolicies and Pods missing from the source")
        }
        (0, 0) => "leaves the kernel's rules unchanged, without knowing them".to_owned(),
        (gone, 0) => format!("keeps {} missing from the source", services(gone)),
        (0, bare) => format!(
            "keeps the endpoints of {} without endpoints in the source",
            services(bare)
        ),
        (gone, bare) => format!(
            "keeps {} missing from the source, and the endpoints of {} without endpoints in the \
             source",
            services(gone),
            services(bare)
        ),
    };
    format!(
        "{what}, because {}: fix the source, or run `kpctl approve`",
        held.reason
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_why_and_the_way_out() {
        let line = |services, without_endpoints| {
            describe(&Held {
                services,
                without_endpoints,
                reason: "x".to_owned(),
                ..Held::default()
            })
        };
        let end = ", because x: fix the source, or run `kpctl approve`";
        assert_eq!(
            line(9, 0),
            format!("keeps 9 Services missing from the source{end}")
        );
        assert_eq!(
            line(0, 1),
            format!("keeps the endpoints of 1 Service without endpoints in the source{end}")
        );
        assert!(line(1, 2).starts_with("keeps 1 Service missing from the source, and the"));
        assert!(line(0, 0).starts_with("leaves the kernel's rules unchanged"));
    }

    #[test]
    fn no_agent_has_more_memory_than_ours_need() {
        let mut held = Held {
            reason: "ä".repeat(5_000),
            examples: vec!["n".repeat(5_000); 100],
            ..Held::default()
        };
        bound(&mut held);
        assert_eq!((held.reason.len(), held.examples.len()), (300, 8));
        assert!(held.examples.iter().all(|name| name.len() == 127));
    }
}
