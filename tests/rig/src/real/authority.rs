//! The authority of a cluster: certificates of kubelets, and of the API server as a client of kubelets.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use serde_json::json;

use crate::cluster::Kubelets;

/// The group of users that may do everything.
const ADMINISTRATORS: &str = "system:masters";
/// The group of kubelets.
const NODES: &str = "system:nodes";

/// An authority whose files are in a folder.
#[derive(Debug)]
pub(super) struct Authority {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Creates an authority, and a certificate of the API server.
    pub(super) fn new(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "kplane-tests");
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?.pem();
        let authority = Self {
            folder: folder.to_owned(),
            issuer: Issuer::new(params, key),
        };
        authority.write("ca.crt", &certificate)?;
        authority.issue("apiserver", "kube-apiserver", ADMINISTRATORS)?;
        Ok(authority)
    }

    /// Returns what the API server must know to use kubelets and to be used by them.
    pub(super) fn kubelets(&self) -> Kubelets {
        Kubelets {
            client_ca: self.ca(),
            certificate: self.file("apiserver.crt"),
            key: self.file("apiserver.key"),
        }
    }

    /// Returns the certificate of the authority.
    pub(super) fn ca(&self) -> PathBuf {
        self.file("ca.crt")
    }

    /// Returns the path of the kubeconfig of a node's kubelet, in the folder of an authority.
    pub(super) fn kubeconfig(folder: &Path, node: &str) -> PathBuf {
        folder.join(format!("{node}.kubeconfig"))
    }

    /// Writes the kubeconfig of a node's kubelet.
    pub(super) fn write_kubeconfig(
        &self,
        node: &str,
        server: &str,
        server_ca: &Path,
    ) -> Result<()> {
        self.issue(node, &format!("system:node:{node}"), NODES)?;
        let certificate = self.file(&format!("{node}.crt"));
        let key = self.file(&format!("{node}.key"));
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "c", "cluster": {
                "server": server, "certificate-authority": server_ca,
            } }],
            "users": [{ "name": node, "user": {
                "client-certificate": certificate, "client-key": key,
            } }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": node } }],
            "current-context": "c",
        });
        let path = Self::kubeconfig(&self.folder, node);
        fs::write(&path, serde_json::to_vec_pretty(&config)?)
            .with_context(|| format!("write {}", path.display()))
    }

    fn issue(&self, file: &str, user: &str, group: &str) -> Result<()> {
        let mut params = CertificateParams::new(vec![file.to_owned()])?;
        let name = &mut params.distinguished_name;
        name.push(DnType::CommonName, user);
        name.push(DnType::OrganizationName, group);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        self.write(&format!("{file}.crt"), &certificate)?;
        self.write(&format!("{file}.key"), &key.serialize_pem())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.file(name);
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }
}
