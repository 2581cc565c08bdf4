//! Faults of an API server, from a script. The paused clock advances only when all tasks wait.

mod faults;
mod looks;
mod script;

use super::*;
use crate::source::kubernetes::transport::ObjectPage;
use script::{Rig, Step, bookmark, changed, end, gone, page, put, unreadable};

/// The whole life: a streaming list, changes, and the end of a watch.
#[tokio::test(start_paused = true)]
async fn a_streaming_list_goes_on_as_a_watch() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([
        Step::Say(vec![put("a", 5), put("b", 3)]),
        Step::Say(vec![put("c", 4), end(10), put("d", 11)]),
        Step::Say(vec![gone("a", 12), bookmark(20)]),
        Step::End,
    ]);
    rig.watch([Step::Say(vec![put("b", 21)])]);
    rig.start();
    assert_eq!(
        rig.told(8).await,
        [
            "init", "+a", "+b", "+c", "done", "apply d", "delete a", "apply b"
        ]
    );
    assert_eq!(rig.asked(), ["stream", "watch 20"]);
    assert!(rig.state().synced);
    assert_eq!(rig.state().counts.lists, 1);
}

#[tokio::test(start_paused = true)]
async fn without_streaming_lists_there_are_pages() {
    let refusals = [
        Failure::of_status(400, "sendInitialEvents is forbidden", None),
        Failure::of_status(422, "", None),
        Failure::of_status(500, "", None),
    ];
    for refusal in refusals {
        let mut rig = Rig::new(Resource::Slices);
        rig.no_watch(refusal);
        rig.page(page(10, &["a"], Some("more")));
        rig.page(page(10, &["b"], None));
        rig.watch([Step::Say(vec![put("c", 11)])]);
        rig.start();
        let before = Instant::now();
        assert_eq!(rig.told(5).await, ["init", "+a", "+b", "done", "apply c"]);
        assert_eq!(rig.asked(), ["stream", "list", "list more", "watch 10"]);
        assert_eq!(before.elapsed(), Duration::ZERO);
    }
}

/// etcd 3.4: the server says 200 and then ERROR 500 (measured). An old server without streaming
/// lists treats the request as an ordinary watch: it sends objects, but never an end.
#[tokio::test(start_paused = true)]
async fn streaming_lists_that_fail_later_become_pages_and_that_is_remembered() {
    let beginnings = [
        vec![Step::Fail(Failure::of_status(
            500,
            "RequestWatchProgress is disabled",
            None,
        ))],
        vec![Step::Say(vec![put("a", 5)]), Step::Hang],
        vec![Step::Say(vec![put("a", 5), bookmark(5)])],
        vec![Step::End],
    ];
    for beginning in beginnings {
        let mut rig = Rig::new(Resource::Slices);
        rig.watch(beginning);
        rig.page(page(10, &["b"], None));
        rig.watch([Step::Fail(Failure::Gone)]);
        rig.page(page(12, &["b"], None));
        rig.watch([Step::Say(vec![put("c", 13)])]);
        rig.start();
        let before = Instant::now();
        let told = rig.told_until("apply c").await;
        assert_eq!(told[told.len() - 4..], ["init", "+b", "done", "apply c"]);
        assert_eq!(
            rig.asked(),
            ["stream", "list", "watch 10", "list", "watch 12"]
        );
        assert!(before.elapsed() <= STREAM_SILENCE);
    }
}

/// Objects of a later list are passed on only when it is complete, and then only its changes.
#[tokio::test(start_paused = true)]
async fn compaction_lists_again_and_tells_nothing_before_the_end() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([
        Step::Say(vec![put("a", 5), put("b", 6), put("d", 7), end(10)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.watch([
        Step::Say(vec![changed("a", 12), put("new", 13)]),
        Step::Fail(Failure::Broken("cut".to_owned())),
    ]);
    rig.watch([Step::Say(vec![
        put("new", 13),
        changed("a", 14),
        put("c", 19),
        put("d", 7),
        gone("c", 20),
        end(20),
    ])]);
    rig.start();
    assert_eq!(rig.told(5).await, ["init", "+a", "+b", "+d", "done"]);
    assert_eq!(
        rig.told_by_list(2).await,
        ["apply a", "apply new", "vanished b"]
    );
    assert_eq!(rig.asked(), ["stream", "stream", "stream"]);
}

/// Known objects are not passed on again, whether the list is streamed or in pages.
#[tokio::test(start_paused = true)]
async fn a_list_of_what_is_known_tells_nothing() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([
        Step::Say(vec![put("a", 5), put("b", 6), end(10)]),
        Step::Say(vec![changed("a", 11), gone("b", 12), put("c", 13)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.watch([
        Step::Say(vec![changed("a", 11), put("c", 13), end(20)]),
        Step::Say(vec![put("a", 21)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.no_watch(Failure::of_status(400, "", None));
    rig.page(page(30, &["c"], Some("more")));
    rig.page(page(30, &["a"], None));
    rig.start();
    rig.told_until("apply c").await;
    assert_eq!(rig.told_by_list(2).await, ["apply a"]);
    assert_eq!(rig.told_by_list(3).await, Vec::<String>::new());
    assert_eq!(rig.asked().last().unwrap(), "watch 30");
    assert!(rig.upstream.age().unwrap() < Duration::from_secs(1));
}

/// An object that becomes unreadable keeps its state, in a watch and in a list, and is reported.
#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_keeps_its_last_good_state() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([
        Step::Say(vec![put("a", 5), put("b", 6), end(10)]),
        Step::Say(vec![unreadable("a", 11)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.watch([
        Step::Say(vec![unreadable("a", 11), put("b", 6), end(20)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.watch([
        Step::Say(vec![unreadable("a", 11), unreadable("b", 21), end(30)]),
        Step::Say(vec![changed("a", 31), gone("b", 32)]),
    ]);
    rig.start();
    rig.told_until("done").await;
    assert_eq!(rig.told_by_list(2).await, Vec::<String>::new());
    assert_eq!(rig.state().unreadable[0].object.name, "a");
    assert_eq!(rig.told(2).await, ["apply a", "delete b"]);
    assert_eq!(*rig.state().unreadable, []);
}

/// The first list is passed on as it arrives, and starts again when it breaks.
#[tokio::test(start_paused = true)]
async fn a_first_list_that_breaks_begins_anew() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([
        Step::Say(vec![put("a", 5)]),
        Step::Fail(Failure::Broken("cut".to_owned())),
    ]);
    rig.watch([Step::Say(vec![put("b", 5), end(10)])]);
    rig.start();
    assert_eq!(rig.told(5).await, ["init", "+a", "init", "+b", "done"]);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_outlives_its_state_is_fetched_in_one_piece() {
    let mut rig = Rig::new(Resource::Services);
    rig.no_watch(Failure::of_status(400, "", None));
    rig.page(page(10, &["a"], Some("more")));
    rig.page(Err(Failure::Gone));
    rig.page(page(11, &["a", "b"], None));
    rig.start();
    rig.told_until("done").await;
    assert_eq!(
        rig.asked()[..4],
        ["stream", "list", "list more", "list all"]
    );
}

/// Duplicates and replays change nothing; a bookmark from the past lists again.
#[tokio::test(start_paused = true)]
async fn replays_change_nothing() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([
        Step::Say(vec![put("a", 5), end(10)]),
        Step::Say(vec![
            put("b", 11),
            put("b", 11),
            gone("a", 7),
            put("old", 3),
            put("c", 12),
        ]),
        Step::Say(vec![bookmark(4)]),
    ]);
    rig.watch([Step::Say(vec![put("z", 5), end(20)])]);
    rig.start();
    assert_eq!(
        rig.told(5).await,
        ["init", "+a", "done", "apply b", "apply c"]
    );
    assert_eq!(rig.state().counts.replays, 3);
    rig.told_until("apply z").await;
    assert_eq!(rig.asked(), ["stream", "stream"]);
}

/// Quiet watches are checked; a connection that died without a word is replaced.
#[tokio::test(start_paused = true)]
async fn quiet_watches_are_probed_and_silent_ones_replaced() {
    let mut rig = Rig::new(Resource::Services);
    rig.probes(10);
    rig.watch([Step::Say(vec![put("a", 5), end(10)]), Step::Hang]);
    rig.watch([Step::Say(vec![put("b", 11)]), Step::Hang]);
    rig.start();
    let before = Instant::now();
    rig.told_until("apply b").await;
    assert_eq!(before.elapsed(), WATCH_SILENCE);
    let probes = WATCH_SILENCE.as_secs() / PROBE_AFTER.as_secs();
    let mut asked = vec!["stream"];
    asked.extend((0..probes).map(|_| "probe"));
    asked.push("watch 10");
    assert_eq!(rig.asked(), asked);
    assert!(rig.upstream.age().unwrap() <= PROBE_AFTER);
}

/// A probe that failed and then works does not prove that the watch's own connection works.
#[tokio::test(start_paused = true)]
async fn a_watch_is_replaced_after_an_outage_that_it_did_not_notice() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([Step::Say(vec![put("a", 5), end(10)]), Step::Hang]);
    rig.probe(Err(Failure::Unreachable("no route".to_owned())));
    rig.probe(Ok(10));
    rig.watch([Step::Say(vec![put("b", 11)]), Step::Hang]);
    rig.start();
    let before = Instant::now();
    rig.told_until("apply b").await;
    assert!(before.elapsed() <= PROBE_AFTER + Duration::from_secs(1));
    assert_eq!(rig.asked()[..4], ["stream", "probe", "probe", "watch 10"]);
}

/// After a restore from a backup, a watch from a later state sends nothing at all.
#[tokio::test(start_paused = true)]
async fn a_server_that_went_back_in_time_is_believed_when_it_insists() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([
        Step::Say(vec![put("a", 5), put("b", 90), end(100)]),
        Step::Hang,
    ]);
    rig.probes(50);
    for version in [50, 50, 51] {
        rig.watch([Step::Say(vec![changed("a", 4), end(version)]), Step::Hang]);
    }
    rig.start();
    rig.told_until("done").await;
    let before = Instant::now();
    assert_eq!(rig.told(2).await, ["apply a", "vanished b"]);
    assert_eq!(rig.state().counts.lists, 2);
    assert!(
        before.elapsed() <= Duration::from_secs(30),
        "{:?}",
        before.elapsed()
    );
    assert_eq!(
        rig.asked(),
        ["stream", "probe", "stream", "stream", "stream"]
    );
    assert_eq!(rig.state().trouble, None);
}

/// What was passed on is known by version: the version of the newest change stays where it is when
/// only a bookmark or an equal list comes, and a list that lacks objects proves a later deletion.
#[tokio::test(start_paused = true)]
async fn versions_are_told_after_what_they_contain() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([
        Step::Say(vec![put("a", 5), put("b", 3), end(10)]),
        Step::Say(vec![put("c", 12)]),
        Step::Say(vec![bookmark(20)]),
        Step::Say(vec![gone("c", 21)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.watch([
        Step::Say(vec![put("a", 5), put("b", 3), end(30)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.watch([
        Step::Say(vec![put("b", 3), end(40)]),
        Step::Fail(Failure::Gone),
    ]);
    // Another server, which lags behind: nothing of it counts.
    rig.watch([Step::Say(vec![put("a", 5), end(25)]), Step::Hang]);
    rig.start();
    rig.told_by_list(3).await;
    rig.pass(Duration::from_secs(1)).await;
    let told = [(10, 5), (12, 12), (20, 12), (21, 21), (30, 21), (40, 31)];
    assert_eq!(rig.versions, told);
}

#[tokio::test(start_paused = true)]
async fn a_list_in_pages_tells_the_newest_version_of_its_objects() {
    let mut rig = Rig::new(Resource::Slices);
    rig.no_watch(Failure::of_status(400, "", None));
    let changed = |changed, next| page(10, &["a"], next).map(|page| ObjectPage { changed, ..page });
    rig.page(changed(7, Some("more")));
    rig.page(changed(4, None));
    rig.watch([Step::Hang]);
    rig.start();
    rig.told_until("done").await;
    assert_eq!(rig.versions, [(10, 7)]);
}

/// A server that was restored from a backup is believed when it insists, and the versions go back.
#[tokio::test(start_paused = true)]
async fn versions_go_back_with_the_server() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([
        Step::Say(vec![put("a", 5), put("b", 90), end(100)]),
        Step::Hang,
    ]);
    rig.probes(50);
    for version in [50, 50, 51] {
        rig.watch([Step::Say(vec![put("a", 4), end(version)]), Step::Hang]);
    }
    rig.start();
    rig.told_by_list(2).await;
    assert_eq!(rig.versions, [(100, 90), (51, 4)]);
}

/// Another replica lags behind: its list is not passed on, not even a part.
#[tokio::test(start_paused = true)]
async fn a_stale_list_resurrects_and_deletes_nothing() {
    let mut rig = Rig::new(Resource::Services);
    rig.watch([
        Step::Say(vec![put("a", 5), end(100)]),
        Step::Say(vec![put("new", 101)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.watch([Step::Say(vec![put("a", 5), put("deleted", 6), end(50)])]);
    rig.watch([
        Step::Say(vec![put("a", 5), put("new", 101), end(102)]),
        Step::Hang,
    ]);
    rig.start();
    rig.told_until("apply new").await;
    assert_eq!(rig.told_by_list(2).await, Vec::<String>::new());
    assert_eq!(rig.asked(), ["stream", "stream", "stream"]);
}
