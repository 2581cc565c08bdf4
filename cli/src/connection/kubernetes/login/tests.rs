use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use kube::config::Kubeconfig;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

struct World(TempDir);

impl World {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// A program that prints an answer and counts how often it ran.
    fn program(&self, script: &str) -> PathBuf {
        let runs = self.0.path().join("runs");
        let text = format!("#!/bin/sh\necho x >> {}\n{script}\n", runs.display());
        let path = self.write("plugin", &text);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn runs(&self) -> usize {
        let runs = fs::read_to_string(self.0.path().join("runs"));
        runs.unwrap_or_default().lines().count()
    }

    async fn login(&self, user: &Value, server: &str) -> Result<Login, LoginError> {
        let kubeconfig = json!({
            // No authorities at all: those of the system may be missing.
            "clusters": [{ "name": "a", "cluster": {
                "server": server, "certificate-authority-data": "Cg==",
            } }],
            "users": [{ "name": "a", "user": user }],
            "contexts": [{ "name": "a", "context": { "cluster": "a", "user": "a" } }],
            "current-context": "a",
        });
        let kubeconfig: Kubeconfig = serde_json::from_value(kubeconfig).unwrap();
        let selected = Selected {
            config: Config::try_from(kubeconfig).unwrap(),
            context: "a".to_owned(),
            place: "FILE".to_owned(),
        };
        login(selected, Duration::from_secs(1)).await
    }

    async fn token(&self, user: &Value) -> Option<String> {
        let login = self.login(user, "https://192.0.2.1").await.ok().unwrap();
        let header = login.token?.to_header().unwrap();
        Some(header.to_str().unwrap().to_owned())
    }

    async fn error(&self, user: &Value) -> String {
        let login = self.login(user, "https://192.0.2.1").await;
        login.err().unwrap().to_string()
    }
}

fn exec(program: &Path) -> Value {
    json!({ "exec": {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": program,
        "interactiveMode": "Never",
        "installHint": "Install it with: apt-get install plugin",
    } })
}

#[tokio::test]
async fn every_kind_of_token_is_found() {
    let world = World::new();
    assert_eq!(world.token(&json!({})).await, None);
    let token = world.token(&json!({ "token": "abc" })).await;
    assert_eq!(token.unwrap(), "Bearer abc");
    // kubectl writes no line break behind a token, but projected volumes and people do.
    let file = world.write("token", "def\n");
    let token = world.token(&json!({ "tokenFile": file })).await;
    assert_eq!(token.unwrap(), "Bearer def");
    let both = world.token(&json!({ "tokenFile": file, "token": "abc" })).await;
    assert_eq!(both.unwrap(), "Bearer def");
    let absent = json!({ "tokenFile": "/nowhere/token", "token": "abc" });
    assert_eq!(world.token(&absent).await.unwrap(), "Bearer abc");
    // A password is not for the control plane.
    let basic = json!({ "username": "u", "password": "p" });
    assert_eq!(world.token(&basic).await, None);
}

#[tokio::test]
async fn a_program_makes_the_token_and_runs_once() {
    for expiry in ["", ",\"expirationTimestamp\":\"2999-01-01T00:00:00Z\""] {
        let world = World::new();
        let answer = format!(
            "{{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\
             \"status\":{{\"token\":\"made\"{expiry}}}}}"
        );
        let program = world.program(&format!("echo '{answer}'"));
        assert_eq!(world.token(&exec(&program)).await.unwrap(), "Bearer made");
        assert_eq!(world.runs(), 1, "{expiry:?}");
    }
}

#[tokio::test]
async fn credentials_that_fail_are_named_and_not_shown() {
    let world = World::new();
    let failing = world.program("echo secret; echo 'no session' >&2; exit 3");
    let error = world.error(&exec(&failing)).await;
    assert!(
        error.contains("no session") && error.contains("plugin"),
        "{error}"
    );
    assert!(!error.contains("secret"), "{error}");
    let talking = world.program("echo secret");
    let error = world.error(&exec(&talking)).await;
    assert!(error.contains("printed no ExecCredential"), "{error}");
    assert!(!error.contains("secret"), "{error}");
    let error = world.error(&exec(Path::new("/nowhere/plugin"))).await;
    assert!(error.contains("Install it with"), "{error}");
    let error = world.error(&json!({ "tokenFile": "/nowhere/token" })).await;
    assert!(error.contains("/nowhere/token"), "{error}");
    let error = world.error(&json!({ "token": "sec\nret" })).await;
    assert!(
        error.contains("single word") && !error.contains("ret"),
        "{error}"
    );
    let broken = json!({ "client-certificate": "/nowhere/c.crt", "client-key": "/nowhere/c.key" });
    let error = world.error(&broken).await;
    assert!(error.contains("/nowhere/c.crt"), "{error}");
}

#[tokio::test]
async fn no_token_goes_to_another_machine_in_plain_text() {
    let world = World::new();
    let user = json!({ "token": "abc" });
    let refused = world.login(&user, "http://192.0.2.1:8080").await.err().unwrap();
    assert!(matches!(refused, LoginError::PlainText { .. }), "{refused}");
    world.login(&user, "http://127.0.0.1:8080").await.ok().unwrap();
    world.login(&json!({}), "http://192.0.2.1:8080").await.ok().unwrap();
}
