use kplane_desired_state::index::HeldState;
use kplane_model::{NodeName, Reason, Severity};
use tokio::time::{Duration, timeout};

use super::{
    APPROVAL_LASTS, Approval, Backend, Change, MAX_OVERRIDES, OverrideStore, Overrides, Scope,
    TooMany, Wish,
};

mod map;

fn wish(frozen: bool, scopes: &[Scope]) -> Wish {
    Wish {
        scopes: scopes.to_vec(),
        frozen,
        by: "alice".to_owned(),
        at_ms: 7,
        reason: "a test".to_owned(),
    }
}

fn node(name: &str) -> Scope {
    Scope::Node(name.to_owned())
}

fn is_frozen(overrides: &Overrides, name: &str) -> bool {
    overrides.frozen(&NodeName::from(name)).is_some()
}

#[test]
fn the_newest_order_that_names_a_node_decides() {
    let overrides = Overrides::default();
    let one = overrides.with(&wish(true, &[node("a")])).unwrap();
    assert!(is_frozen(&one, "a") && !is_frozen(&one, "b"));
    let all = one.with(&wish(true, &[Scope::All])).unwrap();
    assert!(is_frozen(&all, "a") && is_frozen(&all, "b"));
    let but_a = all.with(&wish(false, &[node("a")])).unwrap();
    assert!(!is_frozen(&but_a, "a") && is_frozen(&but_a, "b"));
    let none = but_a.with(&wish(false, &[Scope::All])).unwrap();
    assert!(!is_frozen(&none, "a") && !is_frozen(&none, "b"));
    assert_eq!(
        none.latest.len(),
        0,
        "thaws that undo nothing are forgotten"
    );
}

#[test]
fn the_document_says_all_and_is_bounded() {
    let overrides = Overrides::default()
        .with(&wish(true, &[Scope::All]))
        .unwrap()
        .with(&wish(false, &[node("a")]))
        .unwrap();
    assert_eq!(Overrides::read(&overrides.write()).unwrap(), overrides);
    let many: Vec<Scope> = (0..=MAX_OVERRIDES).map(|n| node(&format!("n{n}"))).collect();
    assert_eq!(Overrides::default().with(&wish(true, &many)), Err(TooMany));
    for damaged in [
        "",
        "{",
        "[]",
        r#"{"version":2,"number":1,"orders":[]}"#,
        r#"{"version":1,"number":18446744073709551615,"orders":[]}"#,
        r#"{"version":1,"number":1,"orders":[{"number":18446744073709551615,"scope":"all","frozen":true,"by":"","at_ms":1,"reason":""}]}"#,
    ] {
        assert!(Overrides::read(damaged).is_err(), "{damaged}");
    }
}

/// Fields of other versions of kplane, such as the settings and the earlier state of an early one, are no damage.
#[test]
fn a_document_with_unknown_fields_is_read() {
    let overrides = Overrides::default().with(&wish(true, &[node("a")])).unwrap();
    let more = r#"{
  "fleet": {"base": {"backend": "ipvs"}, "rollout": {"number": 7, "steps": [5, 100], "stage": {"back": "slow"}}},
  "rollback": {"number": 8, "epoch": 1, "revision": 4711, "versions": [["Service", "1", "1"]]},"#;
    let text = overrides.write().replacen('{', more, 1);
    assert_eq!(Overrides::read(&text).unwrap(), overrides);
}

fn approval(id: u64, at_ms: u64) -> Change {
    Change::Approve(Approval {
        id,
        by: "alice".to_owned(),
        at_ms,
        held_state: HeldState::default(),
    })
}

#[test]
fn approvals_are_few_and_end() {
    let lasts = u64::try_from(APPROVAL_LASTS.as_millis()).unwrap();
    let mut overrides = Overrides::default();
    for id in 0..100 {
        overrides = overrides.changed(&approval(id, id)).unwrap();
    }
    let ids = |overrides: &Overrides, now| -> Vec<u64> {
        overrides.approvals(now).map(|one| one.id).collect()
    };
    assert_eq!(ids(&overrides, 100), (84..100).collect::<Vec<_>>());
    assert_eq!(ids(&overrides, lasts + 98), [99]);
    assert_eq!(ids(&overrides, lasts + 99), [0; 0]);
    assert_eq!(Overrides::read(&overrides.write()).unwrap(), overrides);
    let overrides = overrides.changed(&approval(100, lasts + 99)).unwrap();
    assert_eq!(
        overrides.approvals.len(),
        1,
        "those that are over are forgotten"
    );
    let overrides = overrides.with(&wish(true, &[Scope::All])).unwrap();
    assert_eq!(overrides.approvals.len(), 1);
}

#[test]
fn an_approval_covers_the_same_picture_and_that_of_a_later_start() {
    let held_state = |held: &str, doubts: &str, services| HeldState {
        held: held.to_owned(),
        doubts: doubts.to_owned(),
        services,
    };
    let approved = held_state("h", "d", 10);
    for (other, covered) in [
        (held_state("h", "d", 9), true),
        (held_state("x", "d", 10), false),
        (held_state("h", "x", 10), false),
        (held_state("h", "", 10), false),
        (held_state("", "d", 10), true),
        (held_state("", "d", 9), false),
        (held_state("", "", 10), false),
    ] {
        assert_eq!(other.is_covered_by(&approved), covered, "{other:?}");
    }
}

#[tokio::test]
async fn replicas_of_a_folder_share_orders_and_damage_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = [OverrideStore::default(), OverrideStore::default()];
    for overrides in [&one, &other] {
        overrides.keep_in(Backend::beside(folder.path()));
    }
    assert!(other.changes().borrow().is_none(), "not known yet");
    let name = NodeName::from("a");
    let steps = async {
        let mut changes = other.changes();
        changes.wait_for(Option::is_some).await.unwrap();
        one.order(&wish(true, &[node("a")])).await.unwrap();
        assert!(one.frozen(&name).is_some(), "at once");
        let frozen = |overrides: &Option<_>| {
            let overrides: Option<&std::sync::Arc<Overrides>> = overrides.as_ref();
            overrides.is_some_and(|overrides| overrides.frozen(&name).is_some())
        };
        changes.wait_for(frozen).await.unwrap();
        let file = folder.path().join(".kplane-orders.json");
        std::fs::write(&file, "{").unwrap();
        while other.issue().is_none() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(other.frozen(&name).is_some());
        let refused = one.order(&wish(false, &[Scope::All])).await.unwrap_err();
        assert!(refused.to_string().contains("damaged"), "{refused}");
        std::fs::remove_file(&file).unwrap();
        one.order(&wish(true, &[node("b")])).await.unwrap();
        assert!(one.frozen(&name).is_some(), "absence is not deletion");
    };
    while_followed(&other, steps).await;
}

/// Takes steps while a store follows its backend.
async fn while_followed(store: &OverrideStore, steps: impl Future<Output = ()>) {
    tokio::select! {
        () = store.follow() => {}
        done = timeout(Duration::from_secs(600), steps) => done.unwrap(),
    }
}

/// An operator who freezes a node in an emergency must not learn of it then.
#[tokio::test(start_paused = true)]
async fn a_place_that_takes_no_order_is_told_from_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("state");
    let overrides = OverrideStore::default();
    overrides.keep_in(Backend::SharedFile(missing.join("orders.json")));
    let until = async |reported: bool| {
        while overrides.issue().is_some() != reported {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let steps = async {
        until(true).await;
        let issue = overrides.issue().unwrap();
        let (code, severity) = (Reason::OrdersUnreadable, Severity::Warning);
        assert_eq!((issue.code, issue.severity), (code, severity));
        assert!(issue.reason.contains("--state-file"), "{issue:?}");
        std::fs::create_dir(&missing).unwrap();
        until(false).await;
        overrides.order(&wish(true, &[node("a")])).await.unwrap();
    };
    while_followed(&overrides, steps).await;
}

/// A copy of an earlier document freezes nothing, and is told. The next order is written over it.
#[tokio::test(start_paused = true)]
async fn an_older_document_changes_nothing_and_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("orders.json");
    let overrides = OverrideStore::default();
    overrides.keep_in(Backend::SharedFile(file.clone()));
    let (a, b) = (NodeName::from("a"), NodeName::from("b"));
    let code = || overrides.issue().map(|issue| issue.code);
    let until = async |wanted: Option<Reason>| {
        while code() != wanted {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let steps = async {
        let mut changes = overrides.changes();
        changes.wait_for(Option::is_some).await.unwrap();
        overrides.order(&wish(true, &[Scope::All])).await.unwrap();
        let copy = std::fs::read(&file).unwrap();
        overrides.order(&wish(false, &[Scope::All])).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(code(), None);
        std::fs::write(&file, &copy).unwrap();
        until(Some(Reason::OrdersOlder)).await;
        assert!(overrides.frozen(&a).is_none());
        let text = overrides.issue().unwrap().reason;
        assert!(text.contains("order 1, and order 2 is in force"), "{text}");
        overrides.order(&wish(true, &[node("b")])).await.unwrap();
        until(None).await;
        assert!(overrides.frozen(&a).is_none() && overrides.frozen(&b).is_some());
        let written = Overrides::read(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!((written.number, is_frozen(&written, "a")), (3, false));
    };
    while_followed(&overrides, steps).await;
    // A replica that starts knows no better.
    std::fs::write(&file, r#"{"version":1,"number":1,"orders":[]}"#).unwrap();
    let next = OverrideStore::default();
    next.keep_in(Backend::SharedFile(file));
    let mut changes = next.changes();
    tokio::select! {
        () = next.follow() => {}
        _ = changes.wait_for(Option::is_some) => {}
    }
    assert_eq!((next.issue(), next.frozen(&b)), (None, None));
}

/// A thread that waits for the other end of a pipe never comes back.
#[tokio::test]
async fn a_pipe_in_the_place_of_the_document_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("orders.json");
    nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let refused = Backend::SharedFile(file).read().await.unwrap_err();
    assert!(
        refused.to_string().contains("not a regular file"),
        "{refused}"
    );
}

/// A place without a document could not be read for a time: the problem ends with that.
#[tokio::test(start_paused = true)]
async fn a_problem_ends_also_where_there_is_no_document() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("orders.json");
    let overrides = OverrideStore::default();
    overrides.keep_in(Backend::SharedFile(file.clone()));
    let shows = async |problem: bool| {
        while overrides.issue().is_none() == problem {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let steps = async {
        for _ in 0..2 {
            std::fs::create_dir(&file).unwrap();
            shows(true).await;
            std::fs::remove_dir(&file).unwrap();
            shows(false).await;
        }
    };
    while_followed(&overrides, steps).await;
}
