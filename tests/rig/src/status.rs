//! The status API of a control plane: its state, and the states of its agents.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use hyper_util::rt::TokioIo;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{Fleet, GetFleetRequest};
use kplane_tls::{ClientConfig, ClientFiles, Files as _, greet};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

use crate::netns::NetNs;

/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(5);

/// A connection to the status API from inside a namespace.
#[derive(Debug)]
pub struct Status {
    client: StatusServiceClient<Channel>,
    runtime: Runtime,
}

impl Status {
    /// Connects with the first question.
    ///
    /// # Errors
    /// The namespace could not be entered, or no thread could be started there.
    pub fn at(ns: &NetNs, address: SocketAddr) -> Result<Self> {
        Self::open(ns, address, None)
    }

    /// Connects like [`Status::at`], inside TLS. The server's certificate must name the IP address.
    ///
    /// # Errors
    /// As [`Status::at`]; the files cannot be used.
    pub fn secured(ns: &NetNs, address: SocketAddr, files: &ClientFiles) -> Result<Self> {
        Self::open(ns, address, Some(files.load()?))
    }

    fn open(ns: &NetNs, address: SocketAddr, tls: Option<Arc<ClientConfig>>) -> Result<Self> {
        // The runtime's thread begins where its creator is, and makes all connections.
        let _inside = ns.enter()?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let channel = {
            let _context = runtime.enter();
            let connect = move |_| {
                let tls = tls.clone();
                async move {
                    let stream = TcpStream::connect(address).await?;
                    let host = address.ip().to_string();
                    greet(stream, tls, &host).await.map(TokioIo::new)
                }
            };
            let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
            endpoint.connect_with_connector_lazy(tower::service_fn(connect))
        };
        Ok(Self {
            client: StatusServiceClient::new(channel),
            runtime,
        })
    }

    /// Returns the fleet at this moment.
    ///
    /// # Errors
    /// The control plane does not answer.
    pub fn fleet(&self) -> Result<Fleet> {
        let mut client = self.client.clone();
        let answer = self.runtime.spawn(async move {
            timeout(ANSWER, client.get_fleet(GetFleetRequest::default())).await
        });
        let answer = self.runtime.block_on(answer)?.context("no answer")??;
        Ok(answer.into_inner())
    }
}
