//! Bad input has a name and a line, and stops nothing else.

use proptest::prelude::*;

use super::*;

const DUMP: &str = include_str!("../../../../../../tests/data/cluster-dump.yaml");

const WEB: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n";
const SLICE: &str = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s}\naddressType: IPv4\n";

/// Returns the results for a YAML file, one per line.
fn found(text: &str) -> Vec<String> {
    lines(&read(text, false, &Memo::default()))
}

fn lines(contents: &Contents) -> Vec<String> {
    let line = |(place, found): &(FilePosition, ParsedItem)| match found {
        ParsedItem::Object(id, _) => format!("{place}: {} {}/{}", id.kind, id.namespace, id.name),
        ParsedItem::Problem(p) => format!("{place}: {}: {}: {}", p.severity, p.object, p.reason),
    };
    contents.found.iter().map(line).collect()
}

#[test]
fn documents_of_all_kinds() {
    let text = format!(
        "# a comment\n---\n{WEB}---\n{SLICE}---\n# nothing\n---\napiVersion: v1\nkind: Node\n\
         metadata: {{name: n1, namespace: x}}\n---\napiVersion: networking.k8s.io/v1\n\
         kind: ServiceCIDR\nmetadata: {{name: kubernetes}}\n"
    );
    assert_eq!(
        found(&text),
        [
            "document 1, line 3: Service default/web",
            "document 2, line 7: EndpointSlice default/s",
            "document 4, line 14: Node /n1",
            "document 5, line 18: ServiceCIDR /kubernetes",
        ]
    );
}

#[test]
fn a_broken_document_does_not_stop_the_others() {
    let text = format!("{WEB}---\nkind: Service\n metadata: x\n---\n{SLICE}");
    assert_eq!(
        found(&text),
        [
            "document 1, line 1: Service default/web",
            "document 2, line 6: error: document: is not valid YAML: mapping values are not \
             allowed in this context",
            "document 3, line 8: EndpointSlice default/s",
        ]
    );
}

#[test]
fn bad_documents_are_named() {
    for (text, expected) in [
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web, namespace: shop}\n",
            "document 1, line 1: warning: Deployment shop/web: is ignored; kplane reads Services, EndpointSlices, Nodes, ServiceCIDRs, NetworkPolicies, ClusterNetworkPolicies, Namespaces and Pods",
        ),
        (
            "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: web}\n",
            "document 1, line 1: warning: Service web: is ignored; kplane reads Services, EndpointSlices, Nodes, ServiceCIDRs, NetworkPolicies, ClusterNetworkPolicies, Namespaces and Pods",
        ),
        (
            "apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata: {name: s}\n",
            "document 1, line 1: error: EndpointSlice default/s: has the unsupported apiVersion \
             \"discovery.k8s.io/v1beta1\"; use discovery.k8s.io/v1",
        ),
        (
            "kind: Service\nmetadata: {name: web}\n",
            "document 1, line 1: error: Service default/web: has no apiVersion; write v1",
        ),
        (
            "metadata: {name: web}\n",
            "document 1, line 1: error: document: has no kind; a document is an object with \
             apiVersion, kind and metadata",
        ),
        (
            "- a\n- b\n",
            "document 1, line 1: error: document: has no kind; a document is an object with \
             apiVersion, kind and metadata",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata:\n  namespace: shop\n",
            "document 1, line 4: error: Service: metadata.name is missing; add it",
        ),
        (
            "apiVersion: v1\nkind: Service\n",
            "document 1, line 1: error: Service: metadata is missing; add it",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: \"a\\e[31m\"}\n",
            "document 1, line 1: error: Service: metadata has the name \"a\\u{1b}[31m\" and the \
             namespace \"\"; use lower-case letters, digits, - and .",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: ''}\n",
            "document 1, line 1: error: Service: metadata has the name \"\" and the namespace \
             \"\"; use lower-case letters, digits, - and .",
        ),
        (
            "apiVersion: v1\nkind: \"\\e[31m\"\n",
            "document 1, line 1: warning: object of an unknown kind: is ignored; kplane reads Services, EndpointSlices, Nodes, ServiceCIDRs, NetworkPolicies, ClusterNetworkPolicies, Namespaces and Pods",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  ports:\n  - port: http\n",
            "document 1, line 6: error: Service default/web: spec.ports[0].port must be a whole \
             number, not the text \"http\"; correct it",
        ),
        (
            "apiVersion: v1\nkind: List\nitems: x\n",
            "document 1, line 1: error: List: items must be a list; correct it",
        ),
        (
            "apiVersion: v1\nkind: DeploymentList\nitems: []\n",
            "document 1, line 1: warning: DeploymentList: is ignored; kplane reads Services, EndpointSlices, Nodes, ServiceCIDRs, NetworkPolicies, ClusterNetworkPolicies, Namespaces and Pods",
        ),
    ] {
        assert_eq!(found(text), [expected], "{text}");
    }
}

#[test]
fn a_bad_item_of_a_list_does_not_stop_the_others() {
    let text = "apiVersion: v1\nitems:\n\
        - apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n\
        - apiVersion: v1\n  kind: Service\n  metadata: {name: b\n\
        - apiVersion: v1\n  kind: Service\n  metadata: {name: c}\n  spec: 5\n\
        - apiVersion: v1\n  kind: Service\n  metadata: {name: d}\n\
        kind: List\n";
    assert_eq!(
        found(text),
        [
            "document 1, item 1, line 3: Service default/a",
            "document 1, item 2, line 8: error: document: is not valid YAML: unclosed bracket '{'",
            "document 1, item 3, line 12: error: Service default/c: spec must be a mapping, not \
             the number 5; correct it",
            "document 1, item 4, line 13: Service default/d",
        ]
    );
}

#[test]
fn lists_of_all_shapes() {
    let item = "{apiVersion: v1, kind: Service, metadata: {name: a}}";
    let expected = |line| {
        vec![format!(
            "document 1, item 1, line {line}: Service default/a"
        )]
    };
    for (text, line) in [
        (format!("kind: List\nitems:\n- {item}\n"), 3),
        (format!("kind: List\nitems:\n  - {item}\n"), 3),
        (format!("items:\n\n# hi\n- {item}\n\nkind: List\n"), 4),
        (format!("kind: List\nitems: [{item}]\n"), 2),
        (format!("{{kind: List, items: [\n{item}]}}\n"), 2),
        (
            "apiVersion: v1\nkind: ServiceList\nitems:\n- metadata: {name: a}\n".to_owned(),
            4,
        ),
        (
            "items:\n- metadata: {name: a}\nkind: ServiceList\napiVersion: v1\n".to_owned(),
            2,
        ),
        (
            format!("kind: List\nitems:\n- kind: List\n  items:\n  - {item}\n"),
            5,
        ),
    ] {
        assert_eq!(found(&text), expected(line), "{text}");
    }
    assert!(found("kind: List\nitems: []\n").is_empty());
    assert!(found("kind: List\n").is_empty());
}

#[test]
fn aliases_between_items_work() {
    let text = "kind: List\nitems:\n\
        - apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n  spec: &spec {clusterIP: 10.0.0.1}\n\
        - apiVersion: v1\n  kind: Service\n  metadata: {name: b}\n  spec: *spec\n";
    assert_eq!(
        found(text),
        [
            "document 1, item 1, line 3: Service default/a",
            "document 1, item 2, line 7: Service default/b",
        ]
    );
}

/// Each document has its own limits, and the others are served.
#[test]
fn a_bomb_is_refused_by_its_line_and_the_rest_is_served() {
    let bomb = (1..9).fold("a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned(), |text, level| {
        let aliases = vec![format!("*a{}", level - 1); 9].join(",");
        format!("{text}a{level}: &a{level} [{aliases}]\n")
    });
    let web = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n";
    let found = found(&format!("{web}---\n{bomb}---\n{web}"));
    assert_eq!(found.len(), 3, "{found:?}");
    assert_eq!(found[0], "document 1, line 1: Service default/web");
    let refused = "document 2, line 8: error: document: is not valid YAML: YAML document too large or \
                   too complex: total_replayed_events";
    assert!(found[1].starts_with(refused), "{}", found[1]);
    assert_eq!(found[2], "document 3, line 15: Service default/web");
}

#[test]
fn json_with_and_without_the_name() {
    let service = r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}}"#;
    let text = format!("{service}\n{{\"kind\": \"List\", \"items\": [{service}, {{}}]}}\n");
    let expected = [
        "document 1, line 1: Service default/a",
        "document 2, item 1: Service default/a",
        "document 2, item 2: error: document: has no kind; a document is an object with \
         apiVersion, kind and metadata",
    ];
    assert_eq!(found(&text), expected);
    assert_eq!(lines(&read(&text, true, &Memo::default())), expected);
    assert_eq!(
        lines(&read("{\"a\": 1}\n{\"a\": ", true, &Memo::default())),
        [
            "document 1, line 1: error: document: has no kind; a document is an object with \
             apiVersion, kind and metadata",
            "document 2, line 2: error: document: is not valid JSON: EOF while parsing a value",
        ]
    );
    // YAML that begins like JSON.
    let yaml = "{apiVersion: v1, kind: Service, metadata: {name: a}}";
    assert_eq!(found(yaml), ["document 1, line 1: Service default/a"]);
}

#[test]
fn byte_order_mark_and_line_ends_of_windows() {
    let text = format!("\u{feff}{WEB}---\n{SLICE}").replace('\n', "\r\n");
    assert_eq!(
        found(&text),
        [
            "document 1, line 1: Service default/web",
            "document 2, line 5: EndpointSlice default/s"
        ]
    );
}

#[test]
fn blank_is_not_an_empty_list() {
    let blank = |text| read(text, false, &Memo::default()).blank;
    for text in ["", "\n \n", "# nothing\n", "---\n---\n# x\n"] {
        assert!(blank(text), "{text:?}");
    }
    assert!(!blank("kind: List\nitems: []\n"));
    assert!(!blank(WEB));
}

#[test]
fn what_has_not_changed_is_not_parsed_again() {
    let first = read(DUMP, false, &Memo::default());
    let changed = DUMP.replacen("port: 1234\n", "port: 1235\n", 1);
    let second = read(&format!("# a line more\n{changed}"), false, &first.memo);
    let same = first.found.iter().zip(&second.found).filter(|(a, b)| match (&a.1, &b.1) {
        (ParsedItem::Object(_, a), ParsedItem::Object(_, b)) => Arc::ptr_eq(a, b),
        _ => false,
    });
    assert_eq!(
        (first.found.len(), second.found.len(), same.count()),
        (52, 52, 51)
    );
    assert_eq!(second.found[0].0.line, first.found[0].0.line + 1);
}

#[test]
fn items_read_alone_are_the_same_as_read_together() {
    let alone = read(DUMP, false, &Memo::default());
    // A comment behind `items:` would do as well; a directive makes no difference to the objects.
    let together = read(
        &DUMP.replacen("items:\n", "items: &x\n", 1),
        false,
        &Memo::default(),
    );
    assert_eq!(alone.found, together.found);
}

/// Text of broken input: pieces of YAML, in any order.
fn yaml_soup() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("apiVersion: v1\n"),
        Just("kind: List\n"),
        Just("kind: Service\n"),
        Just("items:\n"),
        Just("metadata:\n"),
        Just("  name: x\n"),
        Just("- "),
        Just("---\n"),
        Just("...\n"),
        Just("  "),
        Just("&a "),
        Just("*a "),
        Just("[{"),
        Just("\"\n"),
        Just("|\n"),
        Just("? "),
        Just("<<: "),
        Just("%YAML 1.2\n"),
        Just("!!binary "),
        Just("\u{feff}"),
        Just("\r"),
        Just("\t"),
        Just(": "),
    ];
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC*", json: bool) {
        read(&text, json, &Memo::default());
    }

    #[test]
    fn no_soup_makes_the_reader_panic(text in yaml_soup()) {
        let contents = read(&text, false, &Memo::default());
        // Reading again with the memo gives the same result.
        let again = read(&text, false, &contents.memo);
        prop_assert_eq!(again.found, contents.found);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Cuts, doublings and overwrites anywhere in a real dump: no panic, and places stay inside.
    #[test]
    fn no_damage_to_a_dump_makes_the_reader_panic(
        at in 0..9_000_usize,
        cut in 0..200_usize,
        insert in "[ \\-:\\[\\]{}\"'|&*#%a0\n]{0,8}",
    ) {
        let mut text: String = DUMP.chars().take(9_000).collect();
        let end = (at + cut).min(text.len());
        text.replace_range(at.min(end)..end, &insert);
        let contents = read(&text, false, &Memo::default());
        let lines = text.lines().count() + 1;
        for (place, _) in &contents.found {
            prop_assert!((1..=lines).contains(&place.line), "{place}");
        }
    }
}
