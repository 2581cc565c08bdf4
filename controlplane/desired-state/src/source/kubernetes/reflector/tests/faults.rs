//! Servers that refuse, vanish, forget and lose.

use super::*;

fn refused() -> Failure {
    Failure::Unreachable("Connection refused".to_owned())
}

/// Revoked permissions delete nothing and are reported; their return is detected soon.
#[tokio::test(start_paused = true)]
async fn a_403_keeps_everything() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(10, [put("a", 5)]);
    rig.watch([Step::End]);
    for _ in 0..20 {
        rig.no_watch(Failure::Forbidden("no".to_owned()));
    }
    rig.watch([Step::Say(vec![put("b", 11)]), Step::Hang]);
    rig.probes(10);
    rig.start();
    rig.told_until("done").await;
    assert_eq!(rig.pass(Duration::from_secs(5)).await, Vec::<String>::new());
    let trouble = rig.state().trouble.unwrap();
    assert!(
        trouble.issue.reason.contains("does not permit kplane to watch services"),
        "{trouble:?}"
    );
    assert_eq!(rig.sent(1).await, ["apply b"]);
    assert_eq!(rig.state().trouble, None);
    assert_eq!(rig.lists(), 1);
}

/// The reflector neither spins nor waits for long.
#[tokio::test(start_paused = true)]
async fn an_outage_is_borne_with_patience() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(10, [put("a", 5)]);
    rig.watch([Step::End]);
    for _ in 0..1_000 {
        rig.no_watch(refused());
    }
    rig.start();
    rig.told_until("done").await;
    rig.pass(Duration::from_secs(20)).await;
    let tries = rig.asked().len() - 2;
    // 100 ms doubling to 5 s, drawn from all of it: eight on average.
    assert!((4..60).contains(&tries), "{tries}");
    assert!(rig.upstream.age().unwrap() >= Duration::from_secs(20));
    let trouble = rig.state().trouble.unwrap();
    assert!(
        trouble.issue.reason.contains("Connection refused"),
        "{trouble:?}"
    );
    assert_eq!(rig.state().counts.failures["unreachable"], tries as u64);
}

/// After a short outage the watch continues, and a probe checks at once whether the server is the
/// same.
#[tokio::test(start_paused = true)]
async fn a_restart_of_the_server_resumes() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(10, [put("a", 5)]);
    rig.watch([Step::Fail(Failure::Broken("reset".to_owned()))]);
    rig.no_watch(refused());
    rig.watch([Step::Hang]);
    rig.probes(10);
    rig.start();
    rig.told_until("done").await;
    rig.pass(Duration::from_secs(2)).await;
    assert_eq!(
        rig.asked(),
        ["list", "watch 10", "watch 10", "watch 10", "probe"]
    );
    assert_eq!(rig.state().trouble, None);
}

/// After a long outage everything is listed, because a backup may have been restored.
#[tokio::test(start_paused = true)]
async fn a_long_outage_lists_again() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(10, [put("a", 5)]);
    rig.watch([Step::Fail(Failure::Broken("reset".to_owned()))]);
    rig.start();
    rig.told_until("done").await;
    for _ in 0..60 {
        rig.no_watch(refused());
    }
    rig.list(200, [put("a", 5)]);
    let before = Instant::now();
    assert_eq!(rig.told_by_list(2).await, Vec::<String>::new());
    assert!(before.elapsed() >= LONG_OUTAGE);
}

#[tokio::test(start_paused = true)]
async fn credentials_are_read_again_when_they_are_refused() {
    let mut rig = Rig::new(Resource::Services);
    rig.no_page(Failure::Unauthorized);
    rig.no_page(Failure::Certificate("expired".to_owned()));
    rig.list(10, []);
    rig.start();
    assert_eq!(rig.sent(2).await, ["init", "done"]);
    assert_eq!(rig.renewed(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_busy_server_is_left_alone_for_as_long_as_it_wants() {
    let mut rig = Rig::new(Resource::Services);
    let after = Some(Duration::from_secs(7));
    rig.no_page(Failure::Busy { after });
    rig.list(10, []);
    let before = Instant::now();
    rig.start();
    rig.sent(2).await;
    assert_eq!(before.elapsed(), Duration::from_secs(7));
}

/// A server that compacts faster than the reflector reads is not asked without a pause.
#[tokio::test(start_paused = true)]
async fn lists_that_help_nothing_are_not_repeated_at_once() {
    let mut rig = Rig::new(Resource::Services);
    for _ in 0..500 {
        rig.list(10, [put("a", 5)]);
        rig.watch([Step::Fail(Failure::Gone)]);
    }
    rig.start();
    rig.pass(Duration::from_secs(20)).await;
    assert!(rig.lists() < 60, "{}", rig.lists());
}

/// ServiceCIDRs are not served by older servers.
#[tokio::test(start_paused = true)]
async fn absent_service_cidrs_are_none_until_they_come() {
    let mut rig = Rig::new(Resource::ServiceCidrs);
    rig.no_page(Failure::NotServed);
    rig.no_page(Failure::NotServed);
    rig.list(10, [put("a", 5)]);
    let before = Instant::now();
    rig.start();
    assert_eq!(rig.sent(2).await, ["init", "done"]);
    assert!(rig.state().synced && rig.state().trouble.is_none());
    rig.told_until("+a").await;
    assert_eq!(before.elapsed(), ABSENT * 2);
}

/// The definition of ClusterNetworkPolicies may come later, and have one of two versions.
#[tokio::test(start_paused = true)]
async fn absent_cluster_policies_are_none_until_they_come() {
    let mut rig = Rig::new(Resource::ClusterPolicies { beta: true });
    for _ in 0..3 {
        rig.no_page(Failure::NotServed);
    }
    rig.list(10, [put("a", 5)]);
    let before = Instant::now();
    rig.start();
    assert_eq!(rig.sent(2).await, ["init", "done"]);
    assert!(rig.state().synced && rig.state().trouble.is_none());
    rig.told_until("+a").await;
    assert_eq!(before.elapsed(), ABSENT);
}

/// Missing permissions on ServiceCIDRs delay the start only for a short time.
#[tokio::test(start_paused = true)]
async fn forbidden_service_cidrs_are_done_without() {
    let mut rig = Rig::new(Resource::ServiceCidrs);
    for _ in 0..200 {
        rig.no_page(Failure::Forbidden("no".to_owned()));
    }
    let before = Instant::now();
    rig.start();
    assert_eq!(rig.sent(2).await, ["init", "done"]);
    assert!(before.elapsed() >= OPTIONAL_AFTER);
    assert!(rig.state().trouble.is_some());
    assert_eq!(
        rig.pass(Duration::from_secs(20)).await,
        Vec::<String>::new()
    );
}

#[tokio::test(start_paused = true)]
async fn servers_without_slices_are_asked_for_endpoints() {
    let mut rig = Rig::new(Resource::Slices);
    rig.no_page(Failure::NotServed);
    rig.list(10, [put("a/0/IPv4", 5)]);
    rig.watch([Step::Say(vec![
        put("b/0/IPv4", 11),
        put("b/0/IPv6", 11),
        put("a/0/IPv4", 9),
    ])]);
    rig.start();
    assert_eq!(
        rig.sent(5).await,
        [
            "init",
            "+a/0/IPv4",
            "done",
            "apply b/0/IPv4",
            "apply b/0/IPv6"
        ]
    );
}

/// A resource that disappears is a mistake somewhere, not a deletion.
#[tokio::test(start_paused = true)]
async fn a_404_after_all_deletes_nothing() {
    let tiers = Resource::ClusterPolicies { beta: true };
    for resource in [Resource::Slices, Resource::ServiceCidrs, tiers] {
        let mut rig = Rig::new(resource);
        rig.list(10, [put("a", 5)]);
        rig.watch([Step::Fail(Failure::Gone)]);
        for _ in 0..10 {
            rig.no_page(Failure::NotServed);
        }
        rig.list(12, [put("a", 5), put("b", 11)]);
        rig.start();
        rig.told_until("done").await;
        assert_eq!(rig.told_by_list(2).await, ["apply b"]);
    }
}

fn puts(count: usize) -> impl Iterator<Item = WatchEvent> {
    (0..count).map(|n| put(&format!("o{n}"), 5))
}

/// Most objects are missing: existing ones count at once, missing ones later.
#[tokio::test(start_paused = true)]
async fn a_list_that_lacks_most_is_confirmed_first() {
    let mut rig = Rig::new(Resource::Slices);
    rig.list(10, puts(30));
    rig.watch([Step::Fail(Failure::Gone)]);
    for version in [20, 21, 22] {
        rig.list(version, [put("new", 5)]);
    }
    rig.start();
    rig.told_until("done").await;
    let before = Instant::now();
    assert_eq!(rig.sent(1).await, ["apply new"]);
    let trouble = rig.state().trouble.unwrap();
    assert!(
        trouble.issue.reason.contains("lacks 30 of 30"),
        "{trouble:?}"
    );
    let sent = rig.told_by_list(2).await;
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0].split(' ').count(), 31);
    assert!(before.elapsed() >= Duration::from_secs(6));
    assert_eq!(rig.state().trouble, None);
}

/// An empty list of Services is not "everything deleted".
#[tokio::test(start_paused = true)]
async fn an_empty_list_counts_after_a_minute() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(10, puts(3));
    rig.watch([Step::Fail(Failure::Gone)]);
    for version in 20..40 {
        rig.list(version, []);
    }
    rig.start();
    rig.told_until("done").await;
    let before = Instant::now();
    assert_eq!(rig.sent(1).await, ["vanished o0 o1 o2"]);
    assert!(
        before.elapsed() >= Duration::from_secs(60),
        "{:?}",
        before.elapsed()
    );
}

/// Deletions that a watch names are believed, however many.
#[tokio::test(start_paused = true)]
async fn deletions_by_name_count_at_once() {
    let mut rig = Rig::new(Resource::Services);
    let deletions = (0..30).map(|n| gone(&format!("o{n}"), 11 + n));
    rig.list(10, puts(30));
    rig.watch([Step::Say(deletions.collect()), Step::Fail(Failure::Gone)]);
    rig.list(60, []);
    let before = Instant::now();
    rig.start();
    rig.told_until("done").await;
    assert_eq!(rig.sent(30).await[29], "delete o29");
    assert_eq!(rig.told_by_list(2).await, Vec::<String>::new());
    assert!(before.elapsed() < Duration::from_secs(2));
}
