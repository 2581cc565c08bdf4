//! Certificates of `kp-controlplane certs`.

use std::fs;
use std::path::PathBuf;

use kplane_agents::certs::{self, Command};
use kplane_tls::KeyPair;
use tempfile::TempDir;

/// A folder with an authority, and certificates for the control plane, nodes, a user and an administrator.
pub(crate) struct Certs(TempDir);

impl Certs {
    pub(crate) fn new() -> Self {
        let certs = Self(TempDir::new().unwrap());
        certs.init();
        let (dir, names) = (certs.file(""), ["n1", "n2", "n9"].map(str::to_owned).into());
        certs::run(&Command::Node { dir, names }).unwrap();
        for (user, admin) in [("alice", false), ("bob", true)] {
            let (dir, names) = (certs.file(""), vec![user.to_owned()]);
            certs::run(&Command::User { dir, names, admin }).unwrap();
        }
        certs
    }

    /// Makes the control plane's certificate, or renews it. Returns the files that were written.
    pub(crate) fn init(&self) -> Vec<PathBuf> {
        let (dir, host) = (self.file(""), vec!["cp.example".to_owned()]);
        certs::run(&Command::Init { dir, host }).unwrap()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn pair(&self, name: &str) -> KeyPair {
        KeyPair::in_folder(self.0.path(), name)
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.file(name)).unwrap()
    }
}
