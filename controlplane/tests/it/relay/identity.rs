//! Relays prove who they are, and check who their root is.

use kp_controlplane::certs::{self, Command};
use kp_controlplane::identity as identities;
use kplane_tls::{KeyPair, ServerFiles};
use std::path::PathBuf;

use super::*;

/// Certificates of one authority.
struct Certs(TempDir);

impl Certs {
    fn new() -> Self {
        let certs = Self(TempDir::new().unwrap());
        let dir = certs.0.path().to_owned();
        let names = |name: &str| vec![name.to_owned()];
        for command in [
            Command::Init {
                dir: dir.clone(),
                host: Vec::new(),
            },
            Command::User {
                dir: dir.clone(),
                names: names("alice"),
                admin: false,
            },
            Command::Node {
                dir: dir.clone(),
                names: names("a"),
            },
        ] {
            certs::run(&command).unwrap();
        }
        std::fs::write(certs.file("tokens"), "secret,edge,1,\n").unwrap();
        std::fs::write(certs.file("token"), "secret\n").unwrap();
        certs
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn protection(&self) -> Protection {
        Protection::Files(ServerFiles {
            pair: KeyPair {
                certificate: self.file("server.crt"),
                key: self.file("server.key"),
            },
            client_authorities: Some(self.file("ca.crt")),
        })
    }

    fn config(&self, origin: Origin, at: SocketAddr) -> Config {
        Config {
            status_listen: Some(at),
            protection: self.protection(),
            identity: identities::Config {
                token_auth_file: Some(self.file("tokens")),
                ..identities::Config::default()
            },
            ..Config::new(origin)
        }
    }

    /// Returns the origin of a relay with these credentials.
    fn relay(&self, of: SocketAddr, pair: Option<&str>, token: bool) -> Origin {
        let Origin::ControlPlane(mut config) = relay_of(&[of]) else {
            panic!("a relay");
        };
        config.flags.source_server_name = Some("localhost".to_owned());
        config.flags.source_client_certificate = pair.map(|name| self.file(&format!("{name}.crt")));
        config.flags.source_client_key = pair.map(|name| self.file(&format!("{name}.key")));
        config.flags.source_token_file = token.then(|| self.file("token"));
        Origin::ControlPlane(config)
    }
}

/// Waits until a relay has a picture, or says why it has none.
async fn outcome(relay: &Bound) -> Result<(), String> {
    let hub = relay.hub();
    let until = Instant::now() + DEADLINE;
    loop {
        if hub.store.head().borrow().synced {
            return Ok(());
        }
        if let Some(issue) = hub.issues().first() {
            return Err(issue.reason.clone());
        }
        assert!(Instant::now() < until);
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_relay_proves_who_it_is() {
    let [top, at] = addresses();
    let (certs, strangers, folder) = (Certs::new(), Certs::new(), folder(2));
    let origin = Origin::Manifests(folder.path().to_owned());
    let _root = build(certs.config(origin, top)).await.unwrap();
    for (pair, token, refused) in [
        // Its own certificate says that it is a control plane.
        (None, false, None),
        (Some("users/alice"), false, None),
        (None, true, None),
        (
            Some("nodes/a"),
            false,
            Some("nodes may not use the status API"),
        ),
    ] {
        let origin = certs.relay(top, pair, token);
        let relay = build(certs.config(origin, at)).await.unwrap();
        match (outcome(&relay).await, refused) {
            (Ok(()), None) => {}
            (Err(reason), Some(part)) => assert!(reason.contains(part), "{reason}"),
            other => panic!("{pair:?} {token}: {other:?}"),
        }
        relay.shutdown_token().cancel();
        relay.wait().await.unwrap();
        until_free(at).await;
    }
    // A relay of another authority trusts no root of this one.
    let origin = strangers.relay(top, None, false);
    let relay = build(strangers.config(origin, at)).await.unwrap();
    let reason = outcome(&relay).await.unwrap_err();
    assert!(reason.contains("invalid peer certificate"), "{reason}");
}

#[tokio::test]
async fn a_relay_does_not_start_without_an_authority_of_its_root() {
    let [top, at] = addresses();
    let certs = Certs::new();
    let origin = certs.relay(top, None, false);
    let mut config = certs.config(origin, at);
    if let Protection::Files(files) = &mut config.protection {
        files.client_authorities = None;
    }
    let error = build(config).await.unwrap_err().to_string();
    assert!(error.contains("--source-certificate-authority"), "{error}");
}
