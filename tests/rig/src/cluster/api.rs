//! A blocking client of the API server, for objects as JSON values.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use http::{Method, Request};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use super::kinds::Kind;
use crate::netns::NetNs;

/// The field manager of everything applied.
const FIELD_MANAGER: &str = "kplane-tests";
/// Longest time of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Objects in one page of a list.
const PAGE: usize = 5_000;

/// A client that lives in the cluster's namespace. Clones share its connections. Call it from
/// ordinary threads, not from inside an async runtime.
///
/// Objects are named by their kind and `namespace/name`, or `name` where the kind has no
/// namespaces. Errors are [`kube::Error`]s below a line that names the request; see
/// [`status_code`].
#[derive(Clone)]
pub struct Api {
    client: Client,
    runtime: Arc<Runtime>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

/// Returns the HTTP status with which the server refused, such as 409, if the server did.
pub fn status_code(error: &anyhow::Error) -> Option<u16> {
    match error.downcast_ref::<kube::Error>() {
        Some(kube::Error::Api(status)) => Some(status.code),
        _ => None,
    }
}

impl Api {
    /// Opens a client with the credentials of a kubeconfig, which connects from inside a namespace.
    ///
    /// # Errors
    /// The kubeconfig cannot be used. The server need not be there yet.
    pub fn open(ns: &NetNs, kubeconfig: &Path) -> Result<Self> {
        // Threads start in their creator's namespace, and the thread that sends a request makes the
        // connection.
        let _inside = ns.enter()?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kubernetes-api")
            .enable_all()
            .build()?;
        let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
        let options = KubeConfigOptions::default();
        let mut config = runtime.block_on(Config::from_custom_kubeconfig(kubeconfig, &options))?;
        config.connect_timeout = Some(REQUEST_TIMEOUT);
        let client = {
            let _context = runtime.enter();
            Client::try_from(config)?
        };
        Ok(Self {
            client,
            runtime: Arc::new(runtime),
        })
    }

    /// Creates an object or sets the given fields (server-side apply, by force).
    ///
    /// # Errors
    /// The server's error.
    pub fn apply(&self, object: &Value) -> Result<Value> {
        let (kind, path) = Self::at(object)?;
        let path = format!("{path}?fieldManager={FIELD_MANAGER}&force=true");
        self.send(Method::PATCH, &path, APPLY, Some(&complete(kind, object)))
            .with_context(|| format!("apply {}", shown(object)))
    }

    /// Creates an object. An object without `metadata.name` needs a `generateName`.
    ///
    /// # Errors
    /// The server's error; 409 if the object exists.
    pub fn create(&self, object: &Value) -> Result<Value> {
        let kind = kind_of(object)?;
        let path = kind.collection(object["metadata"]["namespace"].as_str());
        self.send(Method::POST, &path, JSON, Some(&complete(kind, object)))
            .with_context(|| format!("create {}", shown(object)))
    }

    /// Replaces an object as a whole. A `metadata.resourceVersion` must still be current.
    ///
    /// # Errors
    /// The server's error; 409 if the object has changed.
    pub fn replace(&self, object: &Value) -> Result<Value> {
        let (kind, path) = Self::at(object)?;
        self.send(Method::PUT, &path, JSON, Some(&complete(kind, object)))
            .with_context(|| format!("replace {}", shown(object)))
    }

    /// Changes some fields of an object (JSON merge patch: `null` removes a field).
    ///
    /// # Errors
    /// The server's error; 404 if the object does not exist.
    pub fn patch(&self, kind: &str, key: &str, fields: &Value) -> Result<Value> {
        let path = Kind::named(kind)?.object(key)?;
        self.send(Method::PATCH, &path, MERGE, Some(fields))
            .with_context(|| format!("patch {kind} {key}"))
    }

    /// Changes some fields of an object's status, named below `status`.
    ///
    /// # Errors
    /// The server's error; 404 if the object does not exist.
    pub fn patch_status(&self, kind: &str, key: &str, status: &Value) -> Result<Value> {
        let path = format!("{}/status", Kind::named(kind)?.object(key)?);
        let fields = json!({ "status": status });
        self.send(Method::PATCH, &path, MERGE, Some(&fields))
            .with_context(|| format!("patch the status of {kind} {key}"))
    }

    /// Sets the given fields of an object's status, such as one of its conditions, and leaves those of others
    /// (server-side apply, by force).
    ///
    /// # Errors
    /// The server's error; 404 if the object does not exist.
    pub fn apply_status(&self, object: &Value) -> Result<Value> {
        let (kind, path) = Self::at(object)?;
        let path = format!("{path}/status?fieldManager={FIELD_MANAGER}&force=true");
        self.send(Method::PATCH, &path, APPLY, Some(&complete(kind, object)))
            .with_context(|| format!("apply the status of {}", shown(object)))
    }

    /// Deletes an object. A Pod on a node goes when its kubelet agrees.
    ///
    /// # Errors
    /// The server's error; 404 if the object does not exist.
    pub fn delete(&self, kind: &str, key: &str) -> Result<()> {
        self.delete_with(kind, key, &json!({}))
    }

    /// Deletes an object with options, such as `{"gracePeriodSeconds": 0}`.
    ///
    /// # Errors
    /// The server's error; 404 if the object does not exist.
    pub fn delete_with(&self, kind: &str, key: &str, options: &Value) -> Result<()> {
        let path = Kind::named(kind)?.object(key)?;
        let answer: Result<Value> = self.send(Method::DELETE, &path, JSON, Some(options));
        answer.map(drop).with_context(|| format!("delete {kind} {key}"))
    }

    /// Reads an object; `None` if it does not exist.
    ///
    /// # Errors
    /// The server's error.
    pub fn get(&self, kind: &str, key: &str) -> Result<Option<Value>> {
        let path = Kind::named(kind)?.object(key)?;
        let answer: Result<Value> = self.send(Method::GET, &path, JSON, None);
        match answer {
            Err(error) if status_code(&error) == Some(404) => Ok(None),
            answer => answer.map(Some).with_context(|| format!("get {kind} {key}")),
        }
    }

    /// Reads all objects of a kind, in one namespace or in all. Each has its `kind` and
    /// `apiVersion`, which the server leaves out.
    ///
    /// # Errors
    /// The server's error.
    pub fn list(&self, kind: &str, namespace: Option<&str>) -> Result<Vec<Value>> {
        let kind = Kind::named(kind)?;
        let path = kind.collection(namespace);
        let (mut all, mut token) = (Vec::new(), String::new());
        loop {
            let page = format!("{path}?limit={PAGE}&continue={token}");
            let mut answer: Value = self
                .send(Method::GET, &page, JSON, None)
                .with_context(|| format!("list {}", kind.name))?;
            if let Value::Array(items) = answer["items"].take() {
                all.extend(items.into_iter().map(|item| complete(kind, &item)));
            }
            match answer["metadata"]["continue"].as_str() {
                Some(next) if !next.is_empty() => token = next.to_owned(),
                _ => return Ok(all),
            }
        }
    }

    /// Sends any request; the body is JSON.
    ///
    /// # Errors
    /// The server's error.
    pub fn request(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        self.send(method, path, JSON, body)
    }

    /// Reads a path that answers with text, such as `/readyz`.
    ///
    /// # Errors
    /// The server's error.
    pub fn text(&self, path: &str) -> Result<String> {
        let request = Request::get(path).body(Vec::new())?;
        let client = self.client.clone();
        Ok(self.wait(async move { client.request_text(request).await })?)
    }

    /// Returns a token of a ServiceAccount, as `kubectl create token` makes it. The audience is
    /// `audience`, or the server itself. The token is valid for `seconds`, at least 600.
    ///
    /// # Errors
    /// The server's error; 404 without the ServiceAccount.
    pub fn token(&self, account: &str, audience: Option<&str>, seconds: u32) -> Result<String> {
        let path = format!("{}/token", Kind::named("ServiceAccount")?.object(account)?);
        let mut spec = json!({ "expirationSeconds": seconds });
        if let Some(audience) = audience {
            spec["audiences"] = json!([audience]);
        }
        let body = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec,
        });
        let answer: Value = self
            .send(Method::POST, &path, JSON, Some(&body))
            .with_context(|| format!("a token for {account}"))?;
        let token = answer["status"]["token"].as_str();
        Ok(token.context("the server's answer has no token")?.to_owned())
    }

    /// Returns the underlying client, for requests that are missing here; use it on
    /// [`Api::runtime`].
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Returns the runtime, whose one thread lives in the namespace.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    fn at(object: &Value) -> Result<(Kind, String)> {
        let kind = kind_of(object)?;
        let path = kind.object(&key_of(object)?)?;
        Ok((kind, path))
    }

    fn send<T: DeserializeOwned + Send + 'static>(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Option<&Value>,
    ) -> Result<T> {
        let body = body.map(serde_json::to_vec).transpose()?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(http::header::CONTENT_TYPE, content_type)
            .body(body.unwrap_or_default())?;
        let client = self.client.clone();
        Ok(self.wait(async move { client.request(request).await })?)
    }

    /// Runs a future on the thread in the namespace.
    fn wait<T: Send + 'static>(
        &self,
        answer: impl Future<Output = kube::Result<T>> + Send + 'static,
    ) -> kube::Result<T> {
        let answer = async {
            tokio::time::timeout(REQUEST_TIMEOUT, answer)
                .await
                .unwrap_or_else(|late| Err(kube::Error::Service(late.into())))
        };
        self.runtime
            .block_on(self.runtime.spawn(answer))
            .unwrap_or_else(|panic| Err(kube::Error::Service(panic.into())))
    }
}

const JSON: &str = "application/json";
const MERGE: &str = "application/merge-patch+json";
const APPLY: &str = "application/apply-patch+yaml";

/// Returns `namespace/name` or `name` of an object.
///
/// # Errors
/// The object has no name.
pub fn key_of(object: &Value) -> Result<String> {
    let metadata = &object["metadata"];
    let name = metadata["name"]
        .as_str()
        .with_context(|| format!("an object without a name: {object}"))?;
    Ok(match metadata["namespace"].as_str() {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    })
}

fn kind_of(object: &Value) -> Result<Kind> {
    let kind = object["kind"].as_str();
    Kind::named(kind.with_context(|| format!("an object without a kind: {object}"))?)
}

fn shown(object: &Value) -> String {
    let name = key_of(object).unwrap_or_default();
    format!("{} {name}", object["kind"].as_str().unwrap_or_default())
}

/// Returns the object with its kind and its version.
fn complete(kind: Kind, object: &Value) -> Value {
    let mut object = object.clone();
    object["kind"] = json!(kind.name);
    if object["apiVersion"].is_null() {
        object["apiVersion"] = json!(kind.api_version);
    }
    object
}

/// Returns `https://address:port`, with brackets where IPv6 needs them.
pub(crate) fn url(address: IpAddr, port: u16) -> String {
    format!("https://{}", std::net::SocketAddr::new(address, port))
}
