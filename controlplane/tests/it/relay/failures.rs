//! Roots that end, begin again, lag behind, or are no roots.

use kp_controlplane::admission::Admission;
use kp_controlplane::freshness::{Freshness, Versions};
use kp_controlplane::hub::Seen;
use kp_controlplane::index::CliffGuard;
use kp_controlplane::k8s::Kind;
use kp_controlplane::server::DesiredServer;
use kp_controlplane::source::Batch;
use kp_controlplane::trust::Trust;
use kplane_proto::v1::desired_state_service_server::DesiredStateServiceServer;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

use super::*;
use crate::support::{Peer, hello};

/// Checks that a relay never stops to publish all Services, until the token says so.
fn never_less(relay: &Plane, services: usize) -> tokio::task::JoinHandle<()> {
    let hub = Arc::clone(relay.hub());
    tokio::spawn(async move {
        let mut summary = hub.summary();
        loop {
            let now = summary.borrow_and_update().totals.services;
            assert!(now >= services, "{now} Services");
            if summary.changed().await.is_err() {
                return;
            }
        }
    })
}

#[tokio::test]
async fn a_root_that_begins_again_changes_nothing() {
    let [top, middle, bottom] = addresses();
    let folder = folder(40);
    let root = Plane::root(top, folder.path()).await;
    let relay = Plane::relay(middle, &[top]).await;
    let second = Plane::relay(bottom, &[middle]).await;
    let revisions = [relay.revision(), second.revision()];
    let epoch = relay.hub().path()[1];
    let watched = never_less(&second, 40);
    root.stop().await;
    let fleet = relay.fleet_until(|fleet| !reasons(fleet).is_empty()).await;
    let reason = &reasons(&fleet)[0];
    assert!(reason.contains(&top.to_string()), "{reason}");
    let age = relay.hub().upstream_age();
    let root = Plane::root(top, folder.path()).await;
    let is_back = |fleet: &pb::Fleet| reasons(fleet).is_empty();
    relay.fleet_until(is_back).await;
    assert!(relay.hub().upstream_age() < age.max(Duration::from_secs(6)));
    let path = relay.hub().path();
    assert_ne!(path[1], epoch, "the root has another epoch");
    write(folder.path(), 0..41);
    second.equals(&root, &["a", "b"]).await;
    // The new Service, and its two local endpoints; everything else is as before.
    let until = Instant::now() + DEADLINE;
    while second.hub().summary().borrow().totals.services < 41 {
        assert!(Instant::now() < until);
        sleep(Duration::from_millis(1)).await;
    }
    let now = [relay.revision(), second.revision()];
    assert_eq!(now, revisions.map(|revision| revision + 3));
    assert!(!watched.is_finished(), "{:?}", watched.await);
    watched.abort();
}

#[tokio::test]
async fn a_relay_that_begins_while_its_root_is_away_serves_nothing_and_says_so() {
    let [top, middle] = addresses();
    let folder = folder(3);
    let relay = Plane::start(middle, relay_of(&[top])).await;
    let fleet = relay.fleet_until(|fleet| !reasons(fleet).is_empty()).await;
    let status = fleet.control_plane.unwrap();
    assert!(!status.synced);
    assert_eq!(
        status.source,
        "relay of a control plane that has not answered"
    );
    let mut peer = Peer::connect(relay.bound.agent_addr.unwrap(), hello("a"))
        .await
        .unwrap();
    peer.is_answered().await;
    assert_eq!(
        peer.updates, 0,
        "an agent keeps what it has until there is a picture"
    );
    let age = relay.hub().upstream_age();
    sleep(Duration::from_millis(20)).await;
    assert!(relay.hub().upstream_age() > age, "agents see the age");
    let root = Plane::root(top, folder.path()).await;
    relay.synced().await;
    relay.equals(&root, &["a", "b"]).await;
    while peer.updates == 0 {
        peer.next().await.unwrap();
    }
}

/// A root that publishes what the test says, and nothing by itself.
struct Script {
    hub: Arc<Hub>,
    _batches: mpsc::Sender<Batch>,
    serving: tokio::task::JoinHandle<()>,
}

impl Script {
    /// Starts one that has not read its source.
    async fn unread(at: SocketAddr, epoch: u64) -> Self {
        let (batches, receiver) = mpsc::channel(1);
        let (hub, task) = Hub::new(
            epoch,
            "tests",
            Admission::default(),
            CliffGuard::default(),
            receiver,
        );
        tokio::spawn(task);
        let server = DesiredStateServiceServer::new(DesiredServer::new(Arc::clone(&hub)));
        until_free(at).await;
        let listener = TcpListener::bind(at).await.unwrap();
        let stop = hub.shutdown.clone().cancelled_owned();
        let serving = tokio::spawn(async move {
            let router = Server::builder().add_service(server);
            let incoming = TcpListenerStream::new(listener);
            router
                .serve_with_incoming_shutdown(incoming, stop)
                .await
                .unwrap();
        });
        Self {
            hub,
            _batches: batches,
            serving,
        }
    }

    async fn start(at: SocketAddr, services: usize, freshness: Freshness) -> Self {
        let script = Self::unread(at, u64::try_from(services).unwrap()).await;
        script.publish(services, &freshness);
        script.hub.store.set_synced();
        script
    }

    fn publish(&self, services: usize, freshness: &Freshness) {
        let services = (0..services).map(|n| {
            let port = ServicePort::sample(ServiceKey::sample("shop", &format!("s{n}")));
            (port.key.clone(), Some(Published::new(port, &[])))
        });
        let publication = Publication {
            services: services.collect(),
            nodes: Vec::new(),
            service_cidrs: None,
            observed_at: SystemTime::now(),
            triggers: Vec::new(),
        };
        self.hub.store.publish_as_of(publication, freshness);
    }

    /// Says when the API server was in touch last.
    fn current_for(&self, age: Duration) {
        self.hub.upstream.begin(Kind::Service);
        let current_at = Some(Instant::now() - age);
        self.hub
            .upstream
            .update(Kind::Service, |state| state.current_at = current_at);
    }

    async fn stop(self) {
        self.hub.shutdown.cancel();
        timeout(DEADLINE, self.serving).await.unwrap().unwrap();
    }
}

fn versions(seen: u64, changed: u64) -> Freshness {
    let mut freshness = Freshness::default();
    freshness.set(Kind::Service, Versions { seen, changed });
    freshness
}

/// What a new picture of a root lacks goes, down to the objects of single nodes.
#[tokio::test]
async fn a_relay_follows_roots_that_are_quite_different() {
    let [top, middle] = addresses();
    let relay = Plane::start(middle, relay_of(&[top])).await;
    let mut dice = Dice(11);
    for epoch in 1..=8 {
        let root = Script::unread(top, epoch).await;
        root.hub.store.set_trust(Trust::Confirmed);
        for _ in 0..30 {
            root.hub.store.publish(dice.publication());
        }
        root.hub.store.set_synced();
        let until = Instant::now() + DEADLINE;
        let differs = || {
            let digest = |hub: &Hub| NODES.map(|node| hub.store.digest(node));
            digest(relay.hub()) != digest(&root.hub)
        };
        while differs() {
            assert!(Instant::now() < until, "{epoch}");
            sleep(Duration::from_millis(1)).await;
        }
        root.stop().await;
    }
}

#[tokio::test]
async fn a_relay_of_a_root_that_has_not_read_its_source_grows_old() {
    let [top, middle] = addresses();
    let _root = Script::unread(top, 1).await;
    let relay = Plane::start(middle, relay_of(&[top])).await;
    sleep(Duration::from_millis(20)).await;
    assert!(relay.hub().upstream_age() >= Duration::from_millis(20));
    assert!(!relay.hub().store.head().borrow().synced);
}

#[tokio::test]
async fn a_relay_takes_no_older_state_from_another_root() {
    let [one, other, middle] = addresses();
    let first = Script::start(one, 5, versions(200, 150)).await;
    let second = Script::start(other, 3, versions(149, 100)).await;
    let relay = Plane::relay(middle, &[one, other]).await;
    let watched = never_less(&relay, 5);
    assert_eq!(*relay.hub().store.freshness(), versions(200, 150));
    first.stop().await;
    let told = |fleet: &pb::Fleet| {
        let reasons = reasons(fleet);
        let older = "has not seen a change of a Service";
        reasons.iter().any(|reason| reason.contains(older))
    };
    relay.fleet_until(told).await;
    assert_eq!(relay.hub().summary().borrow().totals.services, 5);
    second.publish(6, &versions(150, 120));
    let is_followed = |fleet: &pb::Fleet| reasons(fleet).is_empty();
    let fleet = relay.fleet_until(is_followed).await;
    assert_eq!(fleet.control_plane.unwrap().services, 6);
    assert_eq!(*relay.hub().store.freshness(), versions(150, 120));
    assert!(!watched.is_finished(), "{:?}", watched.await);
    watched.abort();
}

#[tokio::test]
async fn a_root_that_is_cut_off_is_left_for_another_one() {
    let [one, other, middle] = addresses();
    let minute = Duration::from_secs(60);
    let first = Script::start(one, 5, versions(200, 150)).await;
    let second = Script::start(other, 6, versions(210, 160)).await;
    first.current_for(Duration::ZERO);
    second.current_for(Duration::ZERO);
    let relay = Plane::relay(middle, &[one, other]).await;
    let follows = |root: SocketAddr| {
        let source = format!("relay of {root} (level 1)");
        move |fleet: &pb::Fleet| fleet.control_plane.as_ref().unwrap().source == source
    };
    relay.fleet_until(follows(one)).await;
    first.current_for(minute);
    relay.fleet_until(follows(other)).await;
    assert!(relay.hub().upstream_age() < minute);
    assert_eq!(relay.hub().summary().borrow().totals.services, 6);
}

/// A picture that lacks much may be a mistake, and one that was not read completely lacks objects that exist.
#[tokio::test]
async fn absence_in_a_root_that_begins_again_is_not_deletion() {
    let [top, middle] = addresses();
    let folder = folder(40);
    let root = Plane::root(top, folder.path()).await;
    let relay = Plane::relay(middle, &[top]).await;
    let watched = never_less(&relay, 39);
    root.stop().await;
    // A folder with a file that cannot be read, and then one with half of all Services.
    write(folder.path(), 0..20);
    let broken = folder.path().join("broken.yaml");
    std::fs::write(&broken, "kind: [").unwrap();
    let root = Plane::root(top, folder.path()).await;
    let mut looks = root.hub().upstream.looks();
    let held = |fleet: &pb::Fleet| fleet.control_plane.as_ref().unwrap().held.clone();
    let fleet = relay.fleet_until(|fleet| held(fleet).is_some()).await;
    let status = fleet.control_plane.as_ref().unwrap();
    assert_eq!(held(&fleet).unwrap().services, 20);
    assert_eq!(status.confidence(), pb::Confidence::Partial);
    // The root is asked to read its source again.
    let looked = timeout(DEADLINE, looks.wait_for(|looks| *looks > 0));
    looked.await.unwrap().unwrap();
    assert!(status.doubt.contains("broken.yaml"), "{}", status.doubt);
    // What the root names goes on to change, and what it deletes is deleted.
    write(folder.path(), 1..20);
    relay
        .fleet_until(|fleet| fleet.control_plane.as_ref().unwrap().services == 39)
        .await;
    // It was read completely, and still lacks half of them.
    std::fs::remove_file(broken).unwrap();
    let cliff = |fleet: &pb::Fleet| {
        let held = held(fleet);
        held.is_some_and(|held| held.reason.contains("20 of 39 Services"))
    };
    relay.fleet_until(cliff).await;
    assert!(!watched.is_finished(), "{:?}", watched.await);
    watched.abort();
    // The operator at the root is sure.
    let seen = Seen {
        services: 0,
        without_endpoints: 0,
    };
    root.hub().approve(seen).await.unwrap().unwrap();
    let fleet = relay.fleet_until(|fleet| held(fleet).is_none()).await;
    assert_eq!(fleet.control_plane.unwrap().services, 19);
    relay.equals(&root, &["a", "b"]).await;
}

/// Relays in a ring get nothing, and say why: each of them would keep the other's last state alive.
#[tokio::test]
async fn a_relay_does_not_follow_itself() {
    let [own, one, other, top] = addresses();
    let ring = |fleet: &pb::Fleet| {
        let reasons = reasons(fleet);
        reasons
            .iter()
            .any(|reason| reason.contains("its objects come from this control plane"))
    };
    let itself = Plane::start(own, relay_of(&[own])).await;
    itself.fleet_until(ring).await;
    let folder = folder(2);
    let root = Plane::root(top, folder.path()).await;
    let first = Plane::relay(one, &[top, other]).await;
    let second = Plane::relay(other, &[one]).await;
    root.stop().await;
    first.fleet_until(ring).await;
    assert_eq!(first.hub().path().len(), 2);
    // The age of both grows: agents see that they are cut off.
    let age = |plane: &Plane| plane.hub().upstream_age();
    let before = (age(&first), age(&second));
    sleep(Duration::from_millis(300)).await;
    let grown = Duration::from_millis(200);
    assert!(age(&first) >= before.0 + grown && age(&second) >= before.1 + grown);
}
