use kplane_model::{NodeName, Reason};
use tokio::time::{Duration, timeout};

use super::{
    APPROVAL_LASTS, Approval, Board, Change, MAX_ORDERS, Orders, Place, Scope, TooMany, Wish,
};
use crate::index::Picture;

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

fn is_frozen(orders: &Orders, name: &str) -> bool {
    orders.frozen(&NodeName::from(name)).is_some()
}

#[test]
fn the_newest_order_that_names_a_node_decides() {
    let orders = Orders::default();
    let one = orders.with(&wish(true, &[node("a")])).unwrap();
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
    let orders = Orders::default();
    let orders = orders.with(&wish(true, &[Scope::All])).unwrap();
    let orders = orders.with(&wish(false, &[node("a")])).unwrap();
    assert_eq!(Orders::read(&orders.write()).unwrap(), orders);
    let many: Vec<Scope> = (0..=MAX_ORDERS).map(|n| node(&format!("n{n}"))).collect();
    assert_eq!(Orders::default().with(&wish(true, &many)), Err(TooMany));
    for damaged in [
        "",
        "{",
        "[]",
        r#"{"version":2,"number":1,"orders":[]}"#,
        r#"{"version":1,"number":18446744073709551615,"orders":[]}"#,
        r#"{"version":1,"number":1,"orders":[{"number":18446744073709551615,"scope":"all","frozen":true,"by":"","at_ms":1,"reason":""}]}"#,
    ] {
        assert!(Orders::read(damaged).is_err(), "{damaged}");
    }
}

fn approval(id: u64, at_ms: u64) -> Change {
    Change::Approve(Approval {
        id,
        by: "alice".to_owned(),
        at_ms,
        picture: Picture::default(),
    })
}

#[test]
fn approvals_are_few_and_end() {
    let lasts = u64::try_from(APPROVAL_LASTS.as_millis()).unwrap();
    let mut orders = Orders::default();
    for id in 0..100 {
        orders = orders.changed(&approval(id, id)).unwrap();
    }
    let ids =
        |orders: &Orders, now| -> Vec<u64> { orders.approvals(now).map(|one| one.id).collect() };
    assert_eq!(ids(&orders, 100), (84..100).collect::<Vec<_>>());
    assert_eq!(ids(&orders, lasts + 98), [99]);
    assert_eq!(ids(&orders, lasts + 99), [0; 0]);
    assert_eq!(Orders::read(&orders.write()).unwrap(), orders);
    let orders = orders.changed(&approval(100, lasts + 99)).unwrap();
    assert_eq!(
        orders.approvals.len(),
        1,
        "those that are over are forgotten"
    );
    let orders = orders.with(&wish(true, &[Scope::All])).unwrap();
    assert_eq!(orders.approvals.len(), 1);
}

#[test]
fn an_approval_covers_the_same_picture_and_that_of_a_later_start() {
    let picture = |held: &str, doubts: &str, services| Picture {
        held: held.to_owned(),
        doubts: doubts.to_owned(),
        services,
    };
    let approved = picture("h", "d", 10);
    for (other, covered) in [
        (picture("h", "d", 9), true),
        (picture("x", "d", 10), false),
        (picture("h", "x", 10), false),
        (picture("h", "", 10), false),
        (picture("", "d", 10), true),
        (picture("", "d", 9), false),
        (picture("", "", 10), false),
    ] {
        assert_eq!(other.is_covered_by(&approved), covered, "{other:?}");
    }
}

#[tokio::test]
async fn replicas_of_a_folder_share_orders_and_damage_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = [Board::default(), Board::default()];
    for board in [&one, &other] {
        board.keep_in(Place::beside(folder.path()));
    }
    assert!(other.changes().borrow().is_none(), "not known yet");
    let name = NodeName::from("a");
    let steps = async {
        let mut changes = other.changes();
        changes.wait_for(Option::is_some).await.unwrap();
        one.order(&wish(true, &[node("a")])).await.unwrap();
        assert!(one.frozen(&name).is_some(), "at once");
        let frozen = |orders: &Option<_>| {
            let orders: Option<&std::sync::Arc<Orders>> = orders.as_ref();
            orders.is_some_and(|orders| orders.frozen(&name).is_some())
        };
        changes.wait_for(frozen).await.unwrap();
        let file = folder.path().join(".kplane-orders.json");
        std::fs::write(&file, "{").unwrap();
        while other.issues().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(other.frozen(&name).is_some());
        let refused = one.order(&wish(false, &[Scope::All])).await.unwrap_err();
        assert!(refused.to_string().contains("damaged"), "{refused}");
        std::fs::remove_file(&file).unwrap();
        one.order(&wish(true, &[node("b")])).await.unwrap();
        assert!(one.frozen(&name).is_some(), "absence is not deletion");
    };
    tokio::select! {
        () = other.follow() => {}
        done = timeout(Duration::from_secs(20), steps) => done.unwrap(),
    }
}

/// A copy of an earlier document freezes nothing, and is told. The next order is written over it.
#[tokio::test(start_paused = true)]
async fn an_older_document_changes_nothing_and_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("orders.json");
    let board = Board::default();
    board.keep_in(Place::SharedFile(file.clone()));
    let (a, b) = (NodeName::from("a"), NodeName::from("b"));
    let code = || board.issues().first().map(|issue| issue.code);
    let until = async |wanted: Option<Reason>| {
        while code() != wanted {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let steps = async {
        let mut changes = board.changes();
        changes.wait_for(Option::is_some).await.unwrap();
        board.order(&wish(true, &[Scope::All])).await.unwrap();
        let copy = std::fs::read(&file).unwrap();
        board.order(&wish(false, &[Scope::All])).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(code(), None);
        std::fs::write(&file, &copy).unwrap();
        until(Some(Reason::OrdersOlder)).await;
        assert!(board.frozen(&a).is_none());
        let text = &board.issues()[0].reason;
        assert!(text.contains("order 1, and order 2 is in force"), "{text}");
        board.order(&wish(true, &[node("b")])).await.unwrap();
        until(None).await;
        assert!(board.frozen(&a).is_none() && board.frozen(&b).is_some());
        let written = Orders::read(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!((written.number, is_frozen(&written, "a")), (3, false));
    };
    tokio::select! {
        () = board.follow() => {}
        done = timeout(Duration::from_secs(600), steps) => done.unwrap(),
    }
    // A replica that starts knows no better.
    std::fs::write(&file, r#"{"version":1,"number":1,"orders":[]}"#).unwrap();
    let next = Board::default();
    next.keep_in(Place::SharedFile(file));
    let mut changes = next.changes();
    tokio::select! {
        () = next.follow() => {}
        _ = changes.wait_for(Option::is_some) => {}
    }
    assert_eq!((next.issues().len(), next.frozen(&b)), (0, None));
}

/// A place without a document could not be read for a time: the problem ends with that.
#[tokio::test(start_paused = true)]
async fn a_problem_ends_also_where_there_is_no_document() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("orders.json");
    let board = Board::default();
    board.keep_in(Place::SharedFile(file.clone()));
    let shows = async |problem: bool| {
        while board.issues().is_empty() == problem {
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
    tokio::select! {
        () = board.follow() => {}
        done = timeout(Duration::from_secs(600), steps) => done.unwrap(),
    }
}

mod rollout {
    //! Settings of the fleet in the document.

    use kplane_model::NodeName;

    use super::super::{Change, Fleet, NotNow, Orders, Refused, Rollout, Settings, Stage, Turn};

    fn settings(backend: &str) -> Settings {
        Settings {
            backend: backend.to_owned(),
            ..Settings::default()
        }
    }

    fn begin(backend: &str, at_ms: u64) -> Change {
        Change::Turn(Turn::Begin(Box::new(Rollout {
            number: 0,
            settings: settings(backend),
            steps: vec![10, 100],
            step: 0,
            up_to: 0,
            healthy_ms: 0,
            timeout_ms: 1,
            by: "ann".to_owned(),
            reason: String::new(),
            at_ms,
            step_at_ms: at_ms,
            stage: Stage::Running,
        })))
    }

    fn end(number: Option<u64>, stage: Stage) -> Change {
        Change::Turn(Turn::End {
            number,
            stage,
            at_ms: 99,
        })
    }

    fn cover(number: u64, up_to: u64) -> Change {
        Change::Turn(Turn::Cover {
            number,
            up_to,
            at_ms: 50,
        })
    }

    fn nodes() -> Vec<NodeName> {
        (0..100).map(|n| format!("n{n}").as_str().into()).collect()
    }

    /// Returns how many of 100 nodes have a backend.
    fn with(orders: &Orders, backend: &str) -> usize {
        let fleet = orders.fleet().unwrap();
        let all = nodes();
        let all = all
            .iter()
            .filter(|node| fleet.settings(node).backend == backend);
        all.count()
    }

    #[test]
    fn steps_cover_more_and_more_nodes_and_always_the_same() {
        let all = nodes();
        let up_to = |percent| Rollout::last_place(7, percent, all.iter());
        let count = |percent| {
            let covered = all
                .iter()
                .filter(|n| Rollout::place(7, n) <= up_to(percent));
            covered.count()
        };
        assert_eq!([1, 10, 25, 99].map(count), [1, 10, 25, 99]);
        assert_eq!(up_to(100), u64::MAX, "nodes that join are covered too");
        assert_eq!(Rollout::last_place(7, 1, all[..3].iter()), {
            let places = all[..3].iter().map(|node| Rollout::place(7, node));
            places.min().unwrap()
        });
        assert_ne!(
            up_to(10),
            Rollout::last_place(8, 10, all.iter()),
            "others begin next time"
        );
    }

    #[test]
    fn a_rollout_goes_its_way_and_the_document_keeps_it() {
        assert_eq!(
            Orders::default().fleet(),
            None,
            "nobody has chosen anything"
        );
        let mut orders = Orders::default().changed(&begin("iptables", 1)).unwrap();
        let number = orders.fleet().unwrap().rollout.as_ref().unwrap().number;
        assert_eq!(
            with(&orders, "iptables"),
            0,
            "no node before the number is known"
        );
        let up_to = Rollout::last_place(number, 10, nodes().iter());
        orders = orders.changed(&cover(number, up_to)).unwrap();
        assert_eq!(with(&orders, "iptables"), 10);
        // Another replica comes to the same result later, and after it.
        assert_eq!(
            orders.changed(&cover(number, 1)).unwrap().fleet(),
            orders.fleet()
        );
        let next = Change::Turn(Turn::Next {
            number,
            from: 0,
            up_to: u64::MAX,
            at_ms: 60,
        });
        orders = orders.changed(&next).unwrap();
        assert_eq!(with(&orders, "iptables"), 100);
        assert_eq!(orders.changed(&next).unwrap().fleet(), orders.fleet());
        let busy = orders.changed(&begin("ipvs", 2)).unwrap_err();
        assert_eq!(busy, Refused::NotNow(NotNow::Running));

        orders = orders.changed(&end(Some(number), Stage::Done)).unwrap();
        assert_eq!(Orders::read(&orders.write()).unwrap(), orders);
        // What is done is the base of the next one.
        orders = orders.changed(&begin("ipvs", 3)).unwrap();
        assert_eq!(with(&orders, "iptables"), 100);
    }

    #[test]
    fn the_way_back_gives_all_nodes_the_settings_from_before() {
        let mut orders = Orders::default().changed(&begin("iptables", 1)).unwrap();
        let number = orders.fleet().unwrap().rollout.as_ref().unwrap().number;
        orders = orders.changed(&cover(number, u64::MAX)).unwrap();
        assert_eq!(with(&orders, "iptables"), 100);
        let stop = end(None, Stage::Back("stopped".to_owned()));
        orders = orders.changed(&stop).unwrap();
        assert_eq!(with(&orders, ""), 100);
        assert!(orders.has(&stop));
        let none = orders.changed(&stop).unwrap_err();
        assert_eq!(none, Refused::NotNow(NotNow::NotRunning));
        // One that is not the present rollout's is no turn.
        orders = orders.changed(&begin("ipvs", 5)).unwrap();
        let late = orders.changed(&end(Some(number), Stage::Done)).unwrap();
        assert_eq!(late.fleet(), orders.fleet());
    }

    #[test]
    fn a_document_with_a_rollout_beyond_the_limits_is_damaged() {
        let good = Orders::default().changed(&begin("iptables", 1)).unwrap();
        let text = good.write();
        for (from, to) in [
            ("\"step\": 0", "\"step\": 2"),
            ("\"iptables\"", &*format!("{:?}", "x".repeat(65))),
        ] {
            let bad = text.replace(from, to);
            assert_ne!(bad, text);
            Orders::read(&bad).unwrap_err();
        }
        assert_eq!(Fleet::default().settings("n1"), &Settings::default());
    }
}
