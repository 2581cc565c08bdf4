//! A replica on a folder that shares the document of orders with others.

use std::path::Path;

use kp_controlplane::app::{Bound, Config, State};

use super::{synced, with_ports};

/// Starts a replica on a folder, with the document of orders in another one, and waits until it has read the folder.
pub(crate) async fn replica(folder: &Path, shared: &Path) -> Bound {
    let config = Config {
        state: Some(State {
            file: Some(shared.join("orders.json")),
            namespace: None,
        }),
        ..with_ports(folder)
    };
    synced(config).await
}
