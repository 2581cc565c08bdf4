//! Rights of callers: whole agents, a control plane and callers of the status API, with certificates of
//! `kp-controlplane certs` and of strangers, over real sockets.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use kp_controlplane::app as control_plane;
use kp_nodeagent::app;
use kplane_agents::certs::{self, Command};
use kplane_agents::identity::{Port, RefusalReason};
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_tls::{ClientConfig, ClientFiles, Files as _, KeyPair, ServerFiles, greet};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::support::agent_of;

/// Longest that anything may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

/// A folder of certificates.
struct Certs(TempDir);

impl Certs {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let dir = folder.path().to_owned();
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let host = names(&["cp.example"]);
        certs::run(&Command::Init {
            dir: dir.clone(),
            host,
        })
        .unwrap();
        let nodes = names(&["n1", "n2"]);
        certs::run(&Command::Node {
            dir: dir.clone(),
            names: nodes,
        })
        .unwrap();
        for (user, admin) in [("alice", false), ("bob", true)] {
            let (dir, names) = (dir.clone(), names(&[user]));
            certs::run(&Command::User { dir, names, admin }).unwrap();
        }
        Self(folder)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn pair(&self, name: &str) -> KeyPair {
        KeyPair::in_folder(self.0.path(), name)
    }

    fn server(&self) -> ServerFiles {
        ServerFiles {
            pair: self.pair("server"),
            client_authorities: Some(self.file("ca.crt")),
        }
    }
}

/// A control plane with TLS on both ports, and a Service.
struct Plane {
    bound: control_plane::Bound,
    _manifests: TempDir,
}

impl Plane {
    async fn start(certs: &Certs) -> Self {
        Self::start_with(
            certs,
            kplane_agents::identity::AuthenticatorConfig::default(),
        )
        .await
    }

    async fn start_with(
        certs: &Certs,
        identity: kplane_agents::identity::AuthenticatorConfig,
    ) -> Self {
        let manifests = TempDir::new().unwrap();
        let service = "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\n\
             spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80}]}\n";
        std::fs::write(manifests.path().join("web.yaml"), service).unwrap();
        let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let bound = control_plane::build(control_plane::Config {
            agent_listen: any,
            status_listen: any,
            http_listen: any,
            http_tls: true,
            protection: control_plane::Protection::Files(certs.server()),
            identity,
            ..control_plane::Config::new(control_plane::Origin::Manifests(
                manifests.path().to_owned(),
            ))
        });
        Self {
            bound: bound.await.unwrap(),
            _manifests: manifests,
        }
    }

    /// Starts an agent that believes the authority of `trusted`, with a certificate of `certs`.
    async fn agent(&self, node: &str, trusted: &Certs, own: Option<KeyPair>) -> app::Bound {
        let port = self.bound.agent_addr.unwrap().port();
        let mut line = vec![
            "kp-nodeagent".to_owned(),
            format!("--control-plane=https://localhost:{port}"),
            format!("--node-name={node}"),
            format!("--certificate-authority={}", shown(&trusted.file("ca.crt"))),
        ];
        if let Some(own) = own {
            line.push(format!("--client-certificate={}", shown(&own.certificate)));
            line.push(format!("--client-key={}", shown(&own.key)));
        }
        agent_of(line).await
    }

    /// Starts an agent with a token from a file.
    async fn agent_with_token(&self, node: &str, trusted: &Certs, token: &Path) -> app::Bound {
        let port = self.bound.agent_addr.unwrap().port();
        agent_of(vec![
            "kp-nodeagent".to_owned(),
            // No certificate names this address.
            format!("--control-plane=https://[::ffff:127.0.0.1]:{port}"),
            "--tls-server-name=cp.example".to_owned(),
            format!("--node-name={node}"),
            format!("--certificate-authority={}", shown(&trusted.file("ca.crt"))),
            format!("--token-file={}", shown(token)),
        ])
        .await
    }
}

impl Plane {
    /// Connects to the status API; an error is that of the connection.
    async fn status(
        &self,
        trusted: &Certs,
        own: Option<KeyPair>,
    ) -> Result<StatusServiceClient<Channel>, tonic::transport::Error> {
        let address = self.bound.status_addr.unwrap();
        let files = ClientFiles {
            authorities: trusted.file("ca.crt"),
            pair: own,
        };
        let config = files.load().unwrap();
        let connector = tower::service_fn(move |_| {
            let config = config.clone();
            async move {
                let stream = TcpStream::connect(address).await?;
                let greeted = greet(stream, Some(config), "cp.example").await;
                greeted.map(TokioIo::new)
            }
        });
        let endpoint = Endpoint::from_static("https://cp.example");
        let channel = endpoint.connect_with_connector(connector).await?;
        Ok(StatusServiceClient::new(channel))
    }
}

fn shown(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Waits until an agent holds everything.
async fn serves(agent: &app::Bound) {
    let mut reports = agent.reports();
    let served = reports.wait_for(|report| report.held.is_some() && report.applied == report.held);
    tokio::time::timeout(DEADLINE, served).await.unwrap().unwrap();
}

/// Waits until an agent knows why it has no connection.
async fn refused(agent: &app::Bound, reason: &str) {
    let mut connection = agent.connection();
    let reported = connection.wait_for(|connection| connection.reason.contains(reason));
    let reported = tokio::time::timeout(DEADLINE, reported)
        .await
        .map(|reported| reported.unwrap().clone());
    assert!(
        reported.is_ok(),
        "{reason:?} is not in {:?}",
        agent.connection().borrow().reason
    );
    assert_eq!(agent.reports().borrow().held, None);
}

#[tokio::test]
async fn an_agent_speaks_for_the_node_of_its_certificate_alone() {
    let (certs, strangers) = (Certs::new(), Certs::new());
    let plane = Plane::start(&certs).await;
    let mine = plane.agent("n1", &certs, Some(certs.pair("nodes/n1"))).await;
    serves(&mine).await;
    for (own, reason) in [
        (
            Some(certs.pair("nodes/n2")),
            "the credential is of node \"n2\"",
        ),
        (Some(certs.pair("users/bob")), "names no node"),
        (None, "agents need a certificate of their node"),
        // The control plane says so after the agent's side of the handshake.
        (Some(strangers.pair("nodes/n1")), ""),
    ] {
        let thief = plane.agent("n1", &certs, own).await;
        refused(&thief, reason).await;
    }
    let careful = plane.agent("n2", &strangers, Some(strangers.pair("nodes/n2"))).await;
    refused(&careful, "invalid peer certificate").await;
    // Nobody has pushed the agent aside meanwhile.
    assert!(mine.connection().borrow().live);
}

/// A token in place of a certificate. The agent sends a newer one on the open stream.
#[tokio::test]
async fn a_token_proves_the_node_and_a_newer_one_is_sent_under_way() {
    let certs = Certs::new();
    let (tokens, own, thief) = (
        certs.file("tokens.csv"),
        certs.file("own"),
        certs.file("thief"),
    );
    std::fs::write(&tokens, "first,system:node:n1,1,system:nodes\n").unwrap();
    std::fs::write(&own, "first\n").unwrap();
    std::fs::write(&thief, "guess\n").unwrap();
    let identity = kplane_agents::identity::AuthenticatorConfig {
        token_auth_file: Some(tokens.clone()),
        ..Default::default()
    };
    let plane = Plane::start_with(&certs, identity).await;
    let agent = plane.agent_with_token("n1", &certs, &own).await;
    serves(&agent).await;
    let other = plane.agent_with_token("n2", &certs, &own).await;
    refused(&other, "the credential is of node \"n1\"").await;
    let stranger = plane.agent_with_token("n1", &certs, &thief).await;
    refused(&stranger, "does not list the token").await;

    // The control plane does not accept the newer token, so the stream stays with the first.
    let refusals = || {
        let all = plane.bound.authenticator().refusals().into_iter();
        let bad = all.filter(|(port, reason, _)| {
            (*port, *reason) == (Port::Agents, RefusalReason::BadCredential)
        });
        bad.map(|(_, _, count)| count).sum::<u64>()
    };
    drop(stranger);
    let before = refusals();
    std::fs::write(&own, "newer\n").unwrap();
    let sent = async {
        while refusals() == before {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(DEADLINE, sent).await.unwrap();
    assert!(agent.connection().borrow().live);
}

/// Every caller of the status API: reading, and acting.
#[tokio::test]
async fn users_read_and_administrators_act() {
    let (certs, strangers) = (Certs::new(), Certs::new());
    let plane = Plane::start(&certs).await;
    for (own, reads, acts) in [
        (None, Code::Unauthenticated, Code::Unauthenticated),
        (
            Some("nodes/n1"),
            Code::PermissionDenied,
            Code::PermissionDenied,
        ),
        (Some("users/alice"), Code::Ok, Code::PermissionDenied),
        (Some("users/bob"), Code::Ok, Code::Ok),
    ] {
        let pair = own.map(|own| certs.pair(own));
        let mut client = plane.status(&certs, pair).await.unwrap();
        let read = client.get_fleet(pb::GetFleetRequest::default()).await;
        assert_eq!(
            read.map_or_else(|status| status.code(), |_| Code::Ok),
            reads,
            "{own:?}"
        );
        let act = client.approve(pb::ApproveRequest::default()).await;
        assert_eq!(
            act.map_or_else(|status| status.code(), |_| Code::Ok),
            acts,
            "{own:?}"
        );
    }
    let stranger = plane.status(&certs, Some(strangers.pair("users/bob"))).await;
    let failed = match stranger {
        Err(_) => true,
        Ok(mut client) => client.get_fleet(pb::GetFleetRequest::default()).await.is_err(),
    };
    assert!(failed);
}

/// A control plane's certificate is renewed while agents are connected: they stay, and new ones come.
#[tokio::test]
async fn certificates_may_be_renewed_under_way() {
    let certs = Certs::new();
    let plane = Plane::start(&certs).await;
    let first = plane.agent("n1", &certs, Some(certs.pair("nodes/n1"))).await;
    serves(&first).await;
    let before = std::fs::read(certs.file("ca.crt")).unwrap();
    let again = Command::Init {
        dir: certs.file(""),
        host: vec!["cp.example".to_owned()],
    };
    assert_eq!(certs::run(&again).unwrap().len(), 2, "the authority stays");
    assert_eq!(std::fs::read(certs.file("ca.crt")).unwrap(), before);
    tokio::time::sleep(kplane_tls::INTERVAL * 2).await;
    let second = plane.agent("n2", &certs, Some(certs.pair("nodes/n2"))).await;
    serves(&second).await;
    assert!(first.connection().borrow().live);
}

/// Plain text does not leave the machine unless the operator says so.
#[tokio::test]
async fn plain_text_is_refused_on_addresses_of_others() {
    let config = |listen: &str, insecure| control_plane::Config {
        agent_listen: Some(listen.parse().unwrap()),
        protection: control_plane::Protection::PlainText { exposed: insecure },
        ..control_plane::Config::new(control_plane::Origin::Manifests("/dev/null".into()))
    };
    let error = control_plane::build(config("0.0.0.0:0", false)).await.unwrap_err();
    assert!(error.to_string().contains("--insecure"), "{error}");
    for (listen, insecure) in [
        ("127.0.0.1:0", false),
        ("[::1]:0", false),
        ("0.0.0.0:0", true),
    ] {
        let bound = control_plane::build(config(listen, insecure)).await;
        assert!(bound.is_ok(), "{listen}");
    }
}

/// Keys are for their owner, and a name cannot leave the folder.
#[test]
fn keys_are_private_and_names_are_names() {
    use std::os::unix::fs::PermissionsExt as _;
    let certs = Certs::new();
    for key in ["ca.key", "server.key", "nodes/n1.key", "users/alice.key"] {
        let mode = std::fs::metadata(certs.file(key)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{key}");
    }
    for name in ["../n1", "", ".n1", "a/b", "a\nb"] {
        let names = vec![name.to_owned()];
        let made = certs::run(&Command::Node {
            dir: certs.file(""),
            names,
        });
        assert!(
            made.unwrap_err().to_string().contains("no valid name"),
            "{name:?}"
        );
    }
    let nowhere = TempDir::new().unwrap();
    let (dir, names) = (nowhere.path().to_owned(), vec!["n1".to_owned()]);
    let error = certs::run(&Command::Node { dir, names }).unwrap_err();
    assert!(error.to_string().contains("certs init"), "{error}");
}

#[tokio::test]
async fn health_is_served_inside_tls_to_callers_without_a_certificate() {
    let certs = Certs::new();
    let plane = Plane::start(&certs).await;
    let address = plane.bound.http_addr.unwrap();
    assert!(
        kplane_http::client::get(address, "/livez").await.is_none(),
        "plain text"
    );
    let files = ClientFiles {
        authorities: certs.file("ca.crt"),
        pair: None,
    };
    let mut config = ClientConfig::clone(&files.load().unwrap());
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let stream = TcpStream::connect(address).await.unwrap();
    let config = Some(config.into());
    let mut stream = greet(stream, config, "localhost").await.unwrap();
    stream.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(answer.ends_with("ok\n"), "{answer}");
}
