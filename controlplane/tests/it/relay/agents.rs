//! Agents under relays: what they get, and how the top learns what they hold.

use kp_controlplane::publish::Trigger;
use kplane_proto::convert::decode_object;
use kplane_proto::v1::{LagState, NodeState, server_message};

use tonic::Streaming;

use super::*;
use crate::support::reporter::Agent;
use crate::support::{Peer, hello};

/// Everything that an agent was told since it connected.
#[derive(Debug, Default)]
struct Told {
    snapshot: bool,
    objects: usize,
    digest: Vec<u8>,
}

/// Reads all updates up to the end of the first one.
async fn first_update(peer: &mut Peer) -> Told {
    let mut told = Told::default();
    loop {
        if let server_message::Kind::Update(update) = peer.next().await.unwrap() {
            told.snapshot |= update.snapshot;
            told.objects += update.objects.len();
            for object in update.objects {
                decode_object(object).unwrap();
            }
            if let Some(end) = update.end {
                told.digest = end.digest;
                return told;
            }
        }
    }
}

#[tokio::test]
async fn agents_move_between_root_and_relays_for_nothing() {
    let [top, middle, bottom] = addresses();
    let folder = folder(30);
    let root = Plane::root(top, folder.path()).await;
    let relay = Plane::relay(middle, &[top]).await;
    let second = Plane::relay(bottom, &[middle]).await;
    let at = |plane: &Plane| plane.bound.agent_addr.unwrap();
    for node in ["a", "b", "stranger"] {
        let mut peer = Peer::connect(at(&root), hello(node)).await.unwrap();
        let told = first_update(&mut peer).await;
        assert!(told.snapshot && told.objects >= 31, "{told:?}");
        // It moves down, and up again.
        for plane in [&relay, &second, &root] {
            let resume = pb::ResumeToken {
                schema: kplane_proto::DIGEST_SCHEMA,
                epoch: root.hub().store.epoch(),
                revision: root.revision(),
                digest: told.digest.clone(),
            };
            let hello = pb::Hello {
                resume: Some(resume),
                ..hello(node)
            };
            let mut peer = Peer::connect(at(plane), hello).await.unwrap();
            let again = first_update(&mut peer).await;
            assert_eq!((again.snapshot, again.objects), (false, 0), "{node}");
            assert_eq!(again.digest, told.digest);
        }
    }
    for plane in [&relay, &second] {
        let counts = plane.hub().snapshots.counts();
        assert_eq!(
            (counts.equal, counts.begun, counts.ranges, counts.changes),
            (3, 0, 0, 0)
        );
    }
}

#[tokio::test]
async fn a_relay_gives_each_node_its_own_objects() {
    let [top, middle] = addresses();
    let folder = folder(1);
    let root = Plane::root(top, folder.path()).await;
    let relay = Plane::relay(middle, &[top]).await;
    for (node, zone, own) in [("a", "x", "10.244.0.1"), ("b", "y", "10.244.1.1")] {
        let mut peer = Peer::connect(relay.bound.agent_addr.unwrap(), hello(node))
            .await
            .unwrap();
        let (mut zones, mut locals) = (Vec::new(), Vec::new());
        let mut ended = false;
        while !ended {
            let server_message::Kind::Update(update) = peer.next().await.unwrap() else {
                continue;
            };
            ended = update.end.is_some();
            for object in update.objects {
                match decode_object(object).unwrap().unwrap() {
                    kplane_model::DesiredObject::Node(facts) => {
                        assert!(facts.known);
                        zones.push(facts.zone.unwrap().to_string());
                    }
                    kplane_model::DesiredObject::Local(local) => {
                        locals.extend(local.endpoints.iter().map(|e| e.addr.ip.to_string()));
                    }
                    kplane_model::DesiredObject::Service(_) => {}
                }
            }
        }
        assert_eq!(
            (zones, locals),
            (vec![zone.to_owned()], vec![own.to_owned()])
        );
    }
    drop(root);
}

/// The time of a change in the cluster comes with the update, also to agents under two relays.
#[tokio::test]
async fn agents_under_relays_learn_when_endpoints_changed() {
    let [top, middle, bottom] = addresses();
    let folder = folder(2);
    let root = Plane::root(top, folder.path()).await;
    let relay = Plane::relay(middle, &[top]).await;
    let second = Plane::relay(bottom, &[middle]).await;
    let address = second.bound.agent_addr.unwrap();
    let mut peer = Peer::connect(address, hello("a")).await.unwrap();
    first_update(&mut peer).await;
    let key = ServiceKey::sample("shop", "new");
    let address = EndpointAddr {
        ip: IpAddr::from([10, 0, 0, 1]),
        port: 8080,
    };
    let published = Published::new(
        ServicePort::sample(key.clone()),
        &[Endpoint::ready(address)],
    );
    root.hub().store.publish(Publication {
        triggers: vec![Trigger {
            at_ms: 4_711,
            service: key.service.clone(),
            family: key.family,
        }],
        services: vec![(key, Some(published))],
        nodes: Vec::new(),
        service_cidrs: None,
        observed_at: SystemTime::now(),
    });
    let triggers = loop {
        if let server_message::Kind::Update(update) = peer.next().await.unwrap()
            && let Some(end) = update.end
        {
            break end.triggers;
        }
    };
    let times: Vec<_> = triggers.iter().map(|trigger| trigger.at_ms).collect();
    assert_eq!(times, [4_711]);
    drop(relay);
}

/// A watch of how far Service shop/s1 has come.
struct Watch(Streaming<pb::Convergence>);

impl Watch {
    async fn begin(plane: &Plane) -> Self {
        let request = pb::ConvergenceRequest {
            namespace: "shop".to_owned(),
            name: "s1".to_owned(),
            absent_ok: true,
        };
        let watch = plane.status().await.watch_convergence(request).await;
        Self(watch.unwrap().into_inner())
    }

    async fn until(&mut self, wanted: impl Fn(&pb::Convergence) -> bool) -> pb::Convergence {
        let until = Instant::now() + DEADLINE;
        loop {
            let answer = timeout(DEADLINE, self.0.message()).await.unwrap();
            let answer = answer.unwrap().unwrap();
            if wanted(&answer) {
                return answer;
            }
            assert!(Instant::now() < until, "{answer:?}");
        }
    }
}

/// The agents of two levels of relays, as the top sees them.
#[tokio::test]
async fn the_top_sees_what_agents_under_relays_hold() {
    let all @ [top, middle, bottom] = addresses();
    let folder = folder(3);
    let origin = Origin::Manifests(folder.path().to_owned());
    let root = Plane::with_peers(top, origin, &all).await;
    let relay = Plane::with_peers(middle, relay_of(&[top]), &all).await;
    let second = Plane::with_peers(bottom, relay_of(&[middle]), &all).await;
    for plane in [&root, &relay, &second] {
        plane.synced().await;
    }
    let hello = |node| pb::Hello {
        instance: 1,
        ..hello(node)
    };
    let one = Agent::connect(&relay.bound, hello("a")).await;
    let other = Agent::connect(&second.bound, hello("b")).await;
    one.report(relay.revision(), relay.revision()).await;
    other.report(second.revision(), second.revision()).await;
    let in_sync = |fleet: &pb::Fleet| {
        let nodes = fleet.nodes.iter();
        nodes
            .filter(|node| node.state() == NodeState::InSync)
            .count()
            == 2
    };
    let fleet = root.fleet_until(in_sync).await;
    assert_eq!((fleet.replicas, fleet.missing_replicas.len()), (3, 0));
    let places = fleet.nodes.iter().map(|node| node.replica.as_str());
    assert_eq!(
        places.collect::<Vec<_>>(),
        [middle.to_string(), bottom.to_string()]
    );
    // kpctl wait at the top: both have the Service, and then one of them has its next state.
    let mut watch = Watch::begin(&root).await;
    watch
        .until(|answer| answer.programmed == 2 && answer.verified == 2)
        .await;
    let text = std::fs::read_to_string(folder.path().join("all.yaml")).unwrap();
    let text = text.replace("ports: [{port: 80}]", "ports: [{port: 81}]");
    std::fs::write(folder.path().join("all.yaml"), text).unwrap();
    watch
        .until(|answer| answer.programmed == 0 && answer.nodes == 2)
        .await;
    second.equals(&root, &["a", "b"]).await;
    other.report(second.revision(), second.revision()).await;
    let answer = watch.until(|answer| answer.programmed == 1).await;
    let lags: Vec<_> = answer
        .laggards
        .iter()
        .map(|l| (&*l.node, l.state()))
        .collect();
    assert_eq!(lags, [("a", LagState::Behind)]);
    one.report(relay.revision(), relay.revision()).await;
    let measured = |answer: &pb::Convergence| answer.durations.is_some_and(|all| all.nodes == 2);
    watch
        .until(|answer| answer.programmed == 2 && measured(answer))
        .await;
    // A relay that is gone is named at once, and its nodes are not known.
    second.stop().await;
    let began = Instant::now();
    // A replica that answers may be late on a busy machine.
    let names_it = |fleet: &pb::Fleet| match &*fleet.missing_replicas {
        [missing] => missing.address == bottom.to_string(),
        _ => false,
    };
    let fleet = root.fleet_until(names_it).await;
    assert!(began.elapsed() < Duration::from_secs(3));
    let states: Vec<_> = fleet.nodes.iter().map(pb::NodeStatus::state).collect();
    assert_eq!(states, [NodeState::InSync, NodeState::Unknown]);
}
