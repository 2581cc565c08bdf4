//! Helpers of several tests.

pub(crate) mod certs;
pub(crate) mod plane;

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Parser as _;
use kp_nodeagent::app;
use kp_nodeagent::config::{Config, Flags, Task};
use kplane_dataplane::backend::Kind;
use tempfile::TempDir;

/// A Service with two endpoints.
pub(crate) const WEB: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  ports: [{port: 80, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: '', port: 8080, protocol: TCP}]
endpoints:
- {addresses: [10.0.0.1], conditions: {ready: true}}
- {addresses: [10.0.0.2], conditions: {ready: true}}
";

/// Returns a folder with this Service.
pub(crate) fn manifests() -> TempDir {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("web.yaml"), WEB).unwrap();
    folder
}

/// Waits until something is found.
pub(crate) fn eventually<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(Instant::now() < deadline, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Starts an agent that programs nothing, with these words on its command line.
pub(crate) async fn agent_of(line: Vec<String>) -> app::Bound {
    agent_with_cache(line, None).await
}

/// The same with a cache file in a folder.
pub(crate) async fn agent_with_cache(line: Vec<String>, cache: Option<&Path>) -> app::Bound {
    let config = Config {
        cache_dir: cache.map(Path::to_owned),
        ..config_of(line)
    };
    app::build(config).await.unwrap()
}

/// An agent that programs nothing, without a cache and without ports of its own.
pub(crate) fn config_of(line: impl IntoIterator<Item: Into<OsString> + Clone>) -> Config {
    let checked = Flags::try_parse_from(line).unwrap().check().unwrap();
    let Task::Run(config) = checked.task else {
        panic!("not an agent");
    };
    Config {
        backend: Kind::Noop,
        healthz: None,
        metrics: None,
        cache_dir: None,
        ..*config
    }
}
