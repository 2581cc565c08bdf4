//! Traces of changes, as a collector gets them over gRPC.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use kp_controlplane::app::{Bound, Config, Origin};
use kplane_operate::traces;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::support::synced;

/// A deadline far above any step of these tests.
const DEADLINE: Duration = Duration::from_secs(30);

/// A collector that passes on what it gets.
struct Collector(mpsc::UnboundedSender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.send(request.into_inner()).unwrap();
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

async fn collector() -> (
    SocketAddr,
    mpsc::UnboundedReceiver<ExportTraceServiceRequest>,
) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = mpsc::unbounded_channel();
    let server = Server::builder().add_service(TraceServiceServer::new(Collector(sender)));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    (address, receiver)
}

fn write(folder: &Path, endpoint: u8) {
    let text = format!(
        "kind: Service\napiVersion: v1\nmetadata: {{name: web, namespace: shop}}\n\
         spec: {{clusterIP: 10.96.0.1, ports: [{{name: http, port: 80}}]}}\n---\n\
         kind: EndpointSlice\napiVersion: discovery.k8s.io/v1\n\
         metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}\n\
         addressType: IPv4\nports: [{{name: http, port: 8080}}]\n\
         endpoints: [{{addresses: [10.244.1.{endpoint}]}}]\n"
    );
    let new = folder.join("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, folder.join("web.yaml")).unwrap();
}

async fn control_plane(folder: &Path, collector: SocketAddr, share: f64) -> Bound {
    write(folder, 1);
    let traces = traces::Config {
        collector: format!("http://{collector}").parse().unwrap(),
        share,
        settled: Duration::from_millis(100),
    };
    let config = Config {
        traces: Some(traces),
        ..Config::new(Origin::Manifests(folder.to_owned()))
    };
    synced(config).await
}

fn spans(request: &ExportTraceServiceRequest) -> Vec<&Span> {
    let scopes = request
        .resource_spans
        .iter()
        .flat_map(|resource| &resource.scope_spans);
    scopes.flat_map(|scope| &scope.spans).collect()
}

#[tokio::test]
async fn a_change_is_a_trace_with_its_way_through_the_control_plane() {
    let folder = tempfile::tempdir().unwrap();
    let (address, mut requests) = collector().await;
    let _bound = control_plane(folder.path(), address, 1.0).await;
    write(folder.path(), 2);
    let wanted = ["change of shop/web", "publish"];
    let found = async {
        loop {
            let request = requests.recv().await.unwrap();
            let spans = spans(&request);
            let names: Vec<&str> = spans.iter().map(|span| &*span.name).collect();
            if wanted.iter().all(|name| names.contains(name)) {
                let mut ids = spans.iter().map(|span| &span.trace_id);
                assert!(ids.all(|id| id.len() == 16));
                return;
            }
        }
    };
    timeout(DEADLINE, found).await.unwrap();
}

/// The way of a change does not depend on the collector.
#[tokio::test]
async fn a_collector_that_is_away_holds_nothing_up() {
    let folder = tempfile::tempdir().unwrap();
    // Nobody listens there.
    let bound = control_plane(folder.path(), ([127, 0, 0, 1], 1).into(), 1.0).await;
    let before = bound.hub().store.head().borrow().revision;
    write(folder.path(), 2);
    let mut head = bound.hub().store.head();
    let changed = head.wait_for(|head| head.revision > before);
    timeout(DEADLINE, changed).await.unwrap().unwrap();
}
