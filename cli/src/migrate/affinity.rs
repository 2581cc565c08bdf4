//! The node affinity that keeps kube-proxy off the nodes of kplane, and agents off all others.

use k8s_openapi::api::core::v1::{
    Affinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm,
};
use serde_json::{Value, json};

use super::{KPLANE, LABEL};

/// Returns the node selector of a pod template.
pub(crate) fn required(affinity: Option<&Affinity>) -> Option<&NodeSelector> {
    let node = affinity?.node_affinity.as_ref()?;
    node.required_during_scheduling_ignored_during_execution.as_ref()
}

/// Returns whether no pod with this selector runs on a node of kplane.
pub(crate) fn keeps_off(selector: Option<&NodeSelector>) -> bool {
    selector.is_some_and(|selector| all_terms(selector, is_not_in))
}

/// Returns whether pods with this selector run on nodes of kplane only.
pub(crate) fn is_limited(selector: Option<&NodeSelector>) -> bool {
    selector.is_some_and(|selector| all_terms(selector, is_in))
}

/// Returns the selector that matches the same nodes, except for those of kplane.
pub(crate) fn keep_off(selector: Option<&NodeSelector>) -> NodeSelector {
    let mut selector = selector.cloned().unwrap_or_default();
    if selector.node_selector_terms.is_empty() {
        selector.node_selector_terms.push(NodeSelectorTerm {
            match_expressions: Some(vec![not_in()]),
            match_fields: None,
        });
        return selector;
    }
    let terms = selector.node_selector_terms.iter_mut();
    // A term without conditions matches no node, and would match some with a condition.
    for term in terms.filter(|term| !is_empty(term)) {
        if !has(term, is_not_in) {
            term.match_expressions.get_or_insert_default().push(not_in());
        }
    }
    selector
}

/// Undoes [`keep_off`]; `None` if nothing is left.
pub(crate) fn allow(selector: &NodeSelector) -> Option<NodeSelector> {
    let mut selector = selector.clone();
    selector.node_selector_terms.retain_mut(|term| {
        if is_empty(term) || !has(term, is_not_in) {
            return true;
        }
        let expressions = term.match_expressions.get_or_insert_default();
        expressions.retain(|expression| !is_not_in(expression));
        if expressions.is_empty() {
            term.match_expressions = None;
        }
        !is_empty(term)
    });
    Some(selector).filter(|selector| !selector.node_selector_terms.is_empty())
}

/// Returns the merge patch of `affinity` that sets its node selector. What becomes empty is removed, so that a template
/// is in the end what it was at the beginning.
pub(crate) fn patch(affinity: Option<&Affinity>, selector: Option<&NodeSelector>) -> Value {
    if let Some(selector) = selector {
        return json!({ "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": selector,
        } });
    }
    let affinity = affinity.cloned().unwrap_or_default();
    let preferred = affinity
        .node_affinity
        .and_then(|node| node.preferred_during_scheduling_ignored_during_execution);
    match (
        preferred,
        affinity.pod_affinity.is_none() && affinity.pod_anti_affinity.is_none(),
    ) {
        (Some(_), _) => json!({ "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": null,
        } }),
        (None, false) => json!({ "nodeAffinity": null }),
        (None, true) => Value::Null,
    }
}

fn not_in() -> NodeSelectorRequirement {
    NodeSelectorRequirement {
        key: LABEL.to_owned(),
        operator: "NotIn".to_owned(),
        values: Some(vec![KPLANE.to_owned()]),
    }
}

fn is_not_in(requirement: &NodeSelectorRequirement) -> bool {
    *requirement == not_in()
}

fn is_in(requirement: &NodeSelectorRequirement) -> bool {
    *requirement
        == NodeSelectorRequirement {
            operator: "In".to_owned(),
            ..not_in()
        }
}

fn is_empty(term: &NodeSelectorTerm) -> bool {
    let none = |list: &Option<Vec<NodeSelectorRequirement>>| list.iter().all(Vec::is_empty);
    none(&term.match_expressions) && none(&term.match_fields)
}

fn has(term: &NodeSelectorTerm, is: fn(&NodeSelectorRequirement) -> bool) -> bool {
    term.match_expressions.iter().flatten().any(is)
}

/// Returns whether every term that matches any node has such a condition.
fn all_terms(selector: &NodeSelector, is: fn(&NodeSelectorRequirement) -> bool) -> bool {
    selector.node_selector_terms.iter().all(|term| is_empty(term) || has(term, is))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selector(terms: &Value) -> NodeSelector {
        serde_json::from_value(json!({ "nodeSelectorTerms": terms })).unwrap()
    }

    fn ours(operator: &str) -> Value {
        json!({ "key": "kplane.io/proxy", "operator": operator, "values": ["kplane"] })
    }

    fn linux() -> Value {
        json!({ "key": "kubernetes.io/os", "operator": "In", "values": ["linux"] })
    }

    #[test]
    fn without_conditions_there_is_one_term() {
        let kept = keep_off(None);
        assert_eq!(
            kept,
            selector(&json!([{ "matchExpressions": [ours("NotIn")] }]))
        );
        assert!(keeps_off(Some(&kept)));
        assert_eq!(allow(&kept), None);
    }

    #[test]
    fn each_term_that_matches_a_node_gets_the_condition() {
        let fields = json!([{ "key": "metadata.name", "operator": "In", "values": ["a"] }]);
        let before = selector(&json!([
            { "matchExpressions": [linux()] },
            { "matchFields": fields },
            {},
        ]));
        let kept = keep_off(Some(&before));
        let expected = selector(&json!([
            { "matchExpressions": [linux(), ours("NotIn")] },
            { "matchFields": fields, "matchExpressions": [ours("NotIn")] },
            {},
        ]));
        assert_eq!(kept, expected);
        assert_eq!(
            keep_off(Some(&kept)),
            expected,
            "twice is no more than once"
        );
        assert_eq!(allow(&kept).unwrap(), before);
        // A term that was added since lets kube-proxy back onto nodes of kplane.
        let mut more = kept;
        more.node_selector_terms
            .push(serde_json::from_value(json!({ "matchExpressions": [linux()] })).unwrap());
        assert!(!keeps_off(Some(&more)));
    }

    #[test]
    fn agents_are_limited_if_all_terms_say_so() {
        assert!(!is_limited(None));
        let limited = selector(&json!([{ "matchExpressions": [linux(), ours("In")] }]));
        assert!(is_limited(Some(&limited)));
        assert!(!is_limited(Some(&keep_off(None))));
    }

    #[test]
    fn a_template_is_in_the_end_what_it_was() {
        let affinity = |value: Value| serde_json::from_value::<Affinity>(value).unwrap();
        let kept = json!({ "requiredDuringSchedulingIgnoredDuringExecution": keep_off(None) });
        let alone = affinity(json!({ "nodeAffinity": kept }));
        assert_eq!(patch(Some(&alone), None), Value::Null);
        let pods = affinity(json!({ "nodeAffinity": kept, "podAntiAffinity": {} }));
        assert_eq!(patch(Some(&pods), None), json!({ "nodeAffinity": null }));
        let preferred = json!([{ "weight": 1, "preference": {} }]);
        let preferred = affinity(json!({ "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": preferred,
        } }));
        let field = "requiredDuringSchedulingIgnoredDuringExecution";
        assert_eq!(
            patch(Some(&preferred), None),
            json!({ "nodeAffinity": { field: null } })
        );
    }
}
