//! An approval at one replica counts for all.

use kplane_desired_state::trust::Trust;
use kplane_proto::v1 as pb;
use tokio::net::TcpListener;

use super::{Replica, addresses, flags};

#[tokio::test]
async fn an_approval_reaches_all_replicas_and_names_those_that_it_does_not_reach() {
    let all = addresses::<3>();
    let _silent = TcpListener::bind(all[2]).await.unwrap();
    let first = Replica::start(all[0], flags(&all)).await;
    let second = Replica::start(all[1], flags(&all)).await;
    let mut agent = second.agent("b", 1).await;
    let holds = pb::Report {
        held: Some(pb::Held {
            services: 7,
            ..pb::Held::default()
        }),
        ..pb::Report::default()
    };
    agent.say(holds).await;
    agent.peer.is_answered().await;
    let trust = || second.bound.hub().store().trust();
    assert_ne!(trust(), Trust::Confirmed);
    let mut status = first.status().await;
    let approved = status.approve(pb::ApproveRequest::default()).await.unwrap().into_inner();
    assert_eq!(approved.nodes, ["b"]);
    assert_eq!(trust(), Trust::Confirmed);
    let [missing] = &*approved.missing_replicas else {
        panic!("{approved:?}");
    };
    assert_eq!(missing.address, all[2].to_string());
}
