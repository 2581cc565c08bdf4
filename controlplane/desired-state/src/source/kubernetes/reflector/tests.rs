//! Faults of an API server, from a script. The paused clock advances only when all tasks wait.

mod faults;
mod looks;
mod script;

use super::*;
use script::{Rig, Step, bookmark, changed, gone, put, unreadable};
use tokio::time::timeout;

/// The whole life: a list, changes, and the end of a watch.
#[tokio::test(start_paused = true)]
async fn a_list_in_pages_goes_on_as_a_watch() {
    let mut rig = Rig::new(Resource::Services);
    rig.page(10, [put("a", 5), put("b", 3)], Some("more"));
    rig.page(10, [put("c", 4)], None);
    rig.watch([
        Step::Say(vec![put("d", 11)]),
        Step::Say(vec![gone("a", 12), bookmark(20)]),
        Step::End,
    ]);
    rig.watch([Step::Say(vec![put("b", 21)])]);
    rig.start();
    assert_eq!(
        rig.sent(8).await,
        [
            "init", "+a", "+b", "+c", "done", "apply d", "delete a", "apply b"
        ]
    );
    assert_eq!(rig.asked(), ["list", "list more", "watch 10", "watch 20"]);
    assert_eq!(rig.versions, [(10, 5), (11, 11), (20, 12), (21, 21)]);
    assert!(rig.state().synced);
    assert_eq!(rig.state().counts.lists, 1);
}

/// The reflector ends with its consumer, whatever it waits for.
#[tokio::test(start_paused = true)]
async fn the_end_of_the_consumer_is_the_end() {
    let after = Some(Duration::from_secs(20));
    let scripts: [&dyn Fn(&mut Rig); 4] = [
        &|_| {},
        &|rig| rig.no_page(Failure::Busy { after }),
        &|rig| rig.list(10, []),
        &|rig| {
            rig.list(10, []);
            rig.watch([Step::Hang]);
        },
    ];
    for script in scripts {
        let mut rig = Rig::new(Resource::Services);
        script(&mut rig);
        let reflector = rig.start();
        rig.pass(Duration::from_secs(1)).await;
        drop(rig);
        let ended = timeout(Duration::from_secs(1), reflector).await;
        ended.unwrap().unwrap();
    }
}

/// Objects of a later list are passed on only when it is complete, and then only its changes.
#[tokio::test(start_paused = true)]
async fn compaction_lists_again_and_tells_nothing_before_the_end() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(10, [put("a", 5), put("b", 6), put("d", 7)]);
    rig.watch([Step::Fail(Failure::Gone)]);
    rig.page(13, [changed("a", 12)], Some("more"));
    rig.no_page(Failure::Broken("cut".to_owned()));
    rig.page(20, [changed("a", 14), put("d", 7)], Some("more"));
    rig.page(20, [put("new", 13)], None);
    rig.start();
    assert_eq!(rig.sent(5).await, ["init", "+a", "+b", "+d", "done"]);
    assert_eq!(
        rig.told_by_list(2).await,
        ["apply a", "apply new", "vanished b"]
    );
    let round = ["list", "list more"];
    assert_eq!(rig.asked()[..2], ["list", "watch 10"]);
    assert_eq!(rig.asked()[2..6], [round, round].concat());
}

/// Known objects are not passed on again.
#[tokio::test(start_paused = true)]
async fn a_list_of_what_is_known_tells_nothing() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(10, [put("a", 5), put("b", 6)]);
    rig.watch([
        Step::Say(vec![changed("a", 11), gone("b", 12), put("c", 13)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.list(20, [changed("a", 11), put("c", 13)]);
    rig.watch([Step::Say(vec![put("a", 21)]), Step::Fail(Failure::Gone)]);
    rig.page(30, [put("a", 21)], Some("more"));
    rig.page(30, [put("c", 13)], None);
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
    rig.list(10, [put("a", 5), put("b", 6)]);
    rig.watch([
        Step::Say(vec![unreadable("a", 11)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.list(20, [unreadable("a", 11), put("b", 6)]);
    rig.watch([Step::Fail(Failure::Gone)]);
    rig.list(30, [unreadable("a", 11), unreadable("b", 21)]);
    rig.watch([Step::Say(vec![changed("a", 31), gone("b", 32)])]);
    rig.start();
    rig.told_until("done").await;
    assert_eq!(rig.told_by_list(2).await, Vec::<String>::new());
    assert_eq!(rig.state().unreadable[0].object.name, "a");
    assert_eq!(rig.sent(2).await, ["apply a", "delete b"]);
    assert_eq!(*rig.state().unreadable, []);
}

/// The first list is passed on as it arrives, and starts again when it breaks.
#[tokio::test(start_paused = true)]
async fn a_first_list_that_breaks_begins_anew() {
    let mut rig = Rig::new(Resource::Services);
    rig.page(10, [put("a", 5)], Some("more"));
    rig.no_page(Failure::Broken("cut".to_owned()));
    rig.list(10, [put("b", 5)]);
    rig.start();
    assert_eq!(rig.sent(5).await, ["init", "+a", "init", "+b", "done"]);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_outlives_its_state_is_fetched_in_one_piece() {
    let mut rig = Rig::new(Resource::Services);
    rig.page(10, [put("a", 5)], Some("more"));
    rig.no_page(Failure::Gone);
    rig.list(11, [put("a", 5), put("b", 11)]);
    rig.start();
    rig.told_until("done").await;
    assert_eq!(rig.asked()[..3], ["list", "list more", "list all"]);
}

/// Duplicates and replays change nothing; a bookmark from the past lists again.
#[tokio::test(start_paused = true)]
async fn replays_change_nothing() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(10, [put("a", 5)]);
    rig.watch([
        Step::Say(vec![
            put("b", 11),
            put("b", 11),
            gone("a", 7),
            put("old", 3),
            put("c", 12),
        ]),
        Step::Say(vec![bookmark(4)]),
    ]);
    rig.list(20, [put("z", 5)]);
    rig.start();
    assert_eq!(
        rig.sent(5).await,
        ["init", "+a", "done", "apply b", "apply c"]
    );
    assert_eq!(rig.state().counts.replays, 3);
    rig.told_until("apply z").await;
    assert_eq!(rig.asked(), ["list", "watch 10", "list"]);
}

/// Quiet watches are checked; a connection that died without a word is replaced.
#[tokio::test(start_paused = true)]
async fn quiet_watches_are_probed_and_silent_ones_replaced() {
    let mut rig = Rig::new(Resource::Services);
    rig.probes(10);
    rig.list(10, [put("a", 5)]);
    rig.watch([Step::Hang]);
    rig.watch([Step::Say(vec![put("b", 11)]), Step::Hang]);
    rig.start();
    let before = Instant::now();
    rig.told_until("apply b").await;
    assert_eq!(before.elapsed(), WATCH_SILENCE);
    let probes = WATCH_SILENCE.as_secs() / PROBE_AFTER.as_secs();
    let mut asked = vec!["list", "watch 10"];
    asked.extend((0..probes).map(|_| "probe"));
    asked.push("watch 10");
    assert_eq!(rig.asked(), asked);
    assert!(rig.upstream.age().unwrap() <= PROBE_AFTER);
}

/// A probe that failed and then works does not prove that the watch's own connection works.
#[tokio::test(start_paused = true)]
async fn a_watch_is_replaced_after_an_outage_that_it_did_not_notice() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(10, [put("a", 5)]);
    rig.watch([Step::Hang]);
    rig.probe(Err(Failure::Unreachable("no route".to_owned())));
    rig.probe(Ok(10));
    rig.watch([Step::Say(vec![put("b", 11)]), Step::Hang]);
    rig.start();
    let before = Instant::now();
    rig.told_until("apply b").await;
    assert!(before.elapsed() <= PROBE_AFTER + Duration::from_secs(1));
    assert_eq!(
        rig.asked(),
        ["list", "watch 10", "probe", "probe", "watch 10"]
    );
}

/// After a restore from a backup, a watch from a later state sends nothing at all.
#[tokio::test(start_paused = true)]
async fn a_server_that_went_back_in_time_is_believed_when_it_insists() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(100, [put("a", 5), put("b", 90)]);
    rig.watch([Step::Hang]);
    rig.probes(50);
    for version in [50, 50, 51] {
        rig.list(version, [changed("a", 4)]);
    }
    rig.start();
    rig.told_until("done").await;
    let before = Instant::now();
    assert_eq!(rig.sent(2).await, ["apply a", "vanished b"]);
    assert_eq!(rig.state().counts.lists, 2);
    assert!(
        before.elapsed() <= Duration::from_secs(30),
        "{:?}",
        before.elapsed()
    );
    assert_eq!(
        rig.asked(),
        [
            "list",
            "watch 100",
            "probe",
            "list",
            "list",
            "list",
            "watch 51"
        ]
    );
    assert_eq!(rig.state().trouble, None);
}

/// What was passed on is known by version: the version of the newest change stays where it is when
/// only a bookmark or an equal list comes, and a list that lacks objects proves a later deletion.
#[tokio::test(start_paused = true)]
async fn versions_are_told_after_what_they_contain() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(10, [put("a", 5), put("b", 3)]);
    rig.watch([
        Step::Say(vec![put("c", 12)]),
        Step::Say(vec![bookmark(20)]),
        Step::Say(vec![gone("c", 21)]),
        Step::Fail(Failure::Gone),
    ]);
    rig.list(30, [put("a", 5), put("b", 3)]);
    rig.watch([Step::Fail(Failure::Gone)]);
    rig.list(40, [put("b", 3)]);
    rig.watch([Step::Fail(Failure::Gone)]);
    // Another server, which lags behind: nothing of it counts.
    rig.list(25, [put("a", 5)]);
    rig.start();
    rig.told_by_list(3).await;
    rig.pass(Duration::from_secs(1)).await;
    let sent = [(10, 5), (12, 12), (20, 12), (21, 21), (30, 21), (40, 31)];
    assert_eq!(rig.versions, sent);
}

/// A server that was restored from a backup is believed when it insists, and the versions go back.
#[tokio::test(start_paused = true)]
async fn versions_go_back_with_the_server() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(100, [put("a", 5), put("b", 90)]);
    rig.watch([Step::Hang]);
    rig.probes(50);
    for version in [50, 50, 51] {
        rig.list(version, [put("a", 4)]);
    }
    rig.start();
    rig.told_by_list(2).await;
    assert_eq!(rig.versions, [(100, 90), (51, 4)]);
}

/// Another replica lags behind: its list is not passed on, not even a part.
#[tokio::test(start_paused = true)]
async fn a_stale_list_resurrects_and_deletes_nothing() {
    let mut rig = Rig::new(Resource::Services);
    rig.list(100, [put("a", 5)]);
    rig.watch([Step::Say(vec![put("new", 101)]), Step::Fail(Failure::Gone)]);
    rig.list(50, [put("a", 5), put("deleted", 6)]);
    rig.list(102, [put("a", 5), put("new", 101)]);
    rig.start();
    rig.told_until("apply new").await;
    assert_eq!(rig.told_by_list(2).await, Vec::<String>::new());
    assert_eq!(
        rig.asked(),
        ["list", "watch 100", "list", "list", "watch 102"]
    );
}
