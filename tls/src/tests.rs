//! Handshakes over memory, with certificates made for the test.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair as RcKey,
};
use rustls::{ClientConfig, ServerConfig};
use tempfile::TempDir;
use time::{Duration, OffsetDateTime};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsAcceptor;

use super::*;

/// An authority, and a folder with what it issues.
struct Authority {
    folder: TempDir,
    issuer: Issuer<'static, RcKey>,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = RcKey::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("ca.crt"), certificate.pem()).unwrap();
        let issuer = Issuer::new(params, key);
        Self { folder, issuer }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Issues a certificate that is valid from and to these moments, relative to now.
    fn issue(&self, file: &str, names: &[&str], group: &str, valid: [Duration; 2]) -> KeyPair {
        let hosts: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        params.distinguished_name.push(DnType::CommonName, names[0]);
        params.distinguished_name.push(DnType::OrganizationName, group);
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let now = OffsetDateTime::now_utc();
        [params.not_before, params.not_after] = valid.map(|after| now + after);
        let key = RcKey::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let pair = KeyPair::in_folder(&self.file(""), file);
        fs::write(&pair.certificate, certificate.pem()).unwrap();
        fs::write(&pair.key, key.serialize_pem()).unwrap();
        pair
    }

    fn server(&self) -> ServerFiles {
        ServerFiles {
            pair: self.issue("server", &["cp.example", "192.0.2.1"], "", NOW),
            client_authorities: Some(self.file("ca.crt")),
        }
    }

    fn client(&self, pair: Option<KeyPair>) -> Arc<ClientConfig> {
        let authorities = self.file("ca.crt");
        ClientFiles { authorities, pair }.load().unwrap()
    }
}

const HOUR: Duration = Duration::HOUR;
const NOW: [Duration; 2] = [Duration::seconds(-60), HOUR];

/// Greets a server; returns the subject of the certificate that it saw, if any.
async fn meet(
    server: Arc<ServerConfig>,
    client: Option<Arc<ClientConfig>>,
    host: &str,
) -> io::Result<Option<Subject>> {
    let (near, far) = tokio::io::duplex(64 << 10);
    let served = async {
        let mut stream = TlsAcceptor::from(server).accept(far).await?;
        let (_, session) = stream.get_ref();
        let certificate = session.peer_certificates().and_then(<[_]>::first);
        let subject = certificate.map(|certificate| Subject::of(certificate).unwrap());
        stream.write_all(b"x").await?;
        stream.flush().await?;
        Ok(subject)
    };
    let asked = async {
        let mut stream = greet(near, client, host).await?;
        // TLS 1.3: the server's verdict about the client comes after the client's handshake.
        stream.write_all(b"PRI").await?;
        stream.read_u8().await
    };
    let (served, asked) = tokio::join!(served, asked);
    asked?;
    served
}

#[tokio::test]
async fn a_client_is_known_by_its_certificate() {
    let authority = Authority::new("a");
    let server = authority.server().load().unwrap();
    let node = authority.issue("n1", &["system:node:n1"], "system:nodes", NOW);
    let client = authority.client(Some(node));
    for host in ["cp.example", "192.0.2.1"] {
        let seen = meet(server.clone(), Some(client.clone()), host).await;
        assert_eq!(seen.unwrap().unwrap().node(), Some("n1"), "{host}");
    }
    let anonymous = authority.client(None);
    let seen = meet(server.clone(), Some(anonymous), "cp.example").await;
    assert_eq!(seen.unwrap(), None);
}

/// Authorities from text, and a certificate that was loaded elsewhere.
#[tokio::test]
async fn a_client_needs_no_files() {
    let authority = Authority::new("a");
    let server = authority.server().load().unwrap();
    let user = authority.issue("alice", &["alice"], "x", NOW);
    let loaded = authority.client(Some(user));
    let identity = Identity::Loaded(loaded.client_auth_cert_resolver.clone());
    let text = fs::read(authority.file("ca.crt")).unwrap();
    let trusted = Authorities::of_text(text, "ConfigMap a/b");
    let client = client_config(&trusted, &identity).unwrap();
    let seen = meet(server, Some(client), "cp.example").await;
    assert_eq!(seen.unwrap().unwrap().name, "alice");

    let empty = Authorities::of_text("", "ConfigMap a/b");
    let problem = client_config(&empty, &identity).unwrap_err().to_string();
    assert!(
        problem.starts_with("ConfigMap a/b contains no certificate"),
        "{problem}"
    );
}

#[tokio::test]
async fn everybody_else_is_refused() {
    let (authority, other) = (Authority::new("a"), Authority::new("b"));
    let server = authority.server().load().unwrap();
    let pair = |valid| authority.issue("n1", &["system:node:n1"], "system:nodes", valid);
    let refused = |client, host: &'static str| {
        let met = meet(server.clone(), client, host);
        async move { met.await.unwrap_err().to_string() }
    };
    let good = pair(NOW);
    let wrong_host = refused(Some(authority.client(Some(good))), "other.example").await;
    assert!(wrong_host.contains("other.example"), "{wrong_host}");
    let ended = authority.client(Some(pair([-HOUR * 2, -HOUR])));
    let ended = refused(Some(ended), "cp.example").await;
    assert!(
        ended.contains("this side's certificate has expired"),
        "{ended}"
    );
    // Certificates of another authority, on either side.
    let stranger = other.issue("n1", &["system:node:n1"], "system:nodes", NOW);
    refused(Some(authority.client(Some(stranger))), "cp.example").await;
    let unknown = refused(Some(other.client(None)), "cp.example").await;
    assert!(unknown.contains("UnknownIssuer"), "{unknown}");
    // Plain text against TLS.
    refused(None, "cp.example").await;
}

/// A certificate that begins in an hour is not called expired, whichever side shows it.
#[tokio::test]
async fn a_certificate_that_is_not_valid_yet_is_told_with_the_clocks_difference() {
    let authority = Authority::new("a");
    let early = |file| authority.issue(file, &["cp.example"], "", [HOUR, HOUR * 2]);
    let server = authority.server();
    let early_client = authority.client(Some(early("client")));
    let own = meet(server.load().unwrap(), Some(early_client), "cp.example").await;
    let early_server = ServerFiles {
        pair: early("early"),
        ..server
    };
    let client = Some(authority.client(None));
    let peer = meet(early_server.load().unwrap(), client, "cp.example").await;
    for (met, whose) in [(own, "this side's"), (peer, "the peer's")] {
        let said = met.unwrap_err().to_string();
        let begins = format!("{whose} certificate is not valid yet: it begins at ");
        assert!(said.starts_with(&begins), "{said}");
        let difference = said.contains("59 min before that") || said.contains("60 min before that");
        assert!(difference && !said.contains("expired"), "{said}");
    }
}

#[tokio::test]
async fn a_server_in_plain_text_is_named() {
    let authority = Authority::new("a");
    let (near, mut far) = tokio::io::duplex(64 << 10);
    far.write_all(b"HTTP/1.1 400 Bad Request\r\n").await.unwrap();
    let client = Some(authority.client(None));
    let error = greet(near, client, "cp.example").await.err().unwrap();
    assert_eq!(error.to_string(), "the peer speaks plain text, not TLS");
}

#[tokio::test]
async fn the_end_of_a_servers_certificate_is_known() {
    let authority = Authority::new("a");
    let follower = Follower::start(authority.server(), "a test").unwrap();
    let left = follower.ends_at().unwrap().duration_since(SystemTime::now()).unwrap().as_secs();
    assert!((3_500..=3_600).contains(&left), "{left} s");
    let files = ClientFiles {
        authorities: authority.file("ca.crt"),
        pair: None,
    };
    let client = Follower::start(files, "a test").unwrap();
    assert_eq!(client.ends_at(), None, "it has no certificate");
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let authority = Authority::new("a");
    let files = authority.server();
    let problem = |change: &dyn Fn(&mut ServerFiles)| {
        let mut files = files.clone();
        change(&mut files);
        files.load().unwrap_err().to_string()
    };
    let missing = problem(&|files| files.pair.key = "/nowhere/server.key".into());
    assert!(
        missing.starts_with("cannot read /nowhere/server.key: "),
        "{missing}"
    );
    let swapped = problem(&|files| files.pair.key = files.pair.certificate.clone());
    assert!(swapped.contains("contains no private key"), "{swapped}");
    let empty = problem(&|files| files.client_authorities = Some("/dev/null".into()));
    assert!(
        empty.contains("/dev/null contains no certificate"),
        "{empty}"
    );
    let endless = problem(&|files| files.pair.key = "/dev/zero".into());
    assert!(endless.starts_with("/dev/zero is larger"), "{endless}");
    let other = authority.issue("other", &["x"], "", NOW);
    let mismatch = problem(&|files| files.pair.key = other.key.clone());
    assert!(mismatch.contains("server.crt with key"), "{mismatch}");
}

/// Files that change are taken over; files that cannot be used change nothing.
#[tokio::test(start_paused = true)]
async fn a_follower_follows() {
    let authority = Authority::new("a");
    let files = authority.server();
    let follower = Follower::start(files.clone(), "test").unwrap();
    let first = follower.current();
    let wait = || tokio::time::sleep(INTERVAL * 3);
    wait().await;
    assert!(Arc::ptr_eq(&first, &follower.current()));
    fs::write(&files.pair.key, "half a k").unwrap();
    wait().await;
    assert!(Arc::ptr_eq(&first, &follower.current()));
    authority.server();
    while Arc::ptr_eq(&first, &follower.current()) {
        wait().await;
    }
    let client = authority.client(None);
    meet(follower.current(), Some(client), "cp.example").await.unwrap();
}

#[test]
fn subjects_that_name_no_node() {
    let subject = |name: &str, groups: &[&str]| Subject {
        name: name.to_owned(),
        groups: groups.iter().map(ToString::to_string).collect(),
    };
    let nodes = &["x", "system:nodes"][..];
    assert_eq!(subject("system:node:n1", nodes).node(), Some("n1"));
    assert_eq!(
        Subject::of_node("n1"),
        subject("system:node:n1", &nodes[1..])
    );
    for (name, groups) in [
        ("system:node:", nodes),
        ("n1", nodes),
        ("system:node:n1", &["system:node"][..]),
        ("", &[]),
    ] {
        assert_eq!(subject(name, groups).node(), None, "{name:?} {groups:?}");
    }
    assert!(subject("system:node:n1", &[]).is_of_node());
    assert!(subject("n1", nodes).is_of_node());
    assert!(!subject("alice", &["x"]).is_of_node());
    assert_eq!(Subject::of(b"\x30\x82"), None);
}
