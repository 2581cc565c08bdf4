//! Rights of callers: whole agents, a control plane and callers of the status API, with certificates of
//! `kp-controlplane certs` and of strangers, over real sockets.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use kp_controlplane::app as control_plane;
use kp_nodeagent::app;
use kplane_agents::certs::{self, Command};
use kplane_tls::{ClientConfig, ClientFiles, Files as _, KeyPair, ServerFiles, greet};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::certs::Certs;
use crate::support::{agent_of, manifests};

/// Longest that anything may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

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
        let manifests = manifests();
        let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let bound = control_plane::build(control_plane::Config {
            agent_listen: any,
            status_listen: any,
            http_listen: any,
            http_tls: true,
            protection: control_plane::Protection::Files(ServerFiles {
                pair: certs.pair("server"),
                client_authorities: Some(certs.file("ca.crt")),
            }),
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

/// A token in place of a certificate. `rotation.rs` tests newer ones.
#[tokio::test]
async fn a_token_proves_the_node() {
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
    let before = certs.read("ca.crt");
    assert_eq!(certs.init().len(), 2, "the authority stays");
    assert_eq!(certs.read("ca.crt"), before);
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
