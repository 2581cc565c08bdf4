//! Raw watches of a Kubernetes API server: clients with connections of their own, as kube-proxies have.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use http::Request;
use http::header::{ACCEPT, AUTHORIZATION};
use http_body_util::BodyExt as _;
use hyper_util::rt::TokioIo;
use kplane_rig::cluster::{Cluster, Options};
use kplane_tls::{ClientConfig, ClientFiles, Files as _, greet};
use serde_json::Value;
use tokio::net::TcpSocket;
use tokio::sync::OnceCell;
use tokio::task::{JoinSet, block_in_place};
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower::ServiceExt as _;

use super::crowd::{Client, Crowd, Measured};
use crate::fleet::Input;

/// Address of the first client: 127.3.0.1.
const OWN: u32 = 0x7f03_0001;
/// Every address of the cluster's namespace is its own.
const SERVER: Ipv4Addr = Ipv4Addr::LOCALHOST;
const PORT: u16 = 6443;
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf;type=watch";
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
const SLICES: usize = 1;

/// Starts a cluster that has the objects of a fleet.
///
/// # Errors
/// The cluster does not start.
pub fn cluster(nodes: u32, services: u32) -> Result<(Cluster, Input)> {
    let options = Options {
        service_ranges: "10.96.0.0/12".to_owned(),
        ..Options::default()
    };
    let cluster = Cluster::start(&options)?;
    let input = Input::at(cluster.api(), nodes, services)?;
    Ok((cluster, input))
}

/// Measures so many clients, each with one watch of EndpointSlices. Call it in the cluster's namespace.
///
/// # Errors
/// The server cannot bear them.
pub async fn measure(
    cluster: &Cluster,
    input: &mut Input,
    clients: u32,
    changes: usize,
) -> Result<Measured> {
    let server = Server::new(cluster)?;
    let (path, selector) = WATCHED[SLICES];
    let version = block_in_place(|| version(cluster, path))?;
    let path = format!("{path}?watch=1&resourceVersion={version}{selector}");
    let watchers = (0..clients).map(|number| Watcher {
        path: path.clone(),
        connection: Connection::new(&server, number),
    });
    let crowd = Arc::<Crowd>::default();
    let change = async || block_in_place(|| input.change());
    crowd
        .measure(cluster.apiserver()?, watchers.collect(), changes, change)
        .await
}

/// The watches of kube-proxies, which end when this is dropped.
#[derive(Debug)]
pub struct Proxies {
    _tasks: JoinSet<()>,
}

impl Proxies {
    /// Opens the watches of a kube-proxy on each node: Services, EndpointSlices, ServiceCIDRs, and the node itself.
    /// Call it in the cluster's namespace.
    ///
    /// # Errors
    /// The server cannot bear them.
    pub async fn start(cluster: &Cluster, nodes: u32) -> Result<Self> {
        let server = Server::new(cluster)?;
        let mut paths = Vec::new();
        for (path, selector) in WATCHED {
            let version = block_in_place(|| version(cluster, path))?;
            paths.push(format!("{path}?{}{selector}", watch(&version)));
        }
        let version = block_in_place(|| version(cluster, "/api/v1/nodes"))?;
        let mut watchers = Vec::new();
        for (number, name) in (0..).zip(crate::fleet::names(nodes)) {
            let connection = Connection::new(&server, number);
            let own = format!("&fieldSelector=metadata.name%3D{name}");
            let own = format!("/api/v1/nodes?{}{own}", watch(&version));
            let paths = paths.iter().cloned().chain([own]);
            watchers.extend(paths.map(|path| Watcher {
                path,
                connection: Arc::clone(&connection),
            }));
        }
        let (crowd, count) = (Arc::<Crowd>::default(), watchers.len());
        let tasks = crowd.start(watchers);
        crowd.gather(count).await?;
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
        let (config, own) = (Arc::clone(&self.server.config), self.own);
        let connect = move |_| {
            let config = Arc::clone(&config);
            async move {
                let socket = TcpSocket::new_v4()?;
                socket.bind((own, 0).into())?;
                let server = SocketAddr::new(IpAddr::V4(SERVER), PORT);
                let stream = socket.connect(server).await?;
                greet(stream, Some(config), "localhost")
                    .await
                    .map(TokioIo::new)
            }
        };
        let endpoint = Endpoint::from_static("https://localhost");
        let channel = endpoint.connect_with_connector(tower::service_fn(connect));
        Ok(channel.await?)
    }
}

/// One watch.
#[derive(Debug)]
struct Watcher {
    path: String,
    connection: Arc<Connection>,
}

impl Client for Watcher {
    async fn listen(&self, crowd: &Crowd) -> Result<()> {
        let connection = &self.connection;
        let channel = connection.channel.get_or_try_init(|| connection.open());
        let request = Request::get(&self.path)
            .header(AUTHORIZATION, &connection.server.authorization)
            .header(ACCEPT, PROTOBUF)
            .body(Body::empty())?;
        let answer = channel.await?.clone().oneshot(request).await?;
        ensure!(answer.status().is_success(), "{}", answer.status());
        let _attending = crowd.attend();
        let mut body = answer.into_body();
        let mut events = Events::default();
        while let Some(frame) = body.frame().await {
            if let Some(data) = frame?.data_ref() {
                crowd.arrive(events.ends(data));
            }
        }
        Ok(())
    }
}

/// A stream of events, each with its length before it.
#[derive(Debug, Default)]
pub struct Events {
    length: Vec<u8>,
    missing: usize,
}

impl Events {
    /// Returns the number of events that end in the next bytes.
    pub fn ends(&mut self, mut bytes: &[u8]) -> usize {
        let mut ended = 0;
        while let Some((first, rest)) = bytes.split_first() {
            if self.missing > 0 {
                let some = self.missing.min(bytes.len());
                self.missing -= some;
                ended += usize::from(self.missing == 0);
                bytes = &bytes[some..];
                continue;
            }
            self.length.push(*first);
            bytes = rest;
            if let [a, b, c, d] = *self.length {
                let length = u32::from_be_bytes([a, b, c, d]);
                self.missing = usize::try_from(length).unwrap_or(usize::MAX);
                self.length.clear();
            }
        }
        ended
    }
}
