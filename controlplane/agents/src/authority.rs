//! Certificates without work: in a cluster, a control plane makes its authority and its serving certificate itself.
//!
//! ```text
//! Secret kplane-certificates   all keys; every replica reads it, the first one makes it
//! ConfigMap kplane-ca          ca.crt: the authorities that agents and kpctl must accept
//! ConfigMap kplane-replicas    addresses: where agents find the replicas (announce.rs)
//! ```
//!
//! Replicas need no leader: each looks once a minute, decides by the pure `certificates.rs` alone, and writes with the version
//! that it read. Of two that write, one gets a conflict and reads again.

mod announce;
mod certificates;
mod config_map;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kplane_desired_state::kubernetes::{Api, Asked, Failure, Unanswered};
use kplane_tls::{Authorities, ClientConfig, FileError, Publisher, ServerConfig, ServerPems, read};
use kube::api::PostParams;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use self::announce::AddressWriter;
use self::certificates::{Certificates, Data};
use self::config_map::publish;
use crate::peers::Listed;

/// Name of the control plane's Service.
const SERVICE: &str = "kplane-controlplane";
/// Name of the Secret.
const SECRET: &str = "kplane-certificates";
/// Name of the ConfigMap.
const CONFIG_MAP: &str = "kplane-ca";
/// Key of the ConfigMap's data.
const BUNDLE: &str = "ca.crt";
/// The API server's authority of clients, for servers that extend it (kube-system).
const CLIENTS: [&str; 2] = ["kube-system", "extension-apiserver-authentication"];
const CLIENT_CA: &str = "client-ca-file";

/// Interval at which the objects are read, unless a flag names another one.
pub const LOOK: Duration = Duration::from_secs(60);
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(5);

/// The certificates of a control plane in a cluster.
#[derive(Debug)]
pub struct Authority {
    api: Arc<Api>,
    namespace: String,
    /// Names and addresses in the serving certificate.
    names: Vec<String>,
    /// File of further authorities of clients.
    client_ca: Option<PathBuf>,
    /// Interval at which the objects are read.
    interval: Duration,
    /// Where all replicas serve agents.
    places: watch::Sender<BTreeSet<SocketAddr>>,
}

/// A step that failed. The next look tries again.
#[derive(Debug, thiserror::Error)]
enum AuthorityError {
    #[error(transparent)]
    Api(#[from] Unanswered),
    #[error("cannot make certificates: {0}")]
    Make(#[from] rcgen::Error),
    #[error(
        "the Secret {namespace}/{SECRET} contains something else than kplane's certificates; delete it, and the control \
         plane makes new ones"
    )]
    Foreign { namespace: String },
    #[error(transparent)]
    Use(#[from] FileError),
}

/// The certificates and the authorities of clients, which serving needs.
#[derive(PartialEq, Eq)]
struct Serving {
    certificates: Certificates,
    clients: String,
}

/// Configurations of the ports and of connections to other replicas, and the end of their certificate.
type Configs = (Arc<ServerConfig>, Arc<ClientConfig>, Option<SystemTime>);

impl Authority {
    /// Creates an authority whose objects are in a namespace. `client_ca` names a file of further authorities of
    /// clients. The objects are read again at `interval`.
    pub fn new(
        api: Arc<Api>,
        namespace: &str,
        client_ca: Option<PathBuf>,
        interval: Duration,
    ) -> Self {
        let service = SERVICE;
        let names = [
            "localhost".to_owned(),
            "127.0.0.1".to_owned(),
            "::1".to_owned(),
            service.to_owned(),
            format!("{service}.{namespace}"),
            format!("{service}.{namespace}.svc"),
            format!("*.{service}.{namespace}.svc"),
        ];
        Self {
            api,
            namespace: namespace.to_owned(),
            names: names.to_vec(),
            client_ca,
            interval,
            places: watch::Sender::default(),
        }
    }

    /// Returns the list of all replicas, which is filled while the authority [keeps](Self::keep) its objects.
    pub fn listed(&self) -> Listed {
        Listed::new(&self.service_name(), self.places.subscribe())
    }

    /// Returns the name that every serving certificate has.
    pub fn service_name(&self) -> String {
        format!("{SERVICE}.{}.svc", self.namespace)
    }

    /// Makes or reads the certificates, publishes the bundle, and hands each configuration to `publish`, and that of
    /// connections to other replicas to `peers`. Announces all replicas to agents. Never returns.
    pub async fn keep(self, publish: Publisher<ServerConfig>, peers: Publisher<ClientConfig>) {
        let announcer = AddressWriter {
            api: Arc::clone(&self.api),
            namespace: self.namespace.clone(),
            places: self.places.clone(),
        };
        tokio::join!(announcer.keep(), self.certify(publish, peers));
    }

    async fn certify(
        self,
        mut publish: Publisher<ServerConfig>,
        mut peers: Publisher<ClientConfig>,
    ) {
        let mut said = String::new();
        let mut served: Option<Serving> = None;
        loop {
            match self.look().await {
                Ok(serving) if served.as_ref() == Some(&serving) => {
                    said.clear();
                    sleep(self.interval).await;
                }
                Ok(serving) => match self.configs(&serving) {
                    Ok((config, client, ends_at)) => {
                        info!(
                            namespace = self.namespace,
                            secret = SECRET,
                            "read the certificates; new connections use them"
                        );
                        publish.publish(config, ends_at);
                        peers.publish(client, ends_at);
                        served = Some(serving);
                    }
                    Err(error) => {
                        complain(&mut said, &error);
                        sleep(RETRY).await;
                    }
                },
                Err(error) => {
                    complain(&mut said, &error);
                    sleep(RETRY).await;
                }
            }
        }
    }

    /// Reads everything once; makes and renews what has to be.
    async fn look(&self) -> Result<Serving, AuthorityError> {
        let certificates = self.certificates().await?;
        self.publish_bundle(&certificates.bundle()).await?;
        let clients = self.clients().await?;
        Ok(Serving {
            certificates,
            clients,
        })
    }

    /// Returns the configurations of the ports, and of connections to other replicas, and the end of their certificate.
    fn configs(&self, serving: &Serving) -> Result<Configs, AuthorityError> {
        // Only replicas can have a certificate of their own authority as clients.
        let bundle = serving.certificates.bundle();
        let pems = ServerPems {
            place: format!("Secret {}/{SECRET}", self.namespace).into(),
            chain: serving.certificates.server.certificate.clone().into_bytes(),
            key: serving.certificates.server.key.clone().into_bytes(),
            client_authorities: format!("{}\n{bundle}", serving.clients).into_bytes(),
        };
        let trusted = Authorities::of_text(bundle, pems.place.clone());
        Ok((pems.load()?, pems.load_client(&trusted)?, pems.ends_at()))
    }

    async fn certificates(&self) -> Result<Certificates, AuthorityError> {
        let now = SystemTime::now();
        let secrets: kube::Api<Secret> = kube::Api::namespaced(self.api.client(), &self.namespace);
        loop {
            let Some(secret) = self.ask("get", "secrets", secrets.get_opt(SECRET)).await? else {
                let made = Certificates::new(&self.names, now)?;
                let secret = self.secret(&made, None);
                let params = PostParams::default();
                match self.ask("create", "secrets", secrets.create(&params, &secret)).await {
                    Ok(_) => {
                        info!(
                            namespace = self.namespace,
                            secret = SECRET,
                            "made an authority"
                        );
                        return Ok(made);
                    }
                    Err(error) if error.is_conflict() => continue,
                    Err(error) => return Err(error.into()),
                }
            };
            let data: Data = secret
                .data
                .unwrap_or_default()
                .into_iter()
                .map(|(key, bytes)| (key, bytes.0))
                .collect();
            let certificates =
                Certificates::read(&data).ok_or_else(|| AuthorityError::Foreign {
                    namespace: self.namespace.clone(),
                })?;
            let Some(renewed) = certificates.renewed(&self.names, now)? else {
                return Ok(certificates);
            };
            let secret = self.secret(&renewed, secret.metadata.resource_version);
            let params = PostParams::default();
            match self
                .ask(
                    "update",
                    "secrets",
                    secrets.replace(SECRET, &params, &secret),
                )
                .await
            {
                Ok(_) => info!(
                    namespace = self.namespace,
                    secret = SECRET,
                    "renewed the certificates"
                ),
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn secret(&self, certificates: &Certificates, version: Option<String>) -> Secret {
        let data = certificates.write().into_iter();
        Secret {
            metadata: metadata(&self.namespace, SECRET, version),
            data: Some(data.map(|(key, bytes)| (key, ByteString(bytes))).collect()),
            type_: Some("Opaque".to_owned()),
            ..Secret::default()
        }
    }

    /// Writes the ConfigMap unless it has the bundle already.
    async fn publish_bundle(&self, bundle: &str) -> Result<(), AuthorityError> {
        publish(&self.api, &self.namespace, CONFIG_MAP, (BUNDLE, bundle)).await?;
        Ok(())
    }

    /// Returns the authorities of clients: the API server's, and those of the file. The first of them serves
    /// administrators whose kubeconfig has a certificate; without the right to read it, tokens remain.
    async fn clients(&self) -> Result<String, AuthorityError> {
        let [namespace, name] = CLIENTS;
        let maps: kube::Api<ConfigMap> = kube::Api::namespaced(self.api.client(), namespace);
        let mut clients = match self.ask("get", "configmaps", maps.get_opt(name)).await {
            Ok(map) => map.and_then(|map| map.data?.remove(CLIENT_CA)).unwrap_or_default(),
            Err(Unanswered {
                failure: Failure::Forbidden(_),
                ..
            }) => String::new(),
            Err(error) => return Err(error.into()),
        };
        if let Some(file) = &self.client_ca {
            clients.push_str(&String::from_utf8_lossy(&read(file)?));
        }
        Ok(clients)
    }

    async fn ask<T>(
        &self,
        verb: &'static str,
        resource: &'static str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Unanswered> {
        let asked = Asked::new(verb, resource, "");
        self.api.ask(asked, PATIENCE, request).await
    }
}

/// Returns the metadata of an object of the control plane.
fn metadata(namespace: &str, name: &str, version: Option<String>) -> ObjectMeta {
    let labels = [("name", "kplane"), ("component", "controlplane")]
        .map(|(key, value)| (format!("app.kubernetes.io/{key}"), value.to_owned()));
    ObjectMeta {
        name: Some(name.to_owned()),
        namespace: Some(namespace.to_owned()),
        labels: Some(labels.into()),
        resource_version: version,
        ..ObjectMeta::default()
    }
}

/// Logs an error once.
fn complain(said: &mut String, error: &AuthorityError) {
    let text = error.to_string();
    if *said != text {
        warn!("cannot keep the certificates of the control plane: {text}");
        *said = text;
    }
}
