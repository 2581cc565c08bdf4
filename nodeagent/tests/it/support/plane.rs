//! A control plane that can die.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use kp_controlplane::app as control_plane;
use kplane_agents::hub::Hub;
use kplane_rig::loopback::until_free;
use tokio::runtime::Runtime;

/// A control plane whose death takes its connections along, as that of a process does.
pub(crate) struct Plane {
    runtime: Runtime,
    pub(crate) address: SocketAddr,
    pub(crate) epoch: u64,
    pub(crate) hub: Arc<Hub>,
}

impl Plane {
    /// Builds one on a thread of its own, since a runtime may not start within another.
    pub(crate) fn start(folder: &Path, address: SocketAddr) -> Self {
        let source = control_plane::Origin::Manifests(folder.to_owned());
        let config = control_plane::Config {
            agent_listen: Some(address),
            ..control_plane::Config::new(source)
        };
        let start = || {
            let runtime = Runtime::new().unwrap();
            runtime.block_on(until_free(address));
            let bound = runtime.block_on(control_plane::build(config)).unwrap();
            let address = bound.agent_addr.unwrap();
            let hub = Arc::clone(bound.hub());
            let epoch = hub.store().epoch();
            runtime.spawn(bound.wait());
            Self {
                hub,
                runtime,
                address,
                epoch,
            }
        };
        std::thread::scope(|scope| scope.spawn(start).join().unwrap())
    }

    pub(crate) fn kill(self) {
        std::thread::scope(|scope| scope.spawn(|| drop(self.runtime)).join().unwrap());
    }
}
