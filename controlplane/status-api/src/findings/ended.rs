//! Connections that agents have ended because of what they led to, as the agents report them.

use kplane_model::{NodeName, Reason, Severity};
use kplane_proto::v1 as pb;

use super::Finding;

/// Returns the finding for the connections of a Service that ended lately. `reported` is what each connected agent reports.
pub(crate) fn ended<'a>(
    reported: impl Iterator<Item = (&'a NodeName, &'a pb::EndedConnections)>,
) -> Option<Finding> {
    let (mut dead, mut half_open, mut nodes) = (0_u64, 0_u64, Vec::new());
    for (node, ended) in reported {
        dead = dead.saturating_add(ended.dead);
        half_open = half_open.saturating_add(ended.half_open);
        nodes.push(node.clone());
    }
    let ends = match dead {
        0 => String::new(),
        1 => "1 connection ended with its node".to_owned(),
        _ => format!("{dead} connections ended with their nodes"),
    };
    let moves = match half_open {
        0 => String::new(),
        1 => "1 connect moved from an endpoint out of service".to_owned(),
        _ => format!("{half_open} connects moved from endpoints out of service"),
    };
    let parts: Vec<_> = [ends, moves].into_iter().filter(|part| !part.is_empty()).collect();
    (!parts.is_empty()).then(|| {
        let text = format!("{}, since these agents started", parts.join(", and "));
        Finding::new(Reason::ConnectionsEnded, Severity::Info, text, "").on(nodes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(numbers: &[(u64, u64)]) -> Option<String> {
        let node = NodeName::from("n1");
        let reported: Vec<_> = numbers
            .iter()
            .map(|(dead, half_open)| pb::EndedConnections {
                dead: *dead,
                half_open: *half_open,
                ..pb::EndedConnections::default()
            })
            .collect();
        ended(reported.iter().map(|of| (&node, of))).map(|finding| finding.text)
    }

    #[test]
    fn the_numbers_of_all_nodes_are_added() {
        assert_eq!(text(&[]), None);
        assert_eq!(text(&[(0, 0)]), None);
        let all = "41 connections ended with their nodes, and 12 connects moved from endpoints out of service, \
                   since these agents started";
        assert_eq!(text(&[(40, 2), (1, 10)]).unwrap(), all);
        let one = "1 connect moved from an endpoint out of service, since these agents started";
        assert_eq!(text(&[(0, 1)]).unwrap(), one);
        assert!(text(&[(u64::MAX, 0), (1, 0)]).unwrap().starts_with(&u64::MAX.to_string()));
    }
}
