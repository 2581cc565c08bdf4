use kplane_model::NodeName;
use tokio::time::{Duration, timeout};

use super::{Board, MAX_ORDERS, Orders, Place, Scope, TooMany, Wish};

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
    for damaged in ["", "{", "[]", r#"{"version":2,"number":1,"orders":[]}"#] {
        assert!(Orders::read(damaged).is_err(), "{damaged}");
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
    tokio::select! {
        () = other.follow() => {}
        done = timeout(Duration::from_secs(20), steps) => done.unwrap(),
    }
}
