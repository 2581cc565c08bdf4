//! Tests with real sockets. Each uses its own name, because all tests share the network namespace.

use super::*;

fn name(test: &str) -> String {
    format!("kplane-test-{test}-{}", std::process::id())
}

#[test]
fn one_has_it_and_the_next_one_hears_who() {
    let name = name("one");
    assert_eq!(holder(&name), Ok(None));
    let claim = Claim::take_named(&name, None).unwrap().unwrap();
    let Err(Taken(first)) = Claim::take_named(&name, None) else {
        panic!("two have it");
    };
    let this = Holder {
        pid: Some(std::process::id()),
        uid: geteuid().as_raw(),
    };
    assert_eq!(first, this);
    assert_eq!(holder(&name), Ok(Some(this)));
    let reported = Taken(first).to_string();
    let pid = format!("(process {} of user", std::process::id());
    assert!(reported.contains(&pid), "{reported}");
    drop(claim);
    assert!(Claim::take_named(&name, None).unwrap().is_some());
}

/// The earlier agent may have to finish a transaction.
#[tokio::test(start_paused = true)]
async fn a_start_waits_for_the_end_of_the_one_before() {
    let name = name("waits");
    let claim = Claim::take_named(&name, None).unwrap();
    let begin = Instant::now();
    let end = tokio::spawn(async move {
        sleep(PATIENCE / 2).await;
        drop(claim);
    });
    let next = Claim::wait_and_take_named(&name, None).await;
    assert!(next.unwrap().is_some());
    let waited = begin.elapsed();
    assert!((PATIENCE / 2..PATIENCE).contains(&waited), "{waited:?}");
    end.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_start_gives_up_beside_one_that_stays() {
    let name = name("stays");
    let _claim = Claim::take_named(&name, None).unwrap();
    let begin = Instant::now();
    let next = Claim::wait_and_take_named(&name, None).await;
    assert!(matches!(next, Err(Taken(_))), "{next:?}");
    assert!(begin.elapsed() >= PATIENCE);
}

/// The queue of a socket without a process that accepts fills up, but a query must never wait.
#[tokio::test]
async fn whoever_asks_is_accepted() {
    let name = name("asked");
    let claim = Claim::take_named(&name, None).unwrap().unwrap();
    let watch = tokio::spawn(claim.watch().unwrap());
    for _ in 0..10_000 {
        let found = holder(&name).unwrap().unwrap();
        assert!(found.is_believed(), "{found}");
        tokio::task::yield_now().await;
    }
    watch.abort();
    // The claim is still held after its watch has ended.
    assert!(watch.await.is_err());
    assert!(Claim::take_named(&name, None).is_err());
}

/// A user who is neither root nor the agent's own, or one who accepts no connection, keeps no agent
/// away.
#[test]
fn a_stranger_is_not_believed() {
    let stranger = Holder {
        pid: Some(7),
        uid: geteuid().as_raw() + 1,
    };
    assert!(!stranger.is_believed());
    let name = name("full");
    let _claim = Claim::take_named(&name, None).unwrap();
    let most = 100_000;
    let asked = (0..most).find(|_| !holder(&name).unwrap().unwrap().is_believed());
    assert!(asked.is_some(), "the queue takes {most}");
    assert!(matches!(Claim::take_named(&name, None), Ok(None)));
}
