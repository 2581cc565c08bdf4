//! Clients that share no code with kplane: OpenSSL's, and gRPC's for Python.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use kp_controlplane::app::Bound;
use kplane_agents::connection_limits::Limits;
use kplane_agents::identity;
use kplane_rig::privilege::{require_command, require_tool};
use kplane_tls::KeyPair;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rcgen::{CertificateParams, DnType, Issuer};
use serde_json::Value;
use time::{Duration, OffsetDateTime};
use tokio::task::spawn_blocking;

use crate::support::secure::Certs;

/// Preface of an HTTP/2 client, with empty SETTINGS.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// The type of HTTP/2's frame SETTINGS, and its place in a frame.
const SETTINGS: (usize, u8) = (3, 4);
/// Debian's Python, which has Debian's grpcio.
const PYTHON: &str = "/usr/bin/python3";

async fn control_plane(certs: &Certs, identity: identity::AuthenticatorConfig) -> Bound {
    certs.control_plane(Limits::AGENTS, identity).await
}

/// Makes a certificate of node n1 that is valid from and to these moments, relative to now.
fn issue(certs: &Certs, name: &str, valid: [Duration; 2]) {
    let read = |name: &str| fs::read_to_string(certs.file(name)).unwrap();
    let key = rcgen::KeyPair::from_pem(&read("ca.key")).unwrap();
    let issuer = Issuer::from_ca_cert_pem(&read("ca.crt"), key).unwrap();
    let mut params = CertificateParams::default();
    let subject = &mut params.distinguished_name;
    subject.push(DnType::CommonName, "system:node:n1");
    subject.push(DnType::OrganizationName, "system:nodes");
    let now = OffsetDateTime::now_utc();
    [params.not_before, params.not_after] = valid.map(|after| now + after);
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let pair = certs.pair(name);
    fs::write(pair.certificate, certificate.pem()).unwrap();
    fs::write(pair.key, key.serialize_pem()).unwrap();
}

/// Returns `openssl s_client`, which ends with the server's side of the connection, or after a minute.
fn s_client(address: SocketAddr, authority: &Path, pair: Option<&KeyPair>) -> Command {
    let mut command = Command::new("timeout");
    command
        .args(["60", "openssl", "s_client", "-brief", "-ign_eof"])
        .args(["-connect", &address.to_string()])
        .args(["-servername", "localhost", "-verify_hostname", "localhost"])
        .args(["-verify_return_error", "-alpn", "h2", "-CAfile"])
        .arg(authority);
    if let Some(pair) = pair {
        command.arg("-cert").arg(&pair.certificate);
        command.arg("-key").arg(&pair.key);
    }
    command
}

/// Wants the server to speak HTTP/2 with a client, inside TLS 1.3.
fn is_greeted(mut command: Command) {
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(PREFACE).unwrap();
    let mut frame = [0; 9];
    let read = child.stdout.take().unwrap().read_exact(&mut frame);
    let id = i32::try_from(child.id()).unwrap();
    kill(Pid::from_raw(id), Signal::SIGTERM).unwrap();
    let said = child.wait_with_output().unwrap().stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(read.is_ok(), "{command:?}: {said}");
    assert_eq!(frame[SETTINGS.0], SETTINGS.1, "{frame:?}");
    assert!(said.contains("Protocol version: TLSv1.3"), "{said}");
    assert!(said.contains("Verification: OK"), "{said}");
}

/// Wants a handshake to fail for a reason that the client shows.
fn is_refused(mut command: Command, reason: &str) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{command:?}: {said}");
    assert!(said.contains(reason), "{reason:?} is not in {said}");
}

#[tokio::test]
async fn openssl_speaks_tls_1_3_with_valid_certificates_and_nothing_else() {
    if !require_tool("openssl").unwrap() {
        return;
    }
    let (certs, strangers) = (Certs::new(&["n1"], &[]), Certs::new(&["n1"], &[]));
    let day = Duration::days(1);
    issue(&certs, "nodes/ended", [-day * 2, -day]);
    issue(&certs, "nodes/early", [day, day * 2]);
    let bound = control_plane(&certs, identity::AuthenticatorConfig::default()).await;
    let ports = [bound.agent_addr, bound.status_addr].map(Option::unwrap);
    let checked = spawn_blocking(move || {
        let ca = certs.file("ca.crt");
        for port in ports {
            is_greeted(s_client(port, &ca, None));
            is_greeted(s_client(port, &ca, Some(&certs.pair("nodes/n1"))));
            let mut old = s_client(port, &ca, None);
            old.arg("-tls1_2");
            is_refused(old, "alert protocol version");
            for (pair, reason) in [
                // The names of both authorities are the same; their keys are not.
                (strangers.pair("nodes/n1"), "alert decrypt error"),
                (certs.pair("nodes/ended"), "alert certificate expired"),
                (certs.pair("nodes/early"), "alert"),
            ] {
                is_refused(s_client(port, &ca, Some(&pair)), reason);
            }
            let careful = s_client(port, &strangers.file("ca.crt"), None);
            is_refused(careful, "certificate verify failed");
        }
    });
    checked.await.unwrap();
}

/// The Python client.
struct Python {
    descriptors: tempfile::NamedTempFile,
}

/// The lines that the client printed, and whether it was refused.
struct Said(Vec<Value>);

impl Python {
    /// Returns the client, unless this machine lacks it and need not have it.
    fn get() -> Option<Self> {
        let mut probe = Command::new(PYTHON);
        probe.args(["-c", "import grpc, google.protobuf"]);
        let what = "Debian's python3-grpcio and python3-protobuf";
        if !require_command(&mut probe, what).unwrap() {
            return None;
        }
        let mut descriptors = tempfile::NamedTempFile::new().unwrap();
        descriptors.write_all(kplane_proto::v1::DESCRIPTORS).unwrap();
        Some(Self { descriptors })
    }

    /// Runs a task until its end.
    async fn run(
        &self,
        address: SocketAddr,
        certs: &Certs,
        credential: Credential<'_>,
        task: &[&str],
    ) -> Said {
        let mut command = Command::new("timeout");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/foreign/client.py");
        command.args(["60", PYTHON, script]);
        command.arg(self.descriptors.path()).arg(address.to_string());
        command.arg(certs.file("ca.crt"));
        match credential {
            Credential::None => {}
            Credential::Pair(name) => {
                let pair = certs.pair(name);
                command.arg("--certificate").arg(pair.certificate);
                command.arg("--key").arg(pair.key);
            }
            Credential::Token(token) => drop(command.args(["--token", token])),
        }
        command.args(task);
        let output = spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{said}");
        let lines = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<Value> =
            lines.lines().map(serde_json::from_str).collect::<Result<_, _>>().unwrap();
        assert!(!lines.is_empty(), "{said}");
        Said(lines)
    }
}

/// The proof that the client shows.
#[derive(Clone, Copy, Debug)]
enum Credential<'a> {
    None,
    Pair(&'a str),
    Token(&'a str),
}

impl Said {
    /// Wants a refusal with a code, and with a hint that a person can use.
    fn is_refused(&self, code: &str, hint: &str) {
        let last = self.0.last().unwrap();
        assert_eq!(last["code"], code, "{:?}", self.0);
        let details = last["details"].as_str().unwrap();
        assert!(details.contains(hint), "{details}");
    }
}

#[tokio::test]
async fn a_python_client_reads_the_fleet_if_it_has_the_right() {
    let Some(python) = Python::get() else {
        return;
    };
    let certs = Certs::new(&["n1"], &["alice"]);
    let tokens = certs.file("tokens.csv");
    fs::write(&tokens, "secret,tool,1\n").unwrap();
    let identity = identity::AuthenticatorConfig {
        token_auth_file: Some(tokens),
        ..identity::AuthenticatorConfig::default()
    };
    let bound = control_plane(&certs, identity).await;
    let [agents, status] = [bound.agent_addr, bound.status_addr].map(Option::unwrap);
    let run = |credential, task| python.run(status, &certs, credential, task);

    let watched = run(Credential::Pair("users/alice"), &["watch", "n1"]);
    let own = Credential::Pair("nodes/n1");
    let served = python.run(agents, &certs, own, &["agent", "n1"]);
    let (watched, served) = tokio::join!(watched, served);
    assert_eq!(served.0[0]["welcome"], 1);
    assert!(watched.0.last().unwrap()["applied"]["n1"].as_u64() > Some(0));
    let listed = run(Credential::Token("secret"), &["nodes"]).await;
    assert_eq!(listed.0, watched.0[watched.0.len() - 1..]);

    let hint = "give kpctl --client-certificate and --client-key, or --token-file";
    run(Credential::None, &["nodes"]).await.is_refused("UNAUTHENTICATED", hint);
    run(Credential::Token("guess"), &["nodes"])
        .await
        .is_refused("UNAUTHENTICATED", "does not list the token");
    run(own, &["nodes"])
        .await
        .is_refused("PERMISSION_DENIED", "nodes may not use the status API");
}

#[tokio::test]
async fn a_python_agent_gets_the_state_of_its_own_node_alone() {
    let Some(python) = Python::get() else {
        return;
    };
    let certs = Certs::new(&["n1"], &[]);
    let bound = control_plane(&certs, identity::AuthenticatorConfig::default()).await;
    let agents = bound.agent_addr.unwrap();
    let run = |credential, task| python.run(agents, &certs, credential, task);
    let own = Credential::Pair("nodes/n1");
    let Said(lines) = run(own, &["agent", "n1"]).await;
    assert_eq!(lines[0]["welcome"], 1);
    // The Service, which all nodes share, and then the node's own configuration.
    let piece = |snapshot: bool, complete: bool| serde_json::json!({ "objects": 1, "snapshot": snapshot, "complete": complete });
    assert_eq!(lines[1..], [piece(true, false), piece(false, true)]);
    let record = bound.hub().agents().record("n1").unwrap();
    assert_eq!(record.version, "python");
    let report = record.report.as_ref().expect("its report");
    assert!(report.applied_revision > 0);

    run(own, &["agent", "n2"])
        .await
        .is_refused("PERMISSION_DENIED", "the credential is of node \"n1\"");
    run(Credential::None, &["agent", "n1"])
        .await
        .is_refused("UNAUTHENTICATED", "agents need a certificate of their node");
    assert!(bound.hub().agents().record("n2").is_none());
}
