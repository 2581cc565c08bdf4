//! Questions that the control plane passes on to the agents of all nodes, and those about NetworkPolicies.

use kplane_model::{PolicyName, ServiceName};
use kplane_proto::v1 as pb;
use tonic::{Response, Status};

use super::{Client, Error, Stub};

impl Client {
    /// Asks about a Service.
    pub(crate) async fn about<T>(
        &self,
        name: &ServiceName,
        ask: impl AsyncFnOnce(Stub) -> Result<Response<T>, Status>,
    ) -> Result<T, Error> {
        let answer = self.ask(ask(self.stub.clone())).await;
        self.known(name, answer).await
    }

    /// Returns who talked to whom.
    pub(crate) async fn graph(&self, request: pb::GraphRequest) -> Result<pb::GraphAnswer, Error> {
        let mut stub = self.stub.clone();
        self.ask(stub.get_graph(request)).await
    }

    /// Returns the NetworkPolicies of a namespace, or all if it is empty, from all pages.
    pub(crate) async fn policies(&self, namespace: &str) -> Result<Vec<pb::PolicySummary>, Error> {
        let mut request = pb::ListPoliciesRequest {
            namespace: namespace.to_owned(),
            ..pb::ListPoliciesRequest::default()
        };
        let mut stub = self.stub.clone();
        let mut policies = Vec::new();
        loop {
            let page = self.ask(stub.list_policies(request.clone())).await?;
            let ended = page.policies.is_empty() || page.next_page_token == request.page_token;
            policies.extend(page.policies);
            if page.next_page_token.is_empty() {
                return Ok(policies);
            }
            if ended {
                return Err(self.lost("the list of NetworkPolicies has no end"));
            }
            request.page_token = page.next_page_token;
        }
    }

    /// Returns a NetworkPolicy.
    pub(crate) async fn policy(&self, name: &PolicyName) -> Result<pb::PolicyDescription, Error> {
        let request = pb::DescribePolicyRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
        };
        let mut stub = self.stub.clone();
        self.ask(stub.describe_policy(request)).await
    }

    /// Returns packets that NetworkPolicies denied, for a follower.
    pub(crate) async fn follow_drops(
        &self,
        request: pb::DropsRequest,
    ) -> Result<pb::DropsAnswer, Error> {
        let mut stub = self.stub.clone();
        self.ask(stub.follow_drops(request)).await
    }

    /// Returns what NetworkPolicies say to a connection.
    pub(crate) async fn judge(
        &self,
        request: pb::JudgeConnectionRequest,
    ) -> Result<pb::ConnectionJudgement, Error> {
        let mut stub = self.stub.clone();
        self.ask(stub.judge_connection(request)).await
    }
}
