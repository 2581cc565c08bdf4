//! Agents with tokens while the API server does not answer, by a clock that passes while all wait.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use kplane_desired_state::kubernetes::Api;
use kplane_proto::v1::Hello;
use kube::client::Body;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::time::Instant;
use tonic::{Code, Status};

use super::signatures::{ISSUER, Signer, claims};
use super::*;
use crate::fleet::{Begun, Session};

/// Time for which the API server is away.
const OUTAGE: Duration = Duration::from_secs(600);
const ACCOUNT: &str = "system:serviceaccount:kplane:kplane-nodeagent";

/// An API server that answers at once, or not at all.
#[derive(Default)]
struct Script {
    away: bool,
    /// Tokens whose pods were deleted.
    deleted: HashSet<String>,
    /// Reviews so far.
    reviews: usize,
}

/// A control plane with its API server.
struct Cluster {
    script: Arc<Mutex<Script>>,
    signer: Arc<Signer>,
    hub: Arc<Hub>,
    authenticator: Arc<Authenticator>,
}

impl Cluster {
    async fn start() -> Self {
        let (script, signer) = (Arc::<Mutex<Script>>::default(), Arc::new(Signer::new()));
        let hub = hub(kubernetes::NAME);
        let nodes = ["n1", "n2"].map(NodeFacts::sample).to_vec();
        hub.store().publish(Publication::sample(vec![], nodes));
        hub.store().set_synced();
        let config = AuthenticatorConfig {
            agent_accounts: vec![ACCOUNT.to_owned()],
            ..AuthenticatorConfig::default()
        };
        let api = Arc::new(Api::of(client(&script, &signer)));
        let authenticator = Authenticator::open(&config, Arc::clone(&hub), Some(api)).unwrap();
        tokio::spawn(Arc::clone(&authenticator).follow_keys());
        // Until the keys are read: no other task runs.
        tokio::time::sleep(Duration::from_secs(1)).await;
        Self {
            script,
            signer,
            hub,
            authenticator,
        }
    }

    fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    /// Returns a token of an agent's pod; `serial` tells those of a node apart.
    fn token(&self, node: &str, serial: u64) -> Token {
        self.token_for(node, serial, 86_400)
    }

    /// Returns a token with so many seconds left.
    fn token_for(&self, node: &str, serial: u64, seconds: i64) -> Token {
        let mut claims = claims(seconds);
        claims["kubernetes.io"]["node"] = json!({ "name": node });
        claims["jti"] = json!(serial);
        self.signer.token(&json!({"alg": "ES256", "kid": "k1"}), &claims)
    }

    /// Says Hello as the agent of a node.
    async fn greet(&self, node: &str, token: &Token) -> Result<CredentialWatch, Status> {
        let connection = ConnectionGuard::of(TransportIdentity::Anonymous);
        let headers = bearer(token.as_str());
        let caller = self.authenticator.authenticate(Port::Agents, &connection, &headers).await;
        Ok(caller?.authorize_agent(&node.into()).await?)
    }

    fn serve(&self, node: &str) -> Begun {
        Session::begin(
            self.hub.agents(),
            &node.into(),
            &Hello::default(),
            String::new(),
        )
        .unwrap()
    }

    /// Wants an agent to be refused for now, with a hint.
    async fn is_unavailable(&self, node: &str, token: &Token) {
        let status = self.greet(node, token).await.map(drop).unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        let text = status.message();
        assert!(text.contains("so try again: "), "{text}");
    }
}

/// Returns a client of an API server that follows a script.
fn client(script: &Arc<Mutex<Script>>, signer: &Arc<Signer>) -> kube::Client {
    let (script, signer) = (Arc::clone(script), Arc::clone(signer));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (script, signer) = (Arc::clone(&script), Arc::clone(&signer));
        async move {
            let answer = answer(&script, &signer, request).await;
            Ok::<_, Infallible>(Response::new(Body::from(answer.to_string().into_bytes())))
        }
    });
    kube::Client::new(service, "default")
}

async fn answer(script: &Mutex<Script>, signer: &Signer, request: Request<Body>) -> Value {
    if script.lock().unwrap().away {
        return std::future::pending().await;
    }
    let path = request.uri().path().to_owned();
    match path.as_str() {
        "/.well-known/openid-configuration" => return json!({ "issuer": ISSUER }),
        "/openid/v1/jwks" => return signer.document("k1"),
        "/apis/authentication.k8s.io/v1/tokenreviews" => {}
        other => panic!("{other} was requested"),
    }
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let mut review: Value = serde_json::from_slice(&body).unwrap();
    let token = review["spec"]["token"].as_str().unwrap().to_owned();
    let token = Token::parse(&token).unwrap();
    let node = Parts::parse(&token)
        .unwrap()
        .identity()
        .unwrap()
        .binding()
        .unwrap()
        .name
        .clone();
    let mut script = script.lock().unwrap();
    script.reviews += 1;
    let exists = !script.deleted.contains(token.as_str());
    review["status"] = json!({
        "authenticated": exists, "audiences": [AUDIENCE],
        "user": { "username": ACCOUNT, "extra": { "authentication.kubernetes.io/node-name": [node] } },
    });
    review
}

#[tokio::test(start_paused = true)]
async fn known_agents_come_back_and_unknown_ones_wait_while_the_api_server_is_away() {
    let cluster = Cluster::start().await;
    let [first, renewed] = [1, 2].map(|serial| cluster.token("n1", serial));
    let unknown = cluster.token("n2", 1);
    let mut stream = cluster.greet("n1", &first).await.unwrap();
    let session = cluster.serve("n1");

    cluster.script().away = true;
    let since = Instant::now();
    let mut rounds = 0;
    while since.elapsed() < OUTAGE {
        // The token of before, and one that only the published keys prove: the kubelet renewed it.
        for token in [&first, &renewed] {
            let again = cluster.greet("n1", token).await;
            assert!(again.is_ok(), "{:?} after {:?}", again, since.elapsed());
        }
        cluster.is_unavailable("n2", &unknown).await;
        rounds += 1;
    }
    assert!(rounds > 20, "{rounds} rounds");
    let ended = stream.ended().now_or_never();
    assert!(ended.is_none(), "{ended:?}");

    // It answers again: the pod of the stream is gone meanwhile.
    cluster.script().away = false;
    cluster.script().deleted.insert(first.as_str().to_owned());
    let ended = timeout(Duration::from_secs(60), stream.ended()).await;
    assert_eq!(ended.unwrap().reason, RefusalReason::BadCredential);
    let code = cluster.greet("n1", &first).await.map(drop).unwrap_err().code();
    assert_eq!(code, Code::Unauthenticated);
    for (node, token) in [("n1", &renewed), ("n2", &unknown)] {
        assert!(cluster.greet(node, token).await.is_ok(), "{node}");
    }
    drop(session);
}

/// The keys alone decide while the API server has too much to do, but not while it is away.
#[tokio::test(start_paused = true)]
async fn many_unknown_agents_do_not_get_in_while_the_api_server_is_away() {
    let cluster = Cluster::start().await;
    let crowd: Vec<Token> = (0..100).map(|serial| cluster.token("n2", serial)).collect();
    let greeted = join_all(crowd.iter().map(|token| cluster.greet("n2", token))).await;
    assert!(greeted.iter().all(Result::is_ok));
    assert!(cluster.script().reviews < crowd.len());

    cluster.script().away = true;
    let later: Vec<Token> = (100..200).map(|serial| cluster.token("n2", serial)).collect();
    // The first of them finds out that the API server does not answer.
    cluster.is_unavailable("n2", &cluster.token("n2", 200)).await;
    join_all(later.iter().map(|token| cluster.is_unavailable("n2", token))).await;
}

/// Whatever the order of questions and outages, a token is taken without a review only in its time: within some seconds of the
/// last review, or as long as nobody answers.
#[tokio::test(start_paused = true)]
async fn a_review_counts_for_a_while_and_not_beyond_the_time_of_the_token() {
    const FRESH: Duration = Duration::from_secs(10);
    // The API server decides about tokens whose time is over, by its own clock.
    const LEFT: [i64; 4] = [-3_600, -1, 3_600, 86_400];
    let cluster = Cluster::start().await;
    let tokens = LEFT.map(|left| cluster.token_for("n1", 1, left));
    let mut reviewed = [None::<Instant>; LEFT.len()];
    let mut dice = SmallRng::seed_from_u64(1);
    for step in 0..500 {
        tokio::time::advance(Duration::from_millis(dice.random_range(0..6_000))).await;
        let away = dice.random_bool(0.3);
        let number = dice.random_range(0..LEFT.len());
        let before = {
            let mut script = cluster.script();
            script.away = away;
            script.reviews
        };
        let remembered = if LEFT[number] > 0 { reviewed[number] } else { None };
        let is_fresh = remembered.is_some_and(|at| at.elapsed() < FRESH);
        let taken = cluster.greet("n1", &tokens[number]).await.map(drop);
        let reviews = cluster.script().reviews - before;
        let what = format!("step {step}: {} s left, away: {away}", LEFT[number]);
        assert_eq!(reviews, usize::from(!away && !is_fresh), "{what}");
        assert_eq!(
            taken.is_ok(),
            !away || remembered.is_some(),
            "{what}: {taken:?}"
        );
        if reviews > 0 {
            reviewed[number] = Some(Instant::now());
        }
    }
}

/// Measures what an agent's token costs: `cargo test --release -p kp-controlplane --lib token_check -- --ignored
/// --nocapture`.
#[tokio::test(start_paused = true)]
#[ignore = "a measurement"]
async fn token_check_costs() {
    let cluster = Cluster::start().await;
    let token = cluster.token("n1", 1);
    let _served = cluster.serve("n1");
    let mut known = Vec::new();
    let mut verified = Vec::new();
    for _ in 0..2_000 {
        let begun = std::time::Instant::now();
        cluster.greet("n1", &token).await.unwrap();
        known.push(begun.elapsed());
    }
    // Tokens that were not seen before, while the API server is away: the keys decide.
    cluster.script().away = true;
    for round in 0..2_000 {
        let other = cluster.token("n1", round + 2);
        let begun = std::time::Instant::now();
        cluster.greet("n1", &other).await.unwrap();
        verified.push(begun.elapsed());
    }
    for (what, mut times) in [("known", known), ("verified by keys", verified)] {
        times.sort_unstable();
        let [p50, p99] = [1_000, 1_980].map(|place| times[place]);
        println!("token {what}: p50 {p50:?}, p99 {p99:?}");
    }
}
