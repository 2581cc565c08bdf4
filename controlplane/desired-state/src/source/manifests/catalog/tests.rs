//! The catalog deletes only objects that are known to be gone.

use std::fmt::Write;

use proptest::prelude::*;

use super::*;

/// A catalog that gets files by name and contents.
#[derive(Default)]
struct Folder(Catalog);

impl Folder {
    /// Returns the events after files were written, one per line.
    fn write(&mut self, files: &[(&str, &str)]) -> Vec<String> {
        let contents = |text: &str| FileChange::Contents(text.as_bytes().to_vec());
        self.apply(files.iter().map(|(name, text)| (*name, contents(text))).collect())
    }

    fn remove(&mut self, name: &str) -> Vec<String> {
        self.apply(vec![(name, FileChange::Removed)])
    }

    fn apply(&mut self, changes: Vec<(&str, FileChange)>) -> Vec<String> {
        let changes = changes.into_iter().map(|(name, change)| (name.into(), change));
        lines(self.0.apply(changes, Vec::new()))
    }
}

fn lines(events: Vec<Event>) -> Vec<String> {
    let mut lines = Vec::new();
    for event in events {
        match event {
            Event::Apply(o) => lines.push(format!("apply {} ({})", name(&o.object), o.location)),
            Event::Delete(id) => lines.push(format!("delete {}", id.name)),
            Event::Vanished(ids) => lines.push(vanished(&ids)),
            // Issues have tests of their own.
            Event::Doubts(_) => {}
            Event::Issues(issues) if issues.is_empty() => lines.push("no issues".to_owned()),
            Event::Issues(issues) => {
                lines.extend(issues.iter().map(|i| format!("{}: {i}", i.severity)));
            }
            other => lines.push(format!("{other:?}")),
        }
    }
    lines
}

fn vanished(ids: &[ObjectId]) -> String {
    let names: Vec<&str> = ids.iter().map(|id| &*id.name).collect();
    format!("vanished {}", names.join(" "))
}

/// Returns the name and the cluster address, which distinguishes versions.
fn name(object: &Object) -> String {
    match object {
        Object::Service(s) => match &s.spec.cluster_ip {
            Some(ip) => format!("{}={ip}", s.metadata.name),
            None => s.metadata.name.to_string(),
        },
        other => other.metadata().name.to_string(),
    }
}

/// Services as documents, such as `a=10.0.0.1 b`.
fn services(names: &str) -> String {
    let mut text = String::new();
    for service in names.split(' ') {
        let (name, ip) = service.split_once('=').unwrap_or((service, "null"));
        let _ = writeln!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
             spec: {{clusterIP: {ip}}}"
        );
    }
    text
}

const BROKEN: &str = "---\na: b: c\n";
const NONE: [&str; 0] = [];

#[test]
fn only_differences_are_told() {
    let mut folder = Folder::default();
    assert_eq!(
        folder.write(&[("x.yaml", &services("a b"))]),
        [
            "apply a (x.yaml, document 1, line 2)",
            "apply b (x.yaml, document 2, line 7)"
        ]
    );
    let text = services("a b");
    assert_eq!(folder.write(&[("x.yaml", &text)]), NONE);
    // Other line numbers, order, comments and annotations change nothing.
    let shuffled = format!("# hello\n{}", services("b a"))
        .replace("{name: a}", "{name: a, annotations: {note: x}}");
    assert_eq!(folder.write(&[("x.yaml", &shuffled)]), NONE);
    assert_eq!(
        folder.write(&[("x.yaml", &services("a=10.0.0.1 c"))]),
        [
            "apply a=10.0.0.1 (x.yaml, document 1, line 2)",
            "apply c (x.yaml, document 2, line 7)",
            "vanished b"
        ]
    );
    assert_eq!(folder.remove("x.yaml"), ["delete a", "delete c"]);
}

#[test]
fn a_snapshot_has_all_kinds_in_one_batch() {
    let mut folder = Folder::default();
    folder.write(&[("x.yaml", &format!("{}{BROKEN}", services("b a")))]);
    let reported: Vec<String> = folder
        .0
        .snapshot()
        .iter()
        .map(|event| match event {
            Event::InitApply(located) => format!("{} {}", name(&located.object), located.location),
            Event::Issues(issues) => format!("{} issues", issues.len()),
            Event::Doubts(doubts) => format!("{} doubts", doubts.len()),
            other => format!("{other:?}"),
        })
        .collect();
    assert_eq!(
        reported,
        [
            "Init(Service)",
            "a x.yaml, document 2, line 7",
            "b x.yaml, document 1, line 2",
            "InitDone(Service)",
            "Init(EndpointSlice)",
            "InitDone(EndpointSlice)",
            "Init(Node)",
            "InitDone(Node)",
            "Init(ServiceCidr)",
            "InitDone(ServiceCidr)",
            "Init(NetworkPolicy)",
            "InitDone(NetworkPolicy)",
            "Init(Namespace)",
            "InitDone(Namespace)",
            "Init(Pod)",
            "InitDone(Pod)",
            "Init(ClusterNetworkPolicy)",
            "InitDone(ClusterNetworkPolicy)",
            "1 issues",
            "2 doubts",
        ]
    );
}

#[test]
fn of_duplicates_the_first_file_wins_and_the_second_takes_over() {
    let mut folder = Folder::default();
    assert_eq!(
        folder.write(&[("b.yaml", &services("web=10.0.0.2"))]),
        ["apply web=10.0.0.2 (b.yaml, document 1, line 2)"]
    );
    let refused = "error: b.yaml, document 1, line 2: Service default/web: is refused because \
                   a.yaml, document 1, line 2 has the same object; remove one of the two";
    assert_eq!(
        folder.write(&[("a.yaml", &services("web=10.0.0.1"))]),
        ["apply web=10.0.0.1 (a.yaml, document 1, line 2)", refused]
    );
    // A change to the refused object changes nothing.
    assert_eq!(folder.write(&[("b.yaml", &services("web=10.0.0.3"))]), NONE);
    assert_eq!(
        folder.remove("a.yaml"),
        [
            "apply web=10.0.0.3 (b.yaml, document 1, line 2)",
            "no issues"
        ]
    );
}

#[test]
fn of_duplicates_in_a_file_the_first_document_wins() {
    let mut folder = Folder::default();
    assert_eq!(
        folder.write(&[("a.yaml", &services("web=10.0.0.1 web=10.0.0.2"))]),
        [
            "apply web=10.0.0.1 (a.yaml, document 1, line 2)",
            "error: a.yaml, document 2, line 7: Service default/web: is refused because a.yaml, \
             document 1, line 2 has the same object; remove one of the two",
        ]
    );
}

#[test]
fn equal_duplicates_take_over_without_an_event() {
    let mut folder = Folder::default();
    folder.write(&[("a.yaml", &services("web")), ("b.yaml", &services("web"))]);
    assert_eq!(folder.remove("a.yaml"), ["no issues"]);
}

#[test]
fn an_object_that_moves_is_not_deleted() {
    let mut folder = Folder::default();
    folder.write(&[("a.yaml", &services("web dns"))]);
    let moved = FileChange::Contents(services("web dns").into_bytes());
    assert_eq!(
        folder.apply(vec![("a.yaml", FileChange::Gone), ("b.yaml", moved)]),
        NONE
    );
    assert_eq!(folder.remove("b.yaml"), ["delete dns", "delete web"]);
}

#[test]
fn a_broken_document_keeps_what_the_file_had() {
    let mut folder = Folder::default();
    folder.write(&[("x.yaml", &services("a b c"))]);
    let half = format!("{}{BROKEN}", services("a=10.0.0.1"));
    assert_eq!(
        folder.write(&[("x.yaml", &half)]),
        [
            "apply a=10.0.0.1 (x.yaml, document 1, line 2)",
            "error: x.yaml, document 2, line 7: document: is not valid YAML: mapping values are \
             not allowed in this context; 2 objects of this file keep their last good state",
        ]
    );
    // The file is still broken, in another way: the objects stay.
    assert_eq!(
        folder.write(&[("x.yaml", "a: [")]),
        [
            "error: x.yaml, document 1, line 1: document: is not valid YAML: unclosed bracket '['; \
             3 objects of this file keep their last good state",
        ]
    );
    assert_eq!(
        folder.write(&[("x.yaml", &services("b"))]),
        ["vanished a c", "no issues"]
    );
}

#[test]
fn a_malformed_object_keeps_its_last_good_state() {
    let mut folder = Folder::default();
    folder.write(&[("x.yaml", &services("a b c"))]);
    let text = services("a b").replace("{name: a}\nspec: {clusterIP: null}", "{name: a}\nspec: 5");
    assert_eq!(
        folder.write(&[("x.yaml", &text)]),
        [
            "vanished c",
            "error: x.yaml, document 1, line 5: Service default/a: spec must be a mapping, not the \
             number 5; correct it; its last good state stays",
        ]
    );
    assert_eq!(
        folder.remove("x.yaml"),
        ["delete a", "delete b", "no issues"]
    );
}

#[test]
fn a_malformed_object_that_was_never_good_is_only_named() {
    let mut folder = Folder::default();
    let text = services("a").replace("{clusterIP: null}", "5");
    assert_eq!(
        folder.write(&[("x.yaml", &text)]),
        [
            "error: x.yaml, document 1, line 5: Service default/a: spec must be a mapping, not the \
             number 5; correct it",
        ]
    );
}

#[test]
fn an_object_whose_name_is_lost_keeps_all_of_the_file() {
    let mut folder = Folder::default();
    folder.write(&[("x.yaml", &services("a b"))]);
    let text = services("a b").replace("name: a", "nam: a");
    assert_eq!(
        folder.write(&[("x.yaml", &text)]),
        [
            "error: x.yaml, document 1, line 4: Service: metadata.name is missing; add it; 1 \
             object of this file keeps its last good state",
        ]
    );
}

#[test]
fn an_emptied_file_keeps_its_objects() {
    for blank in ["", "\n\n", "# nothing left\n", "---\n"] {
        let mut folder = Folder::default();
        folder.write(&[("x.yaml", &services("a b"))]);
        let reported = "warning: x.yaml: file: is empty; delete the file to remove its objects; 2 \
                    objects of this file keep their last good state";
        assert_eq!(folder.write(&[("x.yaml", blank)]), [reported]);
        assert_eq!(folder.write(&[("x.yaml", blank)]), NONE);
        assert_eq!(
            folder.remove("x.yaml"),
            ["delete a", "delete b", "no issues"]
        );
    }
    let mut folder = Folder::default();
    assert_eq!(folder.write(&[("new.yaml", "")]), NONE);
}

#[test]
fn an_empty_list_removes_the_objects() {
    let mut folder = Folder::default();
    folder.write(&[("x.yaml", &services("a"))]);
    assert_eq!(
        folder.write(&[("x.yaml", "kind: List\nitems: []\n")]),
        ["vanished a"]
    );
}

#[test]
fn a_file_that_cannot_be_read_keeps_its_objects() {
    let mut folder = Folder::default();
    folder.write(&[("x.yaml", &services("a"))]);
    let unreadable = FileChange::Unreadable("Permission denied (os error 13)".to_owned());
    assert_eq!(
        folder.apply(vec![("x.yaml", unreadable)]),
        [
            "error: x.yaml: file: cannot be read: Permission denied (os error 13); 1 object of \
             this file keeps its last good state",
        ]
    );
    let binary = FileChange::Contents(b"a: 1\nb: \xff\n".to_vec());
    assert_eq!(
        folder.apply(vec![("x.yaml", binary)]),
        [
            "error: x.yaml: file: is not UTF-8 text (line 2); convert it; 1 object of this \
             file keeps its last good state",
        ]
    );
    assert_eq!(folder.write(&[("x.yaml", &services("a"))]), ["no issues"]);
}

#[test]
fn what_was_kept_gives_way_to_what_is_there() {
    let mut folder = Folder::default();
    folder.write(&[("a.yaml", &services("web=10.0.0.1"))]);
    folder.write(&[("a.yaml", BROKEN)]);
    assert_eq!(
        folder.write(&[("b.yaml", &services("web=10.0.0.2"))]),
        ["apply web=10.0.0.2 (b.yaml, document 1, line 2)"]
    );
    // The object does not come back.
    assert_eq!(folder.remove("b.yaml"), ["delete web"]);
}

#[test]
fn issues_are_limited_errors_first() {
    let mut folder = Folder::default();
    let mut text = "---\napiVersion: v1\nkind: Job\n".repeat(MAX_ISSUES + 5);
    text += BROKEN;
    let reported = folder.write(&[("x.yaml", &text)]);
    assert_eq!(reported.len(), MAX_ISSUES + 1);
    assert!(
        reported[0].starts_with("error: x.yaml, document 1006, line 3017: document: is not valid")
    );
    assert_eq!(
        reported[MAX_ISSUES],
        "warning: input: 6 further problems are not listed; fix these first"
    );
}

/// States of a file: services with versions, broken, blank, unreadable or gone.
fn any_change() -> impl Strategy<Value = Option<String>> {
    let service = ("[a-e]", 0..3_u8).prop_map(|(name, n)| services(&format!("{name}=10.0.0.{n}")));
    prop_oneof![
        6 => prop::collection::vec(service, 1..4).prop_map(|texts| Some(texts.concat())),
        1 => Just(Some(format!("{}{BROKEN}", services("a=10.0.0.9")))),
        1 => Just(Some(services("b").replace("spec: {clusterIP: null}", "spec: 5"))),
        1 => Just(Some(String::new())),
        1 => Just(None),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A follower of the events has the same objects as the catalog, and no event is empty. Once
    /// all files are good, their history does not matter.
    #[test]
    fn events_lead_to_what_is_there(
        changes in prop::collection::vec(("[xyz]", any_change()), 0..30),
        last in prop::collection::vec("[a-e]( [a-e]){0,2}", 3),
    ) {
        let mut catalog = Catalog::default();
        let mut follower = BTreeMap::<ObjectId, Object>::new();
        let last_files: Vec<_> = ["x", "y", "z"]
            .iter()
            .zip(&last)
            .map(|(f, t)| (f.to_string(), Some(services(t))))
            .collect();
        for (file, text) in changes.into_iter().chain(last_files.clone()) {
            for event in catalog.apply([change(&file, text)], Vec::new()) {
                match event {
                    Event::Apply(located) => {
                        let id = located.object.id();
                        let before = follower.insert(id, located.object.clone());
                        prop_assert_ne!(before, Some(located.object));
                    }
                    Event::Delete(id) => prop_assert!(follower.remove(&id).is_some()),
                    Event::Vanished(ids) => for id in ids {
                        prop_assert!(follower.remove(&id).is_some());
                    }
                    Event::Issues(_) | Event::Doubts(_) => {}
                    other => prop_assert!(false, "{:?}", other),
                }
            }
            let served = catalog.served.iter().map(|(id, o)| (id.clone(), Object::clone(o)));
            prop_assert_eq!(&follower, &served.collect());
        }
        let mut fresh = Catalog::default();
        fresh.apply(last_files.into_iter().map(|(f, t)| change(&f, t)), Vec::new());
        prop_assert_eq!(catalog.snapshot(), fresh.snapshot());
    }
}

fn change(file: &str, text: Option<String>) -> (Arc<str>, FileChange) {
    let change = text.map_or(FileChange::Gone, |text| {
        FileChange::Contents(text.into_bytes())
    });
    (file.into(), change)
}
