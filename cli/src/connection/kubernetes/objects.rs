//! Objects of a cluster: reading and changing them with the user's credentials. A walk over all nodes may take longer than
//! these are valid, so a request that is refused for them (401) logs in again and is repeated, once.

use std::fmt::Write as _;
use std::time::Duration;

use http::{Method, Request, header};
use kube::Client;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::Kubernetes;
use super::api::{self, Asked};
use super::error::ClusterWords;
use crate::connection::ReachError;

/// Most objects in one page of a list.
const PAGE: u32 = 500;

/// The name by which the API server knows who set a field.
const MANAGER: &str = "kpctl";

/// The way to objects of a cluster.
pub(crate) struct ObjectClient {
    /// Locked during a login, so that all requests that were refused at the same time share one.
    session: Mutex<Session>,
    cluster: ClusterWords,
    limit: Duration,
}

/// The last login.
struct Session {
    kubernetes: Kubernetes,
    client: Client,
    /// Number of logins before.
    renewals: u64,
}

/// A page of a list.
#[derive(Deserialize)]
struct Page<T> {
    #[serde(default)]
    metadata: PageMetadata,
    #[serde(default = "Vec::new")]
    items: Vec<T>,
}

#[derive(Default, Deserialize)]
struct PageMetadata {
    #[serde(default, rename = "continue")]
    next: String,
}

impl ObjectClient {
    pub(super) fn new(kubernetes: Kubernetes, client: Client, limit: Duration) -> Self {
        let cluster = kubernetes.cluster.clone();
        let session = Session {
            kubernetes,
            client,
            renewals: 0,
        };
        Self {
            session: Mutex::new(session),
            cluster,
            limit,
        }
    }

    /// Reads an object; `None` if it does not exist.
    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        asked: Asked,
    ) -> Result<Option<T>, ReachError> {
        match self.send(Method::GET, path, "", Vec::new(), asked).await {
            Ok(object) => Ok(Some(object)),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads all objects of a collection that labels select; all if `labels` is empty.
    pub(crate) async fn list<T: DeserializeOwned>(
        &self,
        collection: &str,
        labels: &str,
        asked: Asked,
    ) -> Result<Vec<T>, ReachError> {
        let (mut all, mut next) = (Vec::new(), String::new());
        loop {
            let path = format!(
                "{collection}?limit={PAGE}&labelSelector={}&continue={}",
                encoded(labels),
                encoded(&next)
            );
            let page: Page<T> = self.send(Method::GET, &path, "", Vec::new(), asked).await?;
            all.extend(page.items);
            next = page.metadata.next;
            if next.is_empty() {
                return Ok(all);
            }
        }
    }

    /// Creates an object.
    pub(crate) async fn create(
        &self,
        collection: &str,
        object: &Value,
        asked: Asked,
    ) -> Result<(), ReachError> {
        let path = format!("{collection}?fieldManager={MANAGER}");
        let body = object.to_string().into_bytes();
        let created = self.send::<Value>(Method::POST, &path, "application/json", body, asked);
        created.await.map(drop)
    }

    /// Asks the API server something by creating an object, such as a review; returns its answer.
    pub(crate) async fn ask(
        &self,
        collection: &str,
        object: &Value,
        asked: Asked,
    ) -> Result<Value, ReachError> {
        let body = object.to_string().into_bytes();
        self.send(Method::POST, collection, "application/json", body, asked).await
    }

    /// Changes some fields of an object (JSON merge patch). A `metadata.resourceVersion` must still be current.
    pub(crate) async fn patch(
        &self,
        path: &str,
        fields: &Value,
        asked: Asked,
    ) -> Result<(), ReachError> {
        let path = format!("{path}?fieldManager={MANAGER}");
        let body = fields.to_string().into_bytes();
        let kind = "application/merge-patch+json";
        let patched = self.send::<Value>(Method::PATCH, &path, kind, body, asked);
        patched.await.map(drop)
    }

    /// Deletes an object, and what it owns. Returns whether it existed.
    pub(crate) async fn delete(&self, path: &str, asked: Asked) -> Result<bool, ReachError> {
        let body = br#"{"propagationPolicy":"Background"}"#.to_vec();
        let deleted = self.send::<Value>(Method::DELETE, path, "application/json", body, asked);
        match deleted.await {
            Ok(_) => Ok(true),
            Err(error) if error.is_missing() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        content: &str,
        body: Vec<u8>,
        asked: Asked,
    ) -> Result<T, ReachError> {
        let mut refused = None;
        loop {
            let (client, login) = self.client(refused).await?;
            let mut request = Request::builder().method(method.clone()).uri(path);
            if !content.is_empty() {
                request = request.header(header::CONTENT_TYPE, content);
            }
            let answer = api::send(&client, request, body.clone(), asked);
            let Ok(answer) = timeout(self.limit, answer).await else {
                return Err(ReachError::Timeout {
                    from: self.cluster.api.clone(),
                    timeout: self.limit,
                });
            };
            match answer.map_err(|problem| self.cluster.denied(problem)) {
                Err(error) if error.is_unauthorized() && refused.is_none() => refused = Some(login),
                answer => return Ok(answer?),
            }
        }
    }

    /// Returns the client of the last login, and the number of that login. Logs in again if it is the one that was
    /// refused.
    async fn client(&self, refused: Option<u64>) -> Result<(Client, u64), ReachError> {
        let mut session = self.session.lock().await;
        if refused == Some(session.renewals) {
            session.client = session.kubernetes.log_in(self.limit).await?.client;
            session.renewals += 1;
        }
        Ok((session.client.clone(), session.renewals))
    }
}

/// Returns a text for a query.
fn encoded(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => out.push(byte.into()),
            byte => {
                // Writing to a String cannot fail.
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    use clap::{CommandFactory as _, FromArgMatches as _};
    use tempfile::TempDir;

    use super::*;
    use crate::args::Cli;
    use crate::connection::kubernetes::{Environment, Found};

    /// Accepts one token, and returns its address.
    fn api_server(accepted: &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut request = vec![0; 4096];
                let length = stream.read(&mut request).unwrap_or_default();
                let request = String::from_utf8_lossy(&request[..length]);
                let good = request.contains(&format!("Bearer {accepted}\r\n"));
                let status = if good { "200 OK" } else { "401 Unauthorized" };
                let rest = "connection: close\r\ncontent-length: 2\r\n\r\n{}";
                let _ = write!(stream, "HTTP/1.1 {status}\r\n{rest}");
            }
        });
        format!("http://{address}")
    }

    #[tokio::test]
    async fn credentials_that_end_are_read_again_once() {
        let server = api_server("new");
        let home = TempDir::new().unwrap();
        let [token, file] = ["token", "config"].map(|name| home.path().join(name));
        fs::write(&token, "old").unwrap();
        let kubeconfig = serde_json::json!({
            "current-context": "a",
            "clusters": [{ "name": "a", "cluster": { "server": server } }],
            "users": [{ "name": "a", "user": { "tokenFile": token } }],
            "contexts": [{ "name": "a", "context": { "cluster": "a", "user": "a" } }],
        });
        fs::write(&file, kubeconfig.to_string()).unwrap();
        let words = ["kpctl", "status", "--kubeconfig", file.to_str().unwrap()];
        let matches = Cli::command().try_get_matches_from(words).unwrap();
        let options = Cli::from_arg_matches(&matches).unwrap().options;
        let environment = Environment::default();
        let found = Kubernetes::find(&options.place, &options.identity, &environment);
        let Ok(Found::Cluster(cluster)) = found else {
            panic!("no cluster");
        };
        let objects = cluster.into_objects(options.timeout).await.unwrap();
        let get = || objects.get::<Value>("/version", Asked("get it"));
        let error = get().await.unwrap_err().to_string();
        assert!(error.contains("(401)"), "{error}");
        assert_eq!(objects.session.lock().await.renewals, 1);
        fs::write(&token, "new").unwrap();
        let both = tokio::try_join!(get(), get()).unwrap();
        assert!(both.0.is_some() && both.1.is_some());
        // Both share a login.
        assert_eq!(objects.session.lock().await.renewals, 2);
    }

    #[test]
    fn selectors_are_encoded_for_a_query() {
        assert_eq!(encoded("a/b in (x,y)"), "a%2Fb%20in%20%28x%2Cy%29");
    }
}
