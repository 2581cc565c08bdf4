//! A replica on a folder that shares the document of orders with others.

use std::path::Path;

use kp_controlplane::app::{Bound, Config, Origin, State};

use super::synced;

/// Starts a replica on a folder, with the document of orders in another one, and waits until it has read the folder.
pub(crate) async fn replica(folder: &Path, shared: &Path) -> Bound {
    let config = Config {
        status_listen: Some("127.0.0.1:0".parse().unwrap()),
        state: Some(State {
            file: Some(shared.join("orders.json")),
            namespace: None,
        }),
        ..Config::new(Origin::Manifests(folder.to_owned()))
    };
    synced(config).await
}
