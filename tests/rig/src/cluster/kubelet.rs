//! A kubelet for all nodes together, which runs nothing. It gives Pods addresses, reports them as
//! running and ready, and removes deleted Pods after their grace period.
//!
//! Its only state is the addresses of Pods, read again from the Pods at each new list.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures_util::StreamExt as _;
use http::{Method, Request};
use kplane_model::Cidr;
use kube::Client;
use kube::core::WatchEvent;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::api::{Api, key_of};

/// Pause between two attempts while the server is away.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest time of a watch, in seconds; then everything is listed again.
const WATCH_SECONDS: u32 = 300;

/// The running kubelet. Dropping it stops the kubelet, and Pods stay as they are.
#[derive(Debug)]
pub(super) struct Kubelet(JoinHandle<()>);

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Kubelet {
    /// Starts the kubelet on the client's thread; a deleted Pod is terminating for `grace`.
    pub(super) fn start(api: &Api, grace: Duration) -> Self {
        let mut work = Work {
            client: api.client(),
            grace,
            addresses: Addresses::default(),
            leaving: BTreeSet::new(),
        };
        Self(api.runtime().spawn(async move {
            loop {
                // An error means that the server is away, or that another client changed the Pod.
                // Both pass.
                let _ = work.watch().await;
                tokio::time::sleep(PAUSE).await;
            }
        }))
    }
}

struct Work {
    client: Client,
    grace: Duration,
    addresses: Addresses,
    /// Keys of Pods in their grace period.
    leaving: BTreeSet<String>,
}

impl Work {
    /// Lists and watches until the watch ends.
    async fn watch(&mut self) -> Result<()> {
        let path = "/api/v1/pods?fieldSelector=spec.nodeName!=";
        let list: Value = self.client.request(get(path)?).await?;
        self.addresses = Addresses::default();
        self.leaving.clear();
        let pods = list["items"].as_array().cloned().unwrap_or_default();
        for pod in &pods {
            self.addresses.note(&key_of(pod)?, &pod_ips(pod));
        }
        for pod in &pods {
            self.changed(pod).await?;
        }
        let version = list["metadata"]["resourceVersion"]
            .as_str()
            .context("a list without a version")?;
        let path =
            format!("{path}&watch=true&resourceVersion={version}&timeoutSeconds={WATCH_SECONDS}");
        let events = self.client.request_events::<Value>(get(&path)?).await?;
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            match event? {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => self.changed(&pod).await?,
                WatchEvent::Deleted(pod) => self.gone(&key_of(&pod)?),
                WatchEvent::Bookmark(_) => {}
                WatchEvent::Error(status) => return Err(kube::Error::Api(status).into()),
            }
        }
        Ok(())
    }

    async fn changed(&mut self, pod: &Value) -> Result<()> {
        let key = key_of(pod)?;
        if !pod["metadata"]["deletionTimestamp"].is_null() {
            self.leave(&key, pod);
            return Ok(());
        }
        if pod["status"]["phase"] != "Pending" {
            return Ok(());
        }
        let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
        let node: Value = self.client.request(get(&format!("/api/v1/nodes/{node}"))?).await?;
        let hosts = node_ips(&node);
        let ips = if pod["spec"]["hostNetwork"] == true {
            hosts.clone()
        } else {
            self.addresses.take(&key, &pod_cidrs(&node))
        };
        let status = running(pod, &hosts, &ips);
        patch_status(&self.client, &key, &status).await
    }

    /// Ends a Pod after its grace period; its endpoints are terminating until then.
    fn leave(&mut self, key: &str, pod: &Value) {
        if !self.leaving.insert(key.to_owned()) {
            return;
        }
        let (client, grace, path) = (self.client.clone(), self.grace, path(key));
        let options = json!({
            "gracePeriodSeconds": 0,
            "preconditions": { "uid": pod["metadata"]["uid"] },
        });
        tokio::spawn(async move {
            tokio::time::sleep(grace).await;
            loop {
                let answer = send::<Value>(&client, Method::DELETE, &path, &options).await;
                match answer {
                    // The Pod is gone already, or another Pod has its name.
                    Ok(_) | Err(kube::Error::Api(_)) => return,
                    Err(_) => tokio::time::sleep(PAUSE).await,
                }
            }
        });
    }

    fn gone(&mut self, key: &str) {
        self.leaving.remove(key);
        self.addresses.release(key);
    }
}

/// The addresses of all Pods.
#[derive(Debug, Default)]
struct Addresses {
    of: BTreeMap<String, Vec<IpAddr>>,
    taken: BTreeSet<IpAddr>,
}

impl Addresses {
    fn note(&mut self, key: &str, ips: &[IpAddr]) {
        self.taken.extend(ips);
        self.of.insert(key.to_owned(), ips.to_vec());
    }

    fn release(&mut self, key: &str) {
        for ip in self.of.remove(key).unwrap_or_default() {
            self.taken.remove(&ip);
        }
    }

    /// Takes the lowest free address of each prefix, except its first one.
    fn take(&mut self, key: &str, cidrs: &[Cidr]) -> Vec<IpAddr> {
        let free = |cidr: &Cidr| {
            (1_u32..=65_535)
                .map_while(|n| nth(cidr, n))
                .into_iter()
                .find(|ip| !self.taken.contains(ip))
        };
        let ips: Vec<IpAddr> = cidrs.iter().filter_map(free).collect();
        self.note(key, &ips);
        ips
    }
}

/// Returns the address at a distance from a prefix's first, if it is inside.
fn nth(cidr: &Cidr, n: u32) -> Option<IpAddr> {
    let ip = match cidr.first() {
        IpAddr::V4(first) => IpAddr::V4(first.to_bits().checked_add(n)?.into()),
        IpAddr::V6(first) => IpAddr::V6(first.to_bits().checked_add(n.into())?.into()),
    };
    cidr.contains(ip).then_some(ip)
}

/// Returns the status of a Pod whose containers run and are ready. Nobody fulfils readiness gates here, so a Pod that
/// has some is not ready.
fn running(pod: &Value, hosts: &[IpAddr], ips: &[IpAddr]) -> Value {
    let containers = pod["spec"]["containers"].as_array().into_iter().flatten().map(|container| {
        json!({
            "name": container["name"], "image": container["image"], "imageID": "",
            "ready": true, "started": true, "restartCount": 0, "state": { "running": {} },
        })
    });
    let list = |ips: &[IpAddr]| ips.iter().map(|ip| json!({ "ip": ip })).collect::<Vec<_>>();
    json!({
        "phase": "Running",
        "conditions": conditions(pod["spec"]["readinessGates"].is_null()),
        "hostIP": hosts.first(), "hostIPs": list(hosts),
        "podIP": ips.first(), "podIPs": list(ips),
        "containerStatuses": containers.collect::<Vec<_>>(),
    })
}

/// Returns the conditions of a running Pod, ready or not.
pub(super) fn conditions(ready: bool) -> Value {
    let ready = if ready { "True" } else { "False" };
    json!([
        { "type": "PodScheduled", "status": "True" },
        { "type": "Initialized", "status": "True" },
        { "type": "ContainersReady", "status": ready },
        { "type": "Ready", "status": ready },
    ])
}

fn pod_ips(pod: &Value) -> Vec<IpAddr> {
    parse_all(pod["status"]["podIPs"].as_array().into_iter().flatten().map(|ip| &ip["ip"]))
}

fn node_ips(node: &Value) -> Vec<IpAddr> {
    let all = node["status"]["addresses"].as_array().into_iter().flatten();
    parse_all(
        all.filter(|address| address["type"] == "InternalIP")
            .map(|address| &address["address"]),
    )
}

fn pod_cidrs(node: &Value) -> Vec<Cidr> {
    parse_all(node["spec"]["podCIDRs"].as_array().into_iter().flatten())
}

fn parse_all<'a, T: FromStr>(texts: impl Iterator<Item = &'a Value>) -> Vec<T> {
    texts.filter_map(Value::as_str).filter_map(|text| text.parse().ok()).collect()
}

fn path(key: &str) -> String {
    let (namespace, name) = key.split_once('/').unwrap_or(("default", key));
    format!("/api/v1/namespaces/{namespace}/pods/{name}")
}

fn get(path: &str) -> Result<Request<Vec<u8>>> {
    Ok(Request::get(path).body(Vec::new())?)
}

async fn patch_status(client: &Client, key: &str, status: &Value) -> Result<()> {
    let path = format!("{}/status", path(key));
    let fields = json!({ "status": status });
    match send::<Value>(client, Method::PATCH, &path, &fields).await {
        // The Pod was deleted in between.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        answer => Ok(answer.map(drop)?),
    }
}

async fn send<T: serde::de::DeserializeOwned>(
    client: &Client,
    method: Method,
    path: &str,
    body: &Value,
) -> kube::Result<T> {
    let content = match method {
        Method::PATCH => "application/merge-patch+json",
        _ => "application/json",
    };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::CONTENT_TYPE, content)
        .body(body.to_string().into_bytes())
        .map_err(kube::Error::HttpError)?;
    client.request(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_used_again_and_end_with_the_prefix() {
        let cidrs: [Cidr; 2] = ["10.0.0.0/30", "fd00::/64"].map(|cidr| cidr.parse().unwrap());
        let mut book = Addresses::default();
        let texts = |ips: Vec<IpAddr>| ips.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(book.take("a", &cidrs)), ["10.0.0.1", "fd00::1"]);
        assert_eq!(texts(book.take("b", &cidrs)), ["10.0.0.2", "fd00::2"]);
        book.release("a");
        assert_eq!(texts(book.take("c", &cidrs)), ["10.0.0.1", "fd00::1"]);
        assert_eq!(texts(book.take("d", &cidrs)), ["10.0.0.3", "fd00::3"]);
        assert_eq!(texts(book.take("e", &cidrs)), ["fd00::4"]);
    }
}
