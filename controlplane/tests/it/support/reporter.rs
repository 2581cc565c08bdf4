//! An agent that reports what the test says, and the Service that it reports about.

use kp_controlplane::app::Bound;
use kplane_desired_state::publish::Published;
use kplane_model::{ServiceKey, ServicePort};
use kplane_proto::v1::{self as pb, AgentMessage, Hello, agent_message};

use crate::support::Peer;

/// Returns Service shop/web with this port number, or its deletion.
pub(crate) fn web(port: Option<u16>) -> (ServiceKey, Option<Published>) {
    let key = ServiceKey::sample("shop", "web");
    let published = port.map(|number| {
        let port = ServicePort {
            port: number,
            ..ServicePort::sample(key.clone())
        };
        Published::new(port, &[])
    });
    (key, published)
}

/// An agent that reports what the test says.
pub(crate) struct Agent {
    pub(crate) peer: Peer,
    epoch: u64,
}

impl Agent {
    pub(crate) async fn connect(bound: &Bound, hello: Hello) -> Self {
        let address = bound.agent_addr.unwrap();
        let peer = Peer::connect(address, hello).await.unwrap();
        let epoch = bound.hub().store().epoch();
        Self { peer, epoch }
    }

    pub(crate) async fn report(&self, applied: u64, verified: u64) {
        self.say(pb::Report {
            applied_revision: applied,
            verified_revision: verified,
            ..pb::Report::default()
        })
        .await;
    }

    pub(crate) async fn say(&self, report: pb::Report) {
        let report = pb::Report {
            epoch: self.epoch,
            ..report
        };
        let kind = Some(agent_message::Kind::Report(report));
        self.peer.send.send(AgentMessage { kind }).await.unwrap();
    }
}
