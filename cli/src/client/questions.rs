//! Questions that the control plane passes on to the agents of all nodes.

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;

use super::{Client, Error};

impl Client {
    /// Returns how many flows lead to the endpoints of a Service.
    pub(crate) async fn drain_status_of(
        &self,
        name: &ServiceName,
        request: pb::DrainStatusRequest,
    ) -> Result<pb::DrainStatus, Error> {
        self.known(name, self.drain_status(request).await).await
    }

    /// Returns which clients of a Service nodes remember.
    pub(crate) async fn affinity(
        &self,
        name: &ServiceName,
        request: pb::AffinityRequest,
    ) -> Result<pb::AffinityAnswer, Error> {
        let mut stub = self.stub.clone();
        self.known(name, self.ask(stub.get_affinity(request)).await)
            .await
    }

    /// Returns what the userspace proxies of nodes know of a Service.
    pub(crate) async fn proxied(
        &self,
        name: &ServiceName,
        request: pb::ProxiedRequest,
    ) -> Result<pb::ProxiedAnswer, Error> {
        let mut stub = self.stub.clone();
        self.known(name, self.ask(stub.get_proxied(request)).await)
            .await
    }

    /// Lets nodes forget a client of a Service.
    pub(crate) async fn forget_client(
        &self,
        name: &ServiceName,
        request: pb::AffinityRequest,
    ) -> Result<pb::AffinityAnswer, Error> {
        let mut stub = self.stub.clone();
        self.known(name, self.ask(stub.forget_client(request)).await)
            .await
    }

    /// Lets nodes connect to a Service.
    pub(crate) async fn probe(
        &self,
        name: &ServiceName,
        request: pb::ProbeRequest,
    ) -> Result<pb::ProbeReport, Error> {
        let mut stub = self.stub.clone();
        self.known(name, self.ask(stub.probe_nodes(request)).await)
            .await
    }

    /// Returns how many flows lead to endpoints.
    pub(crate) async fn drain_status(
        &self,
        request: pb::DrainStatusRequest,
    ) -> Result<pb::DrainStatus, Error> {
        let mut stub = self.stub.clone();
        self.ask(stub.get_drain_status(request)).await
    }
}
