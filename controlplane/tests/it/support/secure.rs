//! A control plane with TLS on both ports, and certificates for its callers.

use std::fs;
use std::path::PathBuf;

use kp_controlplane::app::{Bound, Config, Protection};
use kplane_agents::certs::{self, Command};
use kplane_agents::connection_limits::Limits;
use kplane_agents::identity;
use kplane_tls::{KeyPair, ServerFiles};
use tempfile::TempDir;

use super::{synced, with_ports};

const OBJECTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80}]}
";

/// A folder with an authority, the control plane's certificate, and certificates of nodes and users.
pub(crate) struct Certs(TempDir);

impl Certs {
    pub(crate) fn new(nodes: &[&str], users: &[&str]) -> Self {
        let certs = Self(TempDir::new().unwrap());
        let (dir, host) = (certs.file(""), Vec::new());
        certs::run(&Command::Init { dir, host }).unwrap();
        let (dir, names) = (certs.file(""), owned(nodes));
        certs::run(&Command::Node { dir, names }).unwrap();
        if !users.is_empty() {
            certs.add_users(users, false);
        }
        certs
    }

    pub(crate) fn add_users(&self, names: &[&str], admin: bool) {
        let (dir, names) = (self.file(""), owned(names));
        certs::run(&Command::User { dir, names, admin }).unwrap();
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the files of `nodes/NAME` or `users/NAME`.
    pub(crate) fn pair(&self, name: &str) -> KeyPair {
        KeyPair::in_folder(self.0.path(), name)
    }

    pub(crate) fn protection(&self) -> Protection {
        Protection::Files(ServerFiles {
            pair: self.pair("server"),
            client_authorities: Some(self.file("ca.crt")),
        })
    }

    /// Starts a control plane with a Service, on free ports of 127.0.0.1.
    pub(crate) async fn control_plane(
        &self,
        agent_limits: Limits,
        identity: identity::AuthenticatorConfig,
    ) -> Bound {
        let manifests = self.file("objects");
        fs::create_dir(&manifests).unwrap();
        fs::write(manifests.join("web.yaml"), OBJECTS).unwrap();
        let config = Config {
            protection: self.protection(),
            identity,
            agent_limits,
            ..with_ports(&manifests)
        };
        synced(config).await
    }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}
