//! ConfigMaps with one key, in which all replicas write the same.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kplane_desired_state::kubernetes::{Api, Asked, Unanswered};
use kube::api::PostParams;

use super::{PATIENCE, metadata};

/// Writes a ConfigMap unless it has this text already; returns whether it was written. When another replica writes at the
/// same time, nothing is written.
///
/// # Errors
/// [`Unanswered`].
pub(super) async fn publish(
    api: &Api,
    namespace: &str,
    name: &str,
    (key, text): (&str, &str),
) -> Result<bool, Unanswered> {
    let maps: kube::Api<ConfigMap> = kube::Api::namespaced(api.client(), namespace);
    let asked = |verb| Asked::new(verb, "configmaps", "");
    let before = api.ask(asked("get"), PATIENCE, maps.get_opt(name)).await?;
    let present = before.as_ref().and_then(|map| map.data.as_ref()?.get(key));
    if present.is_some_and(|present| present == text) {
        return Ok(false);
    }
    let version = before.as_ref().and_then(|map| map.metadata.resource_version.clone());
    let map = ConfigMap {
        metadata: metadata(namespace, name, version),
        data: Some(BTreeMap::from([(key.to_owned(), text.to_owned())])),
        ..ConfigMap::default()
    };
    let params = PostParams::default();
    let written = match before {
        None => {
            let request = maps.create(&params, &map);
            api.ask(asked("create"), PATIENCE, request).await
        }
        Some(_) => {
            let request = maps.replace(name, &params, &map);
            api.ask(asked("update"), PATIENCE, request).await
        }
    };
    match written {
        Ok(_) => Ok(true),
        Err(error) if error.is_conflict() => Ok(false),
        Err(error) => Err(error),
    }
}
