//! Callers at the authenticator of a control plane without a cluster: certificates and listed tokens.

mod away;
mod signatures;

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderValue};
use kplane_desired_state::admission::Admission;
use kplane_desired_state::publish::Publication;
use kplane_desired_state::source::kubernetes;
use kplane_model::{NodeFacts, NodeName};
use kplane_tls::INTERVAL;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::*;
use crate::connection_limits::{ConnectionGuard, TransportIdentity};
use crate::hub::Hub;

/// Tokens of each kind of owner.
const TOKENS: &str = "node-1,system:node:n1,1,system:nodes\n\
                      almost,system:node:n1,1,\n\
                      alice,alice,2,\n\
                      bob,bob,3,kplane:admins\n";

fn hub(source: &'static str) -> std::sync::Arc<Hub> {
    Hub::sample_with_index(source, Admission::default()).0
}

fn authenticator(folder: &Path, rules: Option<&str>) -> std::sync::Arc<Authenticator> {
    let tokens = folder.join("tokens.csv");
    fs::write(&tokens, TOKENS).unwrap();
    let authorization_file = rules.map(|rules| {
        let file = folder.join("rules.yaml");
        fs::write(&file, rules).unwrap();
        file
    });
    let config = AuthenticatorConfig {
        token_auth_file: Some(tokens),
        authorization_file,
        ..AuthenticatorConfig::default()
    };
    Authenticator::open(&config, hub("manifests"), None).unwrap()
}

fn certificate(name: &str, groups: &[&str], left: Duration) -> TransportIdentity {
    let subject = Subject {
        name: name.to_owned(),
        groups: groups.iter().map(ToString::to_string).collect(),
    };
    TransportIdentity::Certificate(subject, Some(SystemTime::now() + left))
}

const DAY: Duration = Duration::from_secs(86_400);

fn bearer(token: &str) -> HeaderMap {
    let value = HeaderValue::from_str(&format!("Bearer {token}")).unwrap();
    HeaderMap::from_iter([(http::header::AUTHORIZATION, value)])
}

/// Returns why a caller is refused as the agent of n1, when it reads, and when it acts.
async fn refusals(
    authenticator: &std::sync::Arc<Authenticator>,
    caller: &TransportIdentity,
    headers: &HeaderMap,
) -> [Option<RefusalReason>; 3] {
    let node: NodeName = "n1".into();
    let connection = ConnectionGuard::of(caller.clone());
    let agent = async {
        let caller = authenticator.authenticate(Port::Agents, &connection, headers).await?;
        caller.authorize_agent(&node).await.map(drop)
    };
    let user = async |right: Right| {
        let caller = authenticator.authenticate(Port::Status, &connection, headers).await?;
        caller.may(&right).await
    };
    [
        agent.await,
        user(Right::ReadStatus).await,
        user(Right::Act).await,
    ]
    .map(|outcome: Result<(), Refusal>| outcome.err().map(|refusal| refusal.reason))
}

type Case = (TransportIdentity, &'static str, [Option<RefusalReason>; 3]);

/// Wants each caller, with its token, to be refused as it should be; and each refusal to be counted.
async fn check_all(cases: Vec<Case>) {
    let folder = TempDir::new().unwrap();
    let authenticator = authenticator(folder.path(), None);
    let mut refused = 0;
    for (caller, token, wanted) in cases {
        let headers = match token {
            "" => HeaderMap::new(),
            token => bearer(token),
        };
        let found = refusals(&authenticator, &caller, &headers).await;
        assert_eq!(found, wanted, "{caller:?} {token:?}");
        refused += found.iter().flatten().count() as u64;
    }
    let counted: u64 = authenticator.refusals().iter().map(|(_, _, count)| count).sum();
    assert_eq!(counted, refused);
}

const DENIED: Option<RefusalReason> = Some(RefusalReason::NoRight);
const NO_AGENT: Option<RefusalReason> = Some(RefusalReason::NotAnAgent);

#[tokio::test]
async fn a_certificate_opens_what_its_subject_may() {
    let nodes = &["system:nodes"][..];
    let node = |name: &str| certificate(&format!("system:node:{name}"), nodes, DAY);
    let other = [Some(RefusalReason::OtherNode), DENIED, DENIED];
    let ended = certificate("system:node:n1", nodes, Duration::ZERO);
    let no_group = certificate("system:node:n1", &[], DAY);
    let bob = certificate("bob", &[ADMINS], DAY);
    check_all(vec![
        (TransportIdentity::PlainText, "", [None; 3]),
        (
            TransportIdentity::Anonymous,
            "",
            [Some(RefusalReason::NoCredential); 3],
        ),
        (node("n1"), "", [None, DENIED, DENIED]),
        (ended, "", [Some(RefusalReason::Ended); 3]),
        (node("n2"), "", other),
        (node("n11"), "", other),
        (no_group, "", [NO_AGENT, DENIED, DENIED]),
        (
            certificate("n1", nodes, DAY),
            "",
            [NO_AGENT, DENIED, DENIED],
        ),
        (certificate("alice", &[], DAY), "", [NO_AGENT, None, DENIED]),
        (bob, "", [NO_AGENT, None, None]),
        // A certificate counts more than a token.
        (
            certificate("alice", &[], DAY),
            "bob",
            [NO_AGENT, None, DENIED],
        ),
    ])
    .await;
}

#[tokio::test]
async fn a_listed_token_opens_what_its_owner_may() {
    let anonymous = || TransportIdentity::Anonymous;
    check_all(vec![
        (anonymous(), "node-1", [None, DENIED, DENIED]),
        (anonymous(), "almost", [NO_AGENT, DENIED, DENIED]),
        (anonymous(), "alice", [NO_AGENT, None, DENIED]),
        (anonymous(), "bob", [NO_AGENT, None, None]),
        (
            anonymous(),
            "unknown",
            [Some(RefusalReason::BadCredential); 3],
        ),
    ])
    .await;
}

#[tokio::test]
async fn a_file_of_rights_takes_the_place_of_the_built_in_ones() {
    let folder = TempDir::new().unwrap();
    let rules = "rules: [{users: [alice], verbs: [update], paths: [/kplane/fleet]}]";
    let authenticator = authenticator(folder.path(), Some(rules));
    let denied = Some(RefusalReason::NoRight);
    let (alice, bob) = (
        certificate("alice", &[], DAY),
        certificate("bob", &[ADMINS], DAY),
    );
    let found = refusals(&authenticator, &alice, &HeaderMap::new()).await;
    assert_eq!(found[1..], [denied, None]);
    // The administrators of the certificate authority are not locked out by a file.
    let found = refusals(&authenticator, &bob, &HeaderMap::new()).await;
    assert_eq!(found[1..], [None, None]);
    let carol = certificate("carol", &[], DAY);
    assert_eq!(
        refusals(&authenticator, &carol, &HeaderMap::new()).await[1..],
        [denied, denied]
    );
}

/// Admits the agent of n1 with a credential.
async fn admitted(
    authenticator: &std::sync::Arc<Authenticator>,
    caller: TransportIdentity,
    headers: &HeaderMap,
) -> CredentialWatch {
    let connection = ConnectionGuard::of(caller);
    let caller = authenticator.authenticate(Port::Agents, &connection, headers).await;
    caller.unwrap().authorize_agent(&"n1".into()).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_with_its_certificate() {
    let folder = TempDir::new().unwrap();
    let authenticator = authenticator(folder.path(), None);
    let certificate = certificate(
        "system:node:n1",
        &["system:nodes"],
        Duration::from_secs(600),
    );
    let mut credential_watch = admitted(&authenticator, certificate, &HeaderMap::new()).await;
    let early = timeout(Duration::from_secs(590), credential_watch.ended()).await;
    assert!(early.is_err(), "{early:?}");
    let refusal = timeout(Duration::from_secs(20), credential_watch.ended()).await;
    assert_eq!(refusal.unwrap().reason, RefusalReason::Ended);
}

#[tokio::test(start_paused = true)]
async fn a_watch_ends_with_its_credential() {
    let folder = TempDir::new().unwrap();
    let authenticator = authenticator(folder.path(), None);
    let connection = ConnectionGuard::of(certificate("alice", &[], Duration::from_secs(600)));
    let caller = authenticator
        .authenticate(Port::Status, &connection, &HeaderMap::new())
        .await
        .unwrap();
    let early = timeout(Duration::from_secs(590), caller.ended()).await;
    assert!(early.is_err(), "{early:?}");
    let (outbox, mut answers) = mpsc::channel::<Result<(), tonic::Status>>(1);
    let watch = std::future::pending();
    spawn_watch(Some(caller), outbox, watch).unwrap();
    let last = answers.recv().await.unwrap().unwrap_err();
    assert_eq!(last.code(), tonic::Code::Unauthenticated);
    assert!(answers.recv().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_token_that_is_no_longer_listed_loses_its_stream_within_a_minute() {
    let folder = TempDir::new().unwrap();
    let authenticator = authenticator(folder.path(), None);
    let mut kept = admitted(
        &authenticator,
        TransportIdentity::Anonymous,
        &bearer("node-1"),
    )
    .await;
    let hour = Duration::from_secs(3_600);
    assert!(timeout(hour, kept.ended()).await.is_err());
    let renewed = TOKENS.replace("node-1,", "node-1-new,");
    fs::write(folder.path().join("tokens.csv"), renewed).unwrap();
    let refusal = timeout(Duration::from_secs(60), kept.ended()).await;
    assert_eq!(refusal.unwrap().reason, RefusalReason::BadCredential);
}

#[tokio::test(start_paused = true)]
async fn a_renewed_token_keeps_the_stream() {
    let folder = TempDir::new().unwrap();
    let authenticator = authenticator(folder.path(), None);
    let mut credential_watch = admitted(
        &authenticator,
        TransportIdentity::Anonymous,
        &bearer("node-1"),
    )
    .await;
    let both = format!("{TOKENS}node-1-new,system:node:n1,1,system:nodes\n");
    let file = folder.path().join("tokens.csv");
    fs::write(&file, both).unwrap();
    tokio::time::sleep(INTERVAL * 2).await;
    // The token of another owner changes nothing.
    credential_watch.renew(Token::parse("alice").unwrap());
    tokio::time::sleep(Duration::from_secs(2)).await;
    credential_watch.renew(Token::parse("node-1-new").unwrap());
    tokio::time::sleep(Duration::from_secs(2)).await;
    fs::write(&file, "node-1-new,system:node:n1,1,system:nodes\n").unwrap();
    let hour = Duration::from_secs(3_600);
    assert!(timeout(hour, credential_watch.ended()).await.is_err());
    let refused = authenticator.refusals();
    let renewals = refused
        .iter()
        .find(|(port, reason, _)| (*port, *reason) == (Port::Agents, RefusalReason::NotAnAgent));
    assert_eq!(renewals.unwrap().2, 1);
}

/// The agent sends a token once, perhaps before the control plane knows it.
#[tokio::test(start_paused = true)]
async fn a_renewed_token_that_is_listed_later_keeps_the_stream() {
    let folder = TempDir::new().unwrap();
    let authenticator = authenticator(folder.path(), None);
    let mut credential_watch = admitted(
        &authenticator,
        TransportIdentity::Anonymous,
        &bearer("node-1"),
    )
    .await;
    credential_watch.renew(Token::parse("node-1-new").unwrap());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let file = folder.path().join("tokens.csv");
    let both = format!("{TOKENS}node-1-new,system:node:n1,1,system:nodes\n");
    fs::write(&file, both).unwrap();
    let minute = Duration::from_secs(60);
    assert!(timeout(minute, credential_watch.ended()).await.is_err());
    fs::write(&file, "node-1-new,system:node:n1,1,system:nodes\n").unwrap();
    assert!(timeout(minute * 60, credential_watch.ended()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn the_agent_of_a_deleted_node_loses_its_stream_within_a_minute() {
    let hub = hub(kubernetes::NAME);
    let authenticator = Authenticator::open(
        &AuthenticatorConfig::default(),
        std::sync::Arc::clone(&hub),
        None,
    )
    .unwrap();
    let publish = |known| {
        let node = NodeFacts {
            known,
            ..NodeFacts::sample("n1")
        };
        hub.store().publish(Publication::sample(vec![], vec![node]));
    };
    publish(true);
    hub.store().set_synced();
    let certificate = certificate("system:node:n1", &["system:nodes"], DAY);
    let mut credential_watch = admitted(&authenticator, certificate, &HeaderMap::new()).await;
    let hour = Duration::from_secs(3_600);
    assert!(timeout(hour, credential_watch.ended()).await.is_err());
    publish(false);
    let refusal = timeout(Duration::from_secs(60), credential_watch.ended()).await;
    assert_eq!(refusal.unwrap().reason, RefusalReason::NoSuchNode);
}
