//! The client of `StatusService`.

mod error;
mod listings;
mod questions;
mod record;
mod streams;

use std::error::Error as _;
use std::future::Future;
use std::io;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use kplane_proto::v1::recorder_service_client::RecorderServiceClient;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use tonic::codec::CompressionEncoding;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Response, Status};
use tower::service_fn;

pub(crate) use error::Error;
use streams::Messages;
pub(crate) use streams::{ConvergenceStream, FleetStream, ServiceStream};

use crate::connection::{Bearer, Connection, Route, cause_at};

/// Largest answer that is accepted, in bytes: 500,000 endpoints of some 100 bytes, five times over.
const MAX_ANSWER_BYTES: usize = 256 << 20;

/// Interval of the pings that check whether the server of a quiet watch is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The methods of the status API.
pub(crate) type Stub = StatusServiceClient<InterceptedService<Channel, Bearer>>;

/// A connection to the control plane. A connection that was lost stays lost: connect again, so that credentials are
/// read again, and another pod can take over.
#[derive(Clone)]
pub(crate) struct Client {
    stub: Stub,
    recorder: RecorderServiceClient<InterceptedService<Channel, Bearer>>,
    line: Line,
}

/// A connection, with what every request over it needs.
#[derive(Clone)]
pub(crate) struct Line {
    pub(crate) channel: Channel,
    pub(crate) bearer: Bearer,
    /// The name of the control plane in errors.
    pub(crate) server: String,
    /// Longest wait for an answer.
    pub(crate) timeout: Duration,
}

impl Line {
    /// Connects, or returns the error.
    pub(crate) async fn open(route: &mut Route) -> Result<Self, Error> {
        let Connection { wire, peer, token } = route.connect().await?;
        let (server, timeout) = (peer.name, route.timeout());
        let lost = |error: &tonic::transport::Error| Error::Lost {
            server: server.clone(),
            cause: cause_at(&server, error),
        };
        let endpoint = Endpoint::from_shared(peer.url)
            .map_err(|error| lost(&error))?
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(timeout);
        let mut wire = Some(TokioIo::new(wire));
        let once = service_fn(move |_: Uri| {
            let wire = wire.take();
            async move { wire.ok_or_else(|| io::Error::other("the connection has ended")) }
        });
        let connect = endpoint.connect_with_connector(once);
        let channel = match tokio::time::timeout(timeout, connect).await {
            Ok(connected) => connected.map_err(|error| lost(&error))?,
            Err(_) => return Err(Error::Timeout { server, timeout }),
        };
        Ok(Self {
            channel,
            bearer: Bearer::new(token.as_ref()),
            server,
            timeout,
        })
    }

    /// Returns the error of a connection that has ended.
    pub(crate) fn lost(&self, cause: &str) -> Error {
        Error::Lost {
            server: self.server.clone(),
            cause: cause.to_owned(),
        }
    }
}

impl Client {
    /// Connects, or returns the error.
    pub(crate) async fn connect(route: &mut Route) -> Result<Self, Error> {
        let line = Line::open(route).await?;
        let over = || (line.channel.clone(), line.bearer.clone());
        let (channel, bearer) = over();
        let recorder = RecorderServiceClient::with_interceptor(channel, bearer);
        let (channel, bearer) = over();
        let stub = StatusServiceClient::with_interceptor(channel, bearer);
        Ok(Self {
            stub: stub
                .accept_compressed(CompressionEncoding::Gzip)
                .max_decoding_message_size(MAX_ANSWER_BYTES),
            recorder: recorder.max_decoding_message_size(MAX_ANSWER_BYTES),
            line,
        })
    }

    /// Returns the connection.
    pub(crate) fn line(&self) -> Line {
        self.line.clone()
    }

    /// Returns the current fleet, from all its pages.
    pub(crate) async fn fleet(&self) -> Result<pb::Fleet, Error> {
        self.fleet_of(pb::GetFleetRequest::default()).await
    }

    /// Returns the nodes that a request selects, from all pages.
    pub(crate) async fn fleet_of(
        &self,
        mut request: pb::GetFleetRequest,
    ) -> Result<pb::Fleet, Error> {
        let mut stub = self.stub.clone();
        let mut pages = Pages::default();
        loop {
            let page = self.ask(stub.get_fleet(request.clone())).await?;
            request.page_token.clone_from(&page.next_page_token);
            if let Some(fleet) = pages.add(page) {
                return fleet.map_err(|cause| self.lost(cause));
            }
        }
    }

    /// Returns one node; no node if it is not known.
    pub(crate) async fn node(&self, name: &str) -> Result<pb::Fleet, Error> {
        let request = pb::GetFleetRequest {
            node: name.to_owned(),
            ..pb::GetFleetRequest::default()
        };
        let mut stub = self.stub.clone();
        let mut fleet = self.ask(stub.get_fleet(request)).await?;
        // An older control plane sends all nodes.
        fleet.nodes.retain(|node| node.name == name);
        Ok(fleet)
    }

    /// Returns the fleet now and after each change.
    pub(crate) async fn watch_fleet(&self) -> Result<FleetStream, Error> {
        let mut stub = self.stub.clone();
        let stream = self.ask(stub.watch_fleet(pb::GetFleetRequest::default())).await?;
        Ok(FleetStream::new(Messages::new(stream, self)))
    }

    /// Returns how far a Service has come in the fleet, now and after each change.
    pub(crate) async fn watch_convergence(
        &self,
        name: &ServiceName,
    ) -> Result<ConvergenceStream, Error> {
        let request = pb::ConvergenceRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            absent_ok: true,
        };
        let mut stub = self.stub.clone();
        match self.ask(stub.watch_convergence(request)).await {
            Ok(stream) => Ok(ConvergenceStream::new(Messages::new(stream, self))),
            Err(Error::NotStatus { server }) => Err(Error::NoConvergence { server }),
            Err(error) => Err(error),
        }
    }

    /// Returns the Services that a request selects, from all pages.
    pub(crate) async fn services(
        &self,
        mut request: pb::ListServicesRequest,
    ) -> Result<Vec<pb::ServiceView>, Error> {
        let mut stub = self.stub.clone();
        let mut services = Vec::new();
        loop {
            let page = self.ask(stub.list_services(request.clone())).await?;
            let ended = page.services.is_empty() || page.next_page_token == request.page_token;
            services.extend(page.services);
            if page.next_page_token.is_empty() {
                return Ok(services);
            }
            if ended {
                return Err(self.lost("the list of Services has no end"));
            }
            request.page_token = page.next_page_token;
        }
    }

    /// Returns the Services that a request selects, now and after each change.
    pub(crate) async fn watch_services(
        &self,
        request: pb::WatchServicesRequest,
    ) -> Result<ServiceStream, Error> {
        let mut stub = self.stub.clone();
        let stream = self.ask(stub.watch_services(request)).await?;
        Ok(ServiceStream::new(Messages::new(stream, self)))
    }

    /// Returns Services with names like one that does not exist.
    async fn similar(&self, name: &ServiceName) -> Result<Vec<String>, Error> {
        let all = self.services(pb::ListServicesRequest::default()).await?;
        Ok(similar(name, &all))
    }

    /// Returns one Service without its state on nodes.
    pub(crate) async fn service(&self, name: &ServiceName) -> Result<Vec<pb::ServiceView>, Error> {
        let request = pb::ListServicesRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            ..pb::ListServicesRequest::default()
        };
        let mut ports = self.services(request).await?;
        // An older control plane sends all Services of the namespace.
        let is_its = |key: &pb::ServiceKey| key.name == *name.name;
        ports.retain(|port| port.key.as_ref().is_some_and(is_its));
        if ports.is_empty() {
            Err(Error::NoService {
                name: name.clone(),
                similar: self.similar(name).await?,
            })
        } else {
            Ok(ports)
        }
    }

    /// Returns one Service, and what every node holds of it.
    pub(crate) async fn describe(
        &self,
        name: &ServiceName,
    ) -> Result<pb::ServiceDescription, Error> {
        let request = pb::DescribeServiceRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
        };
        let mut stub = self.stub.clone();
        match self.ask(stub.describe_service(request)).await {
            Err(Error::Refused {
                code: Code::NotFound,
                ..
            }) => Err(Error::NoService {
                name: name.clone(),
                similar: self.similar(name).await?,
            }),
            answer => answer,
        }
    }

    /// Returns the fate of a packet.
    pub(crate) async fn explain(
        &self,
        name: &ServiceName,
        request: pb::ExplainRequest,
    ) -> Result<pb::Explanation, Error> {
        let mut stub = self.stub.clone();
        self.known(name, self.ask(stub.explain(request)).await).await
    }

    /// Returns the fate of a packet, and what came back when the node tried.
    pub(crate) async fn try_service(
        &self,
        name: &ServiceName,
        request: pb::ExplainRequest,
    ) -> Result<pb::TryResponse, Error> {
        let mut stub = self.stub.clone();
        self.known(name, self.ask(stub.try_service(request)).await).await
    }

    /// Names similar Services where there is none of this name.
    async fn known<T>(&self, name: &ServiceName, answer: Result<T, Error>) -> Result<T, Error> {
        match answer {
            // A Service, or something about it: the message says what.
            Err(Error::Refused {
                code: Code::NotFound,
                message,
                ..
            }) if message.starts_with("no Service") => Err(Error::NoService {
                name: name.clone(),
                similar: self.similar(name).await?,
            }),
            answer => answer,
        }
    }

    /// Approves that what the source does not name is gone.
    pub(crate) async fn approve(
        &self,
        request: pb::ApproveRequest,
    ) -> Result<pb::ApproveResponse, Error> {
        let mut stub = self.stub.clone();
        self.ask(stub.approve(request)).await
    }

    /// Freezes nodes, or thaws them.
    pub(crate) async fn freeze(
        &self,
        request: pb::FreezeRequest,
    ) -> Result<pb::FreezeResponse, Error> {
        let mut stub = self.stub.clone();
        self.ask(stub.freeze(request)).await
    }

    /// Waits for an answer up to the timeout.
    async fn ask<T>(
        &self,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Error> {
        match tokio::time::timeout(self.line.timeout, answer).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.refused(&status)),
            Err(_) => Err(self.timed_out()),
        }
    }

    fn lost(&self, cause: &str) -> Error {
        Error::Lost {
            server: self.line.server.clone(),
            cause: cause.to_owned(),
        }
    }

    fn timed_out(&self) -> Error {
        Error::Timeout {
            server: self.line.server.clone(),
            timeout: self.line.timeout,
        }
    }

    fn refused(&self, status: &Status) -> Error {
        let server = self.line.server.clone();
        match (status.code(), status.source()) {
            (Code::Unimplemented, _) => Error::NotStatus { server },
            (_, Some(source)) => Error::Lost {
                cause: cause_at(&server, source),
                server,
            },
            (Code::Unavailable, None) => Error::Lost {
                server,
                cause: status.message().to_owned(),
            },
            (code, None) => Error::Refused {
                server,
                code,
                message: status.message().to_owned(),
            },
        }
    }
}

/// A snapshot of the fleet that comes in pages.
#[derive(Default)]
struct Pages(pb::Fleet);

impl Pages {
    /// Adds a page; returns the snapshot when it is complete. Pages whose names do not advance are an
    /// error, since they would never end.
    fn add(&mut self, page: pb::Fleet) -> Option<Result<pb::Fleet, &'static str>> {
        let fleet = &mut self.0;
        fleet.nodes.extend(page.nodes);
        if page.control_plane.is_some() {
            fleet.control_plane = page.control_plane;
            fleet.missing_replicas = page.missing_replicas;
            fleet.replicas = page.replicas;
        }
        if page.next_page_token.is_empty() {
            fleet.next_page_token.clear();
            return Some(Ok(std::mem::take(fleet)));
        }
        let goes_on = page.next_page_token > fleet.next_page_token;
        fleet.next_page_token = page.next_page_token;
        (!goes_on).then_some(Err("the list of nodes has no end"))
    }
}

/// Returns Services that the user may have meant, the most similar first.
fn similar(name: &ServiceName, ports: &[pb::ServiceView]) -> Vec<String> {
    const SUGGESTED: usize = 3;
    const ENOUGH: f64 = 0.6;
    let score = |key: &pb::ServiceKey| {
        let names = strsim::normalized_damerau_levenshtein(&name.name, &key.name);
        let namespaces = strsim::normalized_damerau_levenshtein(&name.namespace, &key.namespace);
        let alike = names >= ENOUGH || key.name.contains(&*name.name);
        // The right name in a wrong namespace is a likely mistake.
        alike.then_some(names + namespaces / 10.0)
    };
    let keys = ports.iter().filter_map(|port| port.key.as_ref());
    let mut scored: Vec<(f64, String)> = keys
        .filter_map(|key| Some((score(key)?, format!("{}/{}", key.namespace, key.name))))
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    scored.dedup();
    scored.truncate(SUGGESTED);
    scored.into_iter().map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_make_one_picture_and_end() {
        let page = |name: &str, next: &str| pb::Fleet {
            control_plane: (name == "a").then(pb::ControlPlaneStatus::default),
            nodes: vec![pb::NodeStatus {
                name: name.to_owned(),
                ..Default::default()
            }],
            next_page_token: next.to_owned(),
            ..pb::Fleet::default()
        };
        let mut pages = Pages::default();
        for _ in 0..2 {
            assert!(pages.add(page("a", "a")).is_none());
            assert!(pages.add(page("b", "b")).is_none());
            let fleet = pages.add(page("c", "")).unwrap().unwrap();
            let names: Vec<&str> = fleet.nodes.iter().map(|n| n.name.as_str()).collect();
            assert_eq!(names, ["a", "b", "c"]);
            assert!(fleet.control_plane.is_some());
        }
        assert!(pages.add(page("b", "b")).is_none());
        assert!(pages.add(page("a", "a")).unwrap().is_err());
    }

    #[test]
    fn suggestions() {
        let port = |namespace: &str, name: &str| pb::ServiceView {
            key: Some(pb::ServiceKey {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let ports = [
            port("kube-system", "kube-dns"),
            port("shop", "web"),
            port("shop", "web"),
            port("shop", "webhook"),
            port("stage", "web"),
        ];
        let ask = |namespace, name| similar(&ServiceName::new(namespace, name), &ports);
        assert_eq!(ask("default", "web")[..1], ["stage/web"]);
        assert_eq!(ask("shop", "wbe"), ["shop/web", "stage/web"]);
        assert_eq!(ask("shop", "hook"), ["shop/webhook"]);
        assert_eq!(ask("kube-system", "kubedns"), ["kube-system/kube-dns"]);
        assert_eq!(ask("shop", "database"), Vec::<String>::new());
    }
}
