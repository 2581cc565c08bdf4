//! Checks of an agent: its identity, and the node for which it speaks.

use kplane_model::NodeName;

use super::{Authenticator, Identity, Proof, Refusal, RefusalReason};

impl Authenticator {
    /// Checks that an identity is that of the agent of a node that exists now.
    pub(super) async fn is_agent(&self, who: &Identity, node: &NodeName) -> Result<(), Refusal> {
        let name = &who.subject.name;
        match who.node(&self.accounts) {
            Some(own) if own == &**node => self.is_same_node(who, node).await,
            Some(own) => Err(Refusal::new(
                RefusalReason::OtherNode,
                format!(
                    "the credential is of node {own:?} and does not allow its owner to speak for node {node:?}; check \
                     the agent's --node-name and its credential"
                ),
            )),
            None if matches!(who.proof, Proof::ApiToken { .. }) => Err(Refusal::new(
                RefusalReason::NotAnAgent,
                format!(
                    "{name:?} is not an agent: the token must be of a ServiceAccount that --agent-service-account of \
                     the control plane names ({}), and of a pod on a node",
                    self.accounts.join(", ")
                ),
            )),
            None => Err(Refusal::new(
                RefusalReason::NotAnAgent,
                format!(
                    "the credential of {name:?} names no node: that of an agent is of the user system:node:NAME in \
                     the group system:nodes (a certificate with CN=system:node:NAME, O=system:nodes)"
                ),
            )),
        }
    }

    /// Checks that a token is bound to the Node that exists now, and not to an earlier one of the same name. The API
    /// server does not compare them for tokens of pods.
    async fn is_same_node(&self, who: &Identity, node: &NodeName) -> Result<(), Refusal> {
        let Some(bound) = who.binding().and_then(|binding| binding.uid) else {
            return Ok(());
        };
        let (index, name) = (self.hub.index(), node.clone());
        let Ok(Some(uid)) = index.look(move |index| index.node_uid(&name)).await else {
            // The Node is unknown: `is_still_there` or the session decides about that.
            return Ok(());
        };
        if uid == bound {
            return Ok(());
        }
        Err(Refusal::new(
            RefusalReason::NoSuchNode,
            format!(
                "the token is bound to an earlier Node {node:?}, with UID {bound}: the Node was deleted and made \
                 again; restart the agent's pod"
            ),
        ))
    }

    /// Checks that a node has not been deleted.
    pub(super) fn is_still_there(&self, node: &NodeName) -> Result<(), Refusal> {
        if !self.hub.lacks_node(node) {
            return Ok(());
        }
        Err(Refusal::new(
            RefusalReason::NoSuchNode,
            format!("the Node {node:?} was deleted"),
        ))
    }
}
