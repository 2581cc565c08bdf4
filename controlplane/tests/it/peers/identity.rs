//! Replicas prove to each other that they are replicas.

use hyper_util::rt::TokioIo;
use kp_controlplane::app::Protection;
use kplane_proto::v1::peer_service_client::PeerServiceClient;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{self as pb};
use kplane_tls::{Authorities, Identity, KeyPair, ServerFiles, client_config, greet};
use std::net::SocketAddr;
use std::path::Path;
use tokio::net::TcpStream;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::{Replica, addresses, flags};
use crate::support::secure::Certs;

/// Certificates of a node, a user and an administrator.
fn certs() -> Certs {
    let certs = Certs::new(&["a"], &["alice"]);
    certs.add_users(&["root"], true);
    certs
}

impl Certs {
    async fn replica(&self, at: SocketAddr, peers: kplane_agents::peers::Config) -> Replica {
        Replica::protected(at, peers, self.protection()).await
    }

    async fn connect(&self, to: SocketAddr, name: &str) -> Channel {
        let trusted = Authorities::read(Path::new(&self.file("ca.crt"))).unwrap();
        let tls = client_config(&trusted, &Identity::Pair(self.pair(name))).unwrap();
        let stream = TcpStream::connect(to).await.unwrap();
        let mut wire = Some(greet(stream, Some(tls), "localhost").await.unwrap());
        let once = tower::service_fn(move |_| {
            let wire = wire.take().ok_or(std::io::ErrorKind::NotConnected);
            std::future::ready(wire.map(TokioIo::new).map_err(std::io::Error::from))
        });
        let endpoint = Endpoint::from_static("http://replica");
        endpoint.connect_with_connector(once).await.unwrap()
    }

    async fn fleet(&self, of: SocketAddr) -> pb::Fleet {
        let mut status = StatusServiceClient::new(self.connect(of, "users/alice").await);
        let fleet = status.get_fleet(pb::GetFleetRequest::default()).await;
        fleet.unwrap().into_inner()
    }
}

/// Returns flags with the name that the certificates have.
fn named(peers: &[SocketAddr]) -> kplane_agents::peers::Config {
    let mut peers = flags(peers);
    peers.flags.peer_server_name = Some("localhost".to_owned());
    peers
}

#[tokio::test]
async fn replicas_with_certificates_answer_each_other_and_nobody_else() {
    let all = addresses::<2>();
    let certs = certs();
    let first = certs.replica(all[0], named(&all)).await;
    let _second = certs.replica(all[1], named(&all)).await;
    first.publish(Some(80), &["a"]);
    let fleet = certs.fleet(all[0]).await;
    assert_eq!(
        (fleet.replicas, fleet.missing_replicas.as_slice()),
        (2, &[][..])
    );
    for (name, code) in [
        ("server", Code::Ok),
        ("users/alice", Code::PermissionDenied),
        // Administrators have the rights of users.
        ("users/root", Code::PermissionDenied),
        ("nodes/a", Code::PermissionDenied),
    ] {
        let mut client = PeerServiceClient::new(certs.connect(all[0], name).await);
        let collected = client.collect(pb::CollectRequest::default()).await;
        let found = collected.map_or_else(|status| status.code(), |_| Code::Ok);
        assert_eq!(found, code, "{name}");
        let mut client = PeerServiceClient::new(certs.connect(all[0], name).await);
        let approved = client.approve(pb::ApproveRequest::default()).await;
        let found = approved.map_or_else(|status| status.code(), |_| Code::Ok);
        assert_eq!(found, code, "{name}");
        let request = pb::InspectServiceRequest {
            service: Some(pb::ServiceRef::default()),
            ..pb::InspectServiceRequest::default()
        };
        let mut client = PeerServiceClient::new(certs.connect(all[0], name).await);
        let inspected = client.inspect(request).await;
        let found = inspected.map_or_else(|status| status.code(), |_| Code::Ok);
        assert_eq!(found, code, "{name}");
    }
    // A replica's certificate opens nothing else.
    let mut status = StatusServiceClient::new(certs.connect(all[0], "server").await);
    let refused = status.get_fleet(pb::GetFleetRequest::default()).await;
    assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn impostors_are_refused_and_named() {
    let [own, stranger, user] = addresses();
    let (certs, others) = (certs(), certs());
    // The first one trusts its own authority alone; the second one is of another.
    let _stranger = others.replica(stranger, named(&[stranger])).await;
    let first = certs.replica(own, named(&[own, stranger])).await;
    first.publish(Some(80), &["a"]);
    let fleet = certs.fleet(own).await;
    let [missing] = &*fleet.missing_replicas else {
        panic!("{fleet:?}");
    };
    assert_eq!(missing.address, stranger.to_string());
    assert!(
        missing.reason.contains("invalid peer certificate"),
        "{missing:?}"
    );
    // A control plane that shows the certificate of a user is no replica to the others.
    let mut peers = named(&[own, user]);
    let KeyPair { certificate, key } = certs.pair("users/alice");
    peers.flags.peer_client_certificate = Some(certificate);
    peers.flags.peer_client_key = Some(key);
    let _user = certs.replica(user, peers).await;
    let fleet = certs.fleet(user).await;
    let [other, oneself] = &*fleet.missing_replicas else {
        panic!("{fleet:?}");
    };
    assert_eq!(other.address, own.to_string());
    assert_eq!(oneself.address, user.to_string());
    assert!(
        other.reason.contains("may not get /kplane/peer"),
        "{other:?}"
    );
    assert_eq!(fleet.nodes.len(), 0);
}

#[tokio::test]
async fn a_replica_without_authorities_does_not_start() {
    let [own] = addresses();
    let certs = certs();
    let protection = Protection::Files(ServerFiles {
        pair: certs.pair("server"),
        client_authorities: None,
    });
    let folder = tempfile::tempdir().unwrap();
    let origin = kp_controlplane::app::Origin::Manifests(folder.path().to_owned());
    let config = kp_controlplane::app::Config {
        status_listen: Some(own),
        protection,
        peers: flags(&[own]),
        ..kp_controlplane::app::Config::new(origin)
    };
    let error = kp_controlplane::app::build(config).await.unwrap_err();
    assert!(error.to_string().contains("--peer"), "{error}");
}
