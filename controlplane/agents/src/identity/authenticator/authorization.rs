//! Authorization: what a caller may do.

use kplane_model::NodeName;

use super::super::{CredentialWatch, Refusal, RefusalReason, Right};
use super::Caller;

impl Caller {
    /// Checks that the caller has a right on the status API.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn may(&self, right: &Right) -> Result<(), Refusal> {
        let Some(who) = &self.who else {
            return Ok(());
        };
        let outcome = if who.subject.is_of_node() {
            let name = &who.subject.name;
            let text = format!("{name:?} is a node, and nodes may not use the status API");
            Err(Refusal::new(RefusalReason::NoRight, text))
        } else {
            self.authenticator.rights.check(who, right).await
        };
        outcome.inspect_err(|refusal| {
            self.refused(&format!("{} {}", right.verb(), right.path()), refusal);
        })
    }

    /// Checks that the caller is the agent of a node. The watch of a credential ends when it no longer is.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn authorize_agent(&self, node: &NodeName) -> Result<CredentialWatch, Refusal> {
        let Some(who) = &self.who else {
            return Ok(CredentialWatch::idle());
        };
        let checked = self.authenticator.is_agent(who, node).await;
        checked.inspect_err(|refusal| self.refused(&format!("speak for node {node}"), refusal))?;
        Ok(CredentialWatch::start(self.clone(), node.clone()))
    }
}
