//! Which Nodes get or lose the taint. Pure.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::NodeName;

/// A part of all nodes, as a divisor: when the canaries of more nodes than that are silent, the canary is at fault.
const FEW: usize = 10;

/// What is to be done.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Nodes, and whether they should have the taint.
    pub(super) writes: Vec<(NodeName, bool)>,
    /// Number of nodes that do not get the taint, because there are too many at once.
    pub(super) kept_back: usize,
}

/// Compares whether canaries answer with the Nodes that have the taint.
pub(super) fn plan(answers: &BTreeMap<NodeName, bool>, tainted: &BTreeSet<NodeName>) -> Plan {
    let of = |wanted: bool| {
        answers
            .iter()
            .filter(move |(node, answers)| **answers != wanted && tainted.contains(*node) != wanted)
    };
    let mut writes: Vec<_> = of(false).map(|(node, _)| (node.clone(), false)).collect();
    let silent = answers.values().filter(|answers| !**answers).count();
    let back: Vec<_> = of(true).map(|(node, _)| (node.clone(), true)).collect();
    let kept_back = if silent <= (answers.len() / FEW).max(1) { 0 } else { back.len() };
    if kept_back == 0 {
        writes.extend(back);
    }
    Plan { writes, kept_back }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(of: &[(&str, bool)]) -> BTreeMap<NodeName, bool> {
        of.iter().map(|(node, answers)| ((*node).into(), *answers)).collect()
    }

    fn tainted(nodes: &[&str]) -> BTreeSet<NodeName> {
        nodes.iter().map(|node| (*node).into()).collect()
    }

    #[test]
    fn the_taint_goes_when_the_canary_answers_and_comes_back_when_it_is_silent() {
        let answers = answers(&[
            ("new", true),
            ("old", true),
            ("broken", false),
            ("known", false),
        ]);
        let all = plan(&answers, &tainted(&["new", "known", "without-an-agent"]));
        // Two of four are too many to get it, but not to lose it.
        assert_eq!(all.writes, [("new".into(), false)]);
        assert_eq!(all.kept_back, 1);
    }

    #[test]
    fn a_few_nodes_get_it_back() {
        let mut of: Vec<_> = (0..19).map(|n| (format!("n{n}"), true)).collect();
        of.push(("broken".to_owned(), false));
        let of: Vec<_> = of.iter().map(|(node, answers)| (node.as_str(), *answers)).collect();
        let done = plan(&answers(&of), &tainted(&[]));
        assert_eq!(done.writes, [("broken".into(), true)]);
        assert_eq!(plan(&answers(&of), &tainted(&["broken"])), Plan::default());
        let alone = plan(&answers(&[("only", false)]), &tainted(&[]));
        assert_eq!(alone.writes, [("only".into(), true)]);
    }
}
