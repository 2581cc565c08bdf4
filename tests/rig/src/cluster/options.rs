//! The options of a cluster.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::DUAL_STACK;
use crate::netns::NetNs;

/// The options for starting a cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// The namespace in which the cluster runs, and the address there at which clients reach the API
    /// server (its certificate is for that and for 127.0.0.1). `None` creates a namespace with
    /// [`super::OWN_ADDRESS`].
    pub at: Option<(NetNs, IpAddr)>,
    /// The folder of state and logs. It is kept, and the next start uses it again. `None` takes a
    /// temporary folder.
    pub folder: Option<PathBuf>,
    /// Ranges of cluster IPs: one prefix, or two of different families with a comma. The address
    /// must be of the first one's family.
    pub service_ranges: String,
    /// Whether to run kube-controller-manager: Deployments get Pods, Services get EndpointSlices, and
    /// so on.
    pub controllers: bool,
    /// Runs a kubelet for all nodes. Pods with a `spec.nodeName` get addresses out of their node's
    /// `spec.podCIDRs` and are ready. Deleted Pods are terminating for this time.
    pub kubelet: Option<Duration>,
    /// Prepares for real kubelets, as [`crate::real`] does: with kube-scheduler, all controllers, and the admission
    /// that gives Pods their accounts. Implies `controllers`.
    pub kubelets: Option<Kubelets>,
    /// More flags for the API server.
    pub apiserver_flags: Vec<String>,
    /// More flags for kube-controller-manager.
    pub controller_flags: Vec<String>,
}

/// The files by which the API server and real kubelets know each other.
#[derive(Clone, Debug)]
pub struct Kubelets {
    /// The certificate of the authority that signs the kubelets' certificates.
    pub client_ca: PathBuf,
    /// The API server's certificate as a client of kubelets.
    pub certificate: PathBuf,
    /// The key of that certificate.
    pub key: PathBuf,
}

impl Default for Options {
    /// Returns the options for etcd and the API server alone, in a new namespace, with both families.
    fn default() -> Self {
        Self {
            at: None,
            folder: None,
            service_ranges: DUAL_STACK.to_owned(),
            controllers: false,
            kubelet: None,
            kubelets: None,
            apiserver_flags: Vec::new(),
            controller_flags: Vec::new(),
        }
    }
}
