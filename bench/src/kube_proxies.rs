//! The watches of kube-proxies at a Kubernetes API server. Clients are light: one process, a TLS connection for each node.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use http::Request;
use http::header::{ACCEPT, AUTHORIZATION};
use http_body_util::BodyExt as _;
use kplane_rig::cluster::{Cluster, Options};
use kplane_tls::{ClientConfig, ClientFiles, Files as _};
use serde_json::Value;
use tokio::sync::OnceCell;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::sleep;
use tonic::body::Body;
use tonic::transport::Channel;
use tower::ServiceExt as _;

use kplane_tests::fleet::{DEADLINE, Input, connect, names};

/// Address of the first client: 127.3.0.1.
const OWN: u32 = 0x7f03_0001;
/// Every address of the cluster's namespace is its own.
const SERVER: Ipv4Addr = Ipv4Addr::LOCALHOST;
const PORT: u16 = 6443;
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf;type=watch";
/// Longest pause before a client connects again.
const RETRY: Duration = Duration::from_secs(1);
/// Interval at which connections are counted.
const LOOK: Duration = Duration::from_millis(2);
/// What a proxy watches but its Node: collections, and selectors of labels.
const WATCHED: [(&str, &str); 3] = [
    (
        "/api/v1/services",
        "&labelSelector=%21service.kubernetes.io%2Fservice-proxy-name&fieldSelector=spec.clusterIP%21%3DNone",
    ),
    (
        "/apis/discovery.k8s.io/v1/endpointslices",
        "&labelSelector=%21service.kubernetes.io%2Fheadless",
    ),
    ("/apis/networking.k8s.io/v1/servicecidrs", ""),
];

/// Starts a cluster that has the objects of a fleet.
///
/// # Errors
/// The cluster does not start.
pub(crate) fn cluster(nodes: u32, services: u32) -> Result<(Cluster, Input)> {
    let options = Options {
        service_ranges: "10.96.0.0/12".to_owned(),
        ..Options::default()
    };
    let cluster = Cluster::start(&options)?;
    let input = Input::at(cluster.api(), nodes, services)?;
    Ok((cluster, input))
}

/// The watches of kube-proxies, which end when this is dropped.
#[derive(Debug)]
pub(crate) struct Proxies {
    _tasks: JoinSet<()>,
}

impl Proxies {
    /// Opens the watches of a kube-proxy on each node: Services, EndpointSlices, ServiceCIDRs, and the node itself.
    /// Call it in the cluster's namespace.
    ///
    /// # Errors
    /// The server cannot bear them.
    pub(crate) async fn start(cluster: &Cluster, nodes: u32) -> Result<Self> {
        let server = Server::new(cluster)?;
        let mut paths = Vec::new();
        for (path, selector) in WATCHED {
            let version = block_in_place(|| version(cluster, path))?;
            paths.push(format!("{path}?{}{selector}", watch(&version)));
        }
        let version = block_in_place(|| version(cluster, "/api/v1/nodes"))?;
        let mut watchers = Vec::new();
        for (number, name) in (0..).zip(names(nodes)) {
            let connection = Connection::new(&server, number);
            let own = format!("&fieldSelector=metadata.name%3D{name}");
            let own = format!("/api/v1/nodes?{}{own}", watch(&version));
            let paths = paths.iter().cloned().chain([own]);
            watchers.extend(paths.map(|path| Watcher {
                path,
                connection: Arc::clone(&connection),
            }));
        }
        let (open, count) = (Arc::<Open>::default(), watchers.len());
        let mut tasks = JoinSet::new();
        for watcher in watchers {
            tasks.spawn(watcher.run(Arc::clone(&open)));
        }
        open.reach(count).await?;
        Ok(Self { _tasks: tasks })
    }
}

fn watch(version: &str) -> String {
    format!("watch=1&allowWatchBookmarks=true&resourceVersion={version}")
}

/// Returns the version of a collection.
fn version(cluster: &Cluster, path: &str) -> Result<String> {
    let list = cluster.api().text(&format!("{path}?limit=1"))?;
    let list: Value = serde_json::from_str(&list)?;
    let version = list["metadata"]["resourceVersion"].as_str();
    Ok(version.context("a list without a version")?.to_owned())
}

/// The watches that are open.
#[derive(Debug, Default)]
struct Open {
    count: AtomicUsize,
    /// The error of the last watch that ended.
    error: Mutex<String>,
}

impl Open {
    /// Waits until so many are open.
    async fn reach(&self, wanted: usize) -> Result<()> {
        let begun = Instant::now();
        while self.count.load(Relaxed) < wanted {
            if begun.elapsed() > DEADLINE {
                let (count, time) = (self.count.load(Relaxed), DEADLINE.as_secs());
                let error = self.error.lock().unwrap_or_else(PoisonError::into_inner);
                bail!("{count} of {wanted} watches are open after {time} s: {error}");
            }
            sleep(LOOK).await;
        }
        Ok(())
    }
}

/// The API server as clients see it.
#[derive(Debug)]
struct Server {
    config: Arc<ClientConfig>,
    authorization: String,
}

impl Server {
    fn new(cluster: &Cluster) -> Result<Arc<Self>> {
        let kubeconfig = std::fs::read(cluster.kubeconfig())?;
        let kubeconfig: Value = serde_json::from_slice(&kubeconfig)?;
        let authorities = &kubeconfig["clusters"][0]["cluster"]["certificate-authority"];
        let token = kubeconfig["users"][0]["user"]["token"].as_str();
        let files = ClientFiles {
            authorities: PathBuf::from(authorities.as_str().context("an authority")?),
            pair: None,
        };
        Ok(Arc::new(Self {
            config: files.load()?,
            authorization: format!("Bearer {}", token.context("a token")?),
        }))
    }
}

/// The connection of a client.
#[derive(Debug)]
struct Connection {
    server: Arc<Server>,
    own: Ipv4Addr,
    channel: OnceCell<Channel>,
}

impl Connection {
    fn new(server: &Arc<Server>, number: u32) -> Arc<Self> {
        Arc::new(Self {
            server: Arc::clone(server),
            own: Ipv4Addr::from(OWN + number),
            channel: OnceCell::new(),
        })
    }

    async fn open(&self) -> Result<Channel> {
        let server = SocketAddr::new(IpAddr::V4(SERVER), PORT);
        connect(self.own, server, &self.server.config).await
    }
}

/// One watch.
#[derive(Debug)]
struct Watcher {
    path: String,
    connection: Arc<Connection>,
}

impl Watcher {
    /// Watches without end: connects again when it is disconnected.
    async fn run(self, open: Arc<Open>) {
        loop {
            let end = self
                .listen(&open)
                .await
                .map_or_else(|error| format!("{error:#}"), |()| "end".to_owned());
            *open.error.lock().unwrap_or_else(PoisonError::into_inner) = end;
            sleep(rand::random_range(Duration::ZERO..RETRY)).await;
        }
    }

    /// Watches until the connection ends.
    async fn listen(&self, open: &Open) -> Result<()> {
        let connection = &self.connection;
        let channel = connection.channel.get_or_try_init(|| connection.open());
        let request = Request::get(&self.path)
            .header(AUTHORIZATION, &connection.server.authorization)
            .header(ACCEPT, PROTOBUF)
            .body(Body::empty())?;
        let answer = channel.await?.clone().oneshot(request).await?;
        ensure!(answer.status().is_success(), "{}", answer.status());
        open.count.fetch_add(1, Relaxed);
        let mut body = answer.into_body();
        let end = loop {
            match body.frame().await {
                Some(Ok(_)) => {}
                Some(Err(error)) => break Err(error.into()),
                None => break Ok(()),
            }
        };
        open.count.fetch_sub(1, Relaxed);
        end
    }
}
