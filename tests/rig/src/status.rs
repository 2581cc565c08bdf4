//! The status API of a control plane: its state, and the states of its agents.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{Fleet, GetFleetRequest};
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
        // The runtime's thread begins where its creator is, and makes all connections.
        let _inside = ns.enter()?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let channel = {
            let _context = runtime.enter();
            Endpoint::from_shared(format!("http://{address}"))?.connect_lazy()
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
