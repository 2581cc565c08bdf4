//! Identities and rights: every kind of caller at every method, with the API server's tokens and decisions.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use http::Method as Http;
use kplane_tests::cluster::{Api, objects};
use kplane_tests::wait::eventually;
use serde_json::{Value, json};
use tonic::Code;

use crate::cluster::support::secure::{Method, SecurePlane};
use crate::cluster::support::world::DEADLINE;
use crate::cluster::support::{World, with_world};

/// The namespace of agents, and their account.
const KPLANE: &str = "kplane";
const AGENT: &str = "kplane-nodeagent";
/// The audience of tokens for the rig's API server.
const API_AUDIENCE: &str = "https://kubernetes.default.svc.cluster.local";

/// Creates a Pod of an account on a node; returns its token for an audience.
pub(crate) fn pod_token(
    api: &Api,
    account: &str,
    pod: &str,
    node: &str,
    audience: &str,
) -> Result<String> {
    let mut object = objects::pod(KPLANE, pod, "agent", node);
    object["spec"]["serviceAccountName"] = json!(account);
    let object = api.apply(&object)?;
    let bound = json!({
        "kind": "Pod", "apiVersion": "v1", "name": pod, "uid": object["metadata"]["uid"],
    });
    token(api, account, audience, &bound)
}

fn token(api: &Api, account: &str, audience: &str, bound: &Value) -> Result<String> {
    let path = format!("/api/v1/namespaces/{KPLANE}/serviceaccounts/{account}/token");
    let request = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": { "audiences": [audience], "expirationSeconds": 600, "boundObjectRef": bound },
    });
    let answer = api.request(Http::POST, &path, Some(&request))?;
    let token = answer["status"]["token"].as_str();
    Ok(token.context("no token")?.to_owned())
}

/// Creates an account with a ClusterRole; returns its token for the API server.
fn user(api: &Api, name: &str, role: Option<&str>) -> Result<String> {
    api.apply(&json!({
        "kind": "ServiceAccount", "metadata": { "name": name, "namespace": KPLANE },
    }))?;
    if let Some(role) = role {
        api.apply(&json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": { "name": name },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role },
            "subjects": [{ "kind": "ServiceAccount", "name": name, "namespace": KPLANE }],
        }))?;
    }
    api.token(&format!("{KPLANE}/{name}"), None, 600)
}

fn secure(world: &World) -> Result<SecurePlane> {
    SecurePlane::start(world)
}

/// Deletes what a test made in the agents' namespace.
pub(crate) fn tidy(api: &Api) -> Result<()> {
    for pod in api.list("Pod", Some(KPLANE))? {
        let name = pod["metadata"]["name"].as_str().context("no name")?;
        let now = json!({ "gracePeriodSeconds": 0 });
        api.delete_with("Pod", &format!("{KPLANE}/{name}"), &now)?;
    }
    Ok(())
}

/// Wants each credential to be answered for node-1 and for node-2 as it should be.
fn greets(plane: &SecurePlane, cases: &[(&str, &str, &str, [Code; 2])]) -> Result<()> {
    for (what, pair, token, wanted) in cases {
        let some = |text: &&str| !text.is_empty();
        let caller = plane.caller(Some(*pair).filter(some), Some(*token).filter(some))?;
        let found = [caller.hello("node-1")?, caller.hello("node-2")?];
        ensure!(found == *wanted, "{what}: {found:?} instead of {wanted:?}");
    }
    Ok(())
}

pub(crate) fn an_agent_speaks_for_the_node_of_its_pod_alone() -> Result<()> {
    use Code::{Ok as Yes, PermissionDenied as No, Unauthenticated as Nobody};
    with_world(|world| {
        let plane = secure(world)?;
        let api = world.api();
        let one = pod_token(api, AGENT, "agent-1", "node-1", "kplane")?;
        let two = pod_token(api, AGENT, "agent-2", "node-2", "kplane")?;
        let for_api = pod_token(api, AGENT, "agent-1", "node-1", API_AUDIENCE)?;
        user(api, "other", None)?;
        let other = pod_token(api, "other", "other-1", "node-1", "kplane")?;
        let unbound = api.token(&format!("{KPLANE}/{AGENT}"), Some("kplane"), 600)?;
        let mut forged = one.clone();
        let last = forged.pop().context("empty")?;
        forged.push(if last == 'A' { 'Q' } else { 'A' });

        let going = plane.caller(None, Some(&two))?.speak_for("node-2")?.context("agent 2")?;
        let now = json!({ "gracePeriodSeconds": 0 });
        api.delete_with("Pod", &format!("{KPLANE}/agent-2"), &now)?;
        greets(
            &plane,
            &[
                ("nothing", "", "", [Nobody; 2]),
                ("a certificate", "nodes/node-1", "", [Yes, No]),
                ("a user's certificate", "users/bob", "", [No; 2]),
                ("a token", "", &one, [Yes, No]),
                ("a token for the API server", "", &for_api, [Nobody; 2]),
                ("a token of another account", "", &other, [No; 2]),
                ("a token of no pod", "", &unbound, [No; 2]),
                ("a forged token", "", &forged, [Nobody; 2]),
                ("garbage", "", "garbage", [Nobody; 2]),
            ],
        )?;

        // The pod is gone: no new stream, and the open one ends.
        let thief = plane.caller(None, Some(&two))?;
        eventually(DEADLINE, "the token of a deleted pod is refused", || {
            let code = thief.hello("node-2")?;
            ensure!(code == Nobody, "{code:?}");
            anyhow::Ok(())
        })?;
        let ended = going.end(Duration::from_secs(60))?;
        ensure!(ended.code() == Nobody, "{ended:?}");
        tidy(api)
    })
}

/// A Node that was deleted and made again is another one, although its name is the same.
pub(crate) fn a_token_of_an_earlier_node_is_refused() -> Result<()> {
    with_world(|world| {
        let plane = secure(world)?;
        let api = world.api();
        let node = objects::node("node-9", &[], "a");
        let mut bound = None;
        for _ in 0..2 {
            let node = api.apply(&node)?;
            let uid = node["metadata"]["uid"].clone();
            let reference =
                json!({ "kind": "Node", "apiVersion": "v1", "name": "node-9", "uid": uid });
            let fresh = token(api, AGENT, "kplane", &reference)?;
            let caller = plane.caller(None, Some(&fresh))?;
            eventually(DEADLINE, "the agent of node-9 is admitted", || {
                let code = caller.hello("node-9")?;
                ensure!(code == Code::Ok, "{code:?}");
                anyhow::Ok(())
            })?;
            api.delete("Node", "node-9")?;
            bound.get_or_insert(fresh);
        }
        api.apply(&node)?;
        let old = bound.context("no token")?;
        let code = plane.caller(None, Some(&old))?.hello("node-9")?;
        ensure!(
            matches!(code, Code::NotFound | Code::Unauthenticated),
            "{code:?}"
        );
        api.delete("Node", "node-9")
    })
}

pub(crate) fn users_have_the_rights_that_the_cluster_gives_them() -> Result<()> {
    use Code::{Ok as Yes, PermissionDenied as No, Unauthenticated as Nobody};
    with_world(|world| {
        let plane = secure(world)?;
        let api = world.api();
        let nobody = user(api, "nobody", None)?;
        let reader = user(api, "reader", Some("kplane-reader"))?;
        let operator = user(api, "operator", Some("kplane-operator"))?;
        let agent = pod_token(api, AGENT, "agent-1", "node-1", "kplane")?;
        let admin = std::fs::read(world.cluster.kubeconfig())?;
        let admin: Value = serde_json::from_slice(&admin)?;
        let admin = admin["users"][0]["user"]["token"].as_str().context("no token")?;
        let read = [Yes, Yes, Yes, Yes, Yes, Yes, No, No, No];
        let act = [Yes, Yes, Yes, Yes, Yes, Yes, Yes, No, Yes];
        for (what, pair, token, wanted) in [
            ("nothing", None, None, [Nobody; 9]),
            ("garbage", None, Some("garbage"), [Nobody; 9]),
            ("a node's certificate", Some("nodes/node-1"), None, [No; 9]),
            ("an agent's token", None, Some(agent.as_str()), [No; 9]),
            ("a user without rights", None, Some(&nobody), [No; 9]),
            (
                "a certificate without rights",
                Some("users/alice"),
                None,
                [No; 9],
            ),
            ("a reader", None, Some(&reader), read),
            ("an operator", None, Some(&operator), act),
            ("the cluster's administrator", None, Some(admin), [Yes; 9]),
            (
                "an administrator's certificate",
                Some("users/bob"),
                None,
                act,
            ),
            (
                "a replica's certificate",
                Some("server"),
                None,
                [No, No, No, No, No, No, No, Yes, No],
            ),
        ] {
            let caller = plane.caller(pair, token)?;
            let found: Vec<Code> = Method::ALL
                .map(|method| caller.call(method))
                .into_iter()
                .collect::<Result<_>>()?;
            ensure!(found == wanted, "{what}: {found:?} instead of {wanted:?}");
        }
        // A caller that tries tokens is stopped; callers whose tokens the cluster signed are not.
        let guess = plane.caller(None, Some("guess"))?;
        eventually(DEADLINE, "wrong tokens are too many", || {
            let code = guess.call(Method::GetFleet)?;
            ensure!(code == Code::ResourceExhausted, "{code:?}");
            anyhow::Ok(())
        })?;
        let code = plane.caller(None, Some(&reader))?.call(Method::GetFleet)?;
        ensure!(code == Yes, "{code:?}");
        audited(world)?;
        for name in ["reader", "operator"] {
            api.delete("ClusterRoleBinding", name)?;
        }
        tidy(api)
    })
}

/// The audit log names callers and reasons, and no secret.
fn audited(world: &World) -> Result<()> {
    let log = std::fs::read_to_string(world.cluster.folder().join("audit"))?;
    let lines: Vec<Value> = log.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let has = |user: &str, decision: &str, action: &str| {
        lines.iter().any(|line| {
            line["user"] == user && line["decision"] == decision && line["action"] == action
        })
    };
    ensure!(has("bob", "allowed", "update /kplane/fleet"), "{log}");
    ensure!(has("", "refused", ""), "{log}");
    // The head of a JSON Web Token.
    ensure!(!log.contains("eyJ"), "{log}");
    Ok(())
}

pub(crate) fn known_agents_come_back_while_the_api_server_is_away() -> Result<()> {
    with_world(|world| {
        let plane = secure(world)?;
        let api = world.api();
        let before = pod_token(api, AGENT, "agent-1", "node-1", "kplane")?;
        let newer = pod_token(api, AGENT, "agent-1", "node-1", "kplane")?;
        let unknown = pod_token(api, AGENT, "agent-2", "node-2", "kplane")?;
        let reader = user(api, "reader", Some("kplane-reader"))?;
        let hello = |token: &str, node| plane.caller(None, Some(token))?.hello(node);
        ensure!(hello(&before, "node-1")? == Code::Ok);
        world.cluster.kill_apiserver()?;
        // The token of before, and one that only the published keys can prove: the pod renewed it.
        let known = [hello(&before, "node-1")?, hello(&newer, "node-1")?];
        let unknown_now = hello(&unknown, "node-2")?;
        let reads = plane.caller(None, Some(&reader))?.call(Method::GetFleet)?;
        // The way in when nothing else answers.
        let bob = plane.caller(Some("users/bob"), None)?.call(Method::GetFleet)?;
        world.cluster.start_apiserver()?;
        ensure!(known == [Code::Ok; 2], "{known:?}");
        ensure!(unknown_now == Code::Unavailable, "{unknown_now:?}");
        ensure!(reads == Code::Unavailable, "{reads:?}");
        ensure!(bob == Code::Ok, "{bob:?}");
        eventually(DEADLINE, "the unknown agent is admitted", || {
            let code = hello(&unknown, "node-2")?;
            ensure!(code == Code::Ok, "{code:?}");
            anyhow::Ok(())
        })?;
        world.api().delete("ClusterRoleBinding", "reader")?;
        tidy(world.api())
    })
}

/// With no other flag than --peers, replicas prove to each other that they are replicas.
fn answer_each_other(api: &Api, planes: &[SecurePlane]) -> Result<()> {
    let reader = user(api, "reader", Some("kplane-reader"))?;
    for plane in planes {
        let caller = plane.caller(None, Some(&reader))?;
        eventually(DEADLINE, "replicas answer each other", || {
            let fleet = caller.fleet()?;
            let missing = &fleet.missing_replicas;
            ensure!(fleet.replicas == 2 && missing.is_empty(), "{missing:?}");
            anyhow::Ok(())
        })?;
    }
    Ok(())
}

/// Two replicas that start at once agree on one authority, which outlives both, and publish it.
pub(crate) fn replicas_make_one_authority_and_keep_it() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let certs = world.cluster.folder().join("own-certs");
        std::fs::create_dir_all(&certs)?;
        let start = |replica| SecurePlane::start_own(world, replica, &certs);
        let planes = [start(0)?, start(1)?];
        let bundle = eventually(DEADLINE, "the bundle is published", || {
            let map = api.get("ConfigMap", "kplane/kplane-ca")?;
            let bundle = map.and_then(|map| Some(map["data"]["ca.crt"].as_str()?.to_owned()));
            bundle.context("no bundle")
        })?;
        std::fs::write(certs.join("ca.crt"), &bundle)?;
        let token = pod_token(api, AGENT, "agent-1", "node-1", "kplane")?;
        let serves = |plane: &SecurePlane| {
            let agent = plane.caller(None, Some(&token))?;
            eventually(DEADLINE, "a replica serves", || {
                let code = agent.hello("node-1")?;
                ensure!(code == Code::Ok, "{code:?}");
                anyhow::Ok(())
            })
        };
        for plane in &planes {
            serves(plane)?;
        }
        answer_each_other(api, &planes)?;
        drop(planes);
        let secret = |api: &Api| {
            let secret = api.get("Secret", "kplane/kplane-certificates")?;
            Ok::<_, anyhow::Error>(secret.context("no Secret")?["data"].clone())
        };
        let before = secret(api)?;
        serves(&start(0)?)?;
        ensure!(secret(api)? == before, "the Secret has changed");

        // What is in the Secret is not ours: the control plane says so, and writes nothing.
        let data = json!({ "data": { "ca.key": "bm9uc2Vuc2U=" } });
        api.patch("Secret", "kplane/kplane-certificates", &data)?;
        let plane = start(0)?;
        eventually(DEADLINE, "the control plane says what is wrong", || {
            let log = world.logged("plane-secure-0")?;
            ensure!(
                log.contains("delete it, and the control plane makes new ones"),
                "{log}"
            );
            anyhow::Ok(())
        })?;
        api.delete("Secret", "kplane/kplane-certificates")?;
        let made = eventually(DEADLINE, "a new authority is published", || {
            let map = api.get("ConfigMap", "kplane/kplane-ca")?.context("no bundle")?;
            let now = map["data"]["ca.crt"].as_str().unwrap_or_default().to_owned();
            ensure!(now != bundle, "the old bundle");
            anyhow::Ok(now)
        })?;
        std::fs::write(certs.join("ca.crt"), made)?;
        serves(&plane)?;
        tidy(api)
    })
}
