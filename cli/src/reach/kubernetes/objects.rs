//! Objects of a cluster: reading and changing them with the user's credentials.

use std::fmt::Write as _;
use std::time::Duration;

use http::{Method, Request, header};
use kube::Client;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use super::api::{self, Asked};
use super::error::ClusterWords;
use crate::reach::ReachError;

/// Most objects in one page of a list.
const PAGE: u32 = 500;

/// The name by which the API server knows who set a field.
const MANAGER: &str = "kpctl";

/// The way to objects of a cluster.
pub(crate) struct ObjectClient {
    client: Client,
    cluster: ClusterWords,
    limit: Duration,
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
    pub(super) fn new(client: Client, cluster: ClusterWords, limit: Duration) -> Self {
        Self {
            client,
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
        self.send(Method::POST, collection, "application/json", body, asked)
            .await
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
        let mut request = Request::builder().method(method).uri(path);
        if !content.is_empty() {
            request = request.header(header::CONTENT_TYPE, content);
        }
        let answer = api::send(&self.client, request, body, asked);
        match timeout(self.limit, answer).await {
            Ok(answer) => Ok(answer.map_err(|problem| self.cluster.denied(problem))?),
            Err(_) => Err(ReachError::Timeout {
                from: self.cluster.api.clone(),
                timeout: self.limit,
            }),
        }
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
    use super::*;

    #[test]
    fn selectors_are_encoded_for_a_query() {
        assert_eq!(encoded("a/b in (x,y)"), "a%2Fb%20in%20%28x%2Cy%29");
    }
}
