//! What a node lacks, for `kpctl diff`. On request only.

use kplane_model::{DesiredKey, ServiceName};

use super::Store;

impl Store {
    /// Returns the Services that changed after a revision in a way that concerns a node, each with the revision of its
    /// last change, newest first.
    pub fn pending(&self, node: &str, after: u64, most: usize) -> Vec<(ServiceName, u64)> {
        let state = self.read();
        let view = state.views.get(node);
        let zone = view.and_then(|view| view.zone.as_deref());
        let concerns = |key: &DesiredKey| {
            state
                .shared
                .get(key)
                .map(|s| s.resolve(node, zone))
                .is_none_or(|blob| blob.revision > after)
        };
        let shared = state
            .log
            .between(after, state.revision)
            .filter(|(_, key)| concerns(key))
            .filter_map(|(revision, key)| Some((key.service()?.service.clone(), revision)));
        let own = view
            .into_iter()
            .flat_map(|view| view.log.between(after, state.revision))
            .filter_map(|(revision, key)| match key {
                DesiredKey::Local(key) | DesiredKey::Service(key) => {
                    Some((key.service.clone(), revision))
                }
                DesiredKey::Node | DesiredKey::Policy(_) => None,
            });
        shared.take(most).chain(own.take(most)).collect()
    }
}
