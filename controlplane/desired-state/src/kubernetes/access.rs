//! The API server's address and the credentials: from a kubeconfig, or from a pod's ServiceAccount.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kplane_model::one_line;
use kube::Config;
use kube::config::{Cluster, KubeConfigOptions, Kubeconfig, KubeconfigError};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::ask::Failures;
use super::connector;
use super::failure::Failure;
use super::requests::Requests;

/// Minimum time between two attempts to read the credentials again.
const RENEW_EVERY: Duration = Duration::from_secs(5);

/// Source of the API server's address and of the credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// A kubeconfig file.
    Kubeconfig {
        /// The file.
        file: PathBuf,
        /// Address of the server that replaces the file's.
        master: Option<String>,
    },
    /// A pod's ServiceAccount.
    InCluster {
        /// Address of the server that replaces the ClusterIP from the pod's environment. That ClusterIP does not
        /// work on a node whose Services no proxy serves yet.
        master: Option<String>,
    },
    /// An address without credentials, like kube-proxy with `--master` alone.
    Anonymous {
        /// The address.
        master: String,
    },
}

/// Hint about a server address that only kplane serves.
pub const TRAP: &str = "this is the API server's ClusterIP, which leads nowhere until kplane \
                        itself serves it; set --master or KPLANE_API_SERVER to the API server's \
                        own address";

impl Access {
    /// Returns whether the API server is reached through an address that only kplane programs.
    pub fn needs_us(&self) -> bool {
        let of_pod = matches!(self, Self::InCluster { master: None });
        of_pod && !names_another(|name| std::env::var(name).ok())
    }

    /// Adds a hint to a failure if this kind of access may be its cause.
    fn explain(&self, failure: Failure) -> Failure {
        match failure {
            Failure::Unreachable(why) if self.needs_us() => {
                Failure::Unreachable(format!("{why}; {TRAP}"))
            }
            failure => failure,
        }
    }
}

/// Returns whether the pod's manifest sets another host than the ClusterIP, which kubelet sets in both variables.
fn names_another(variable: impl Fn(&str) -> Option<String>) -> bool {
    let host = variable("KUBERNETES_SERVICE_HOST");
    let cluster_ip = variable("KUBERNETES_PORT_443_TCP_ADDR");
    host.zip(cluster_ip).is_some_and(|(host, ip)| host != ip)
}

/// An invalid configuration of the access. Only the operator can fix it. One line.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The file does not exist or cannot be read.
    #[error("cannot read the kubeconfig {file}; check the path and its permissions")]
    Unreadable {
        /// The file.
        file: String,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The file is not a kubeconfig.
    #[error(
        "{file} is not a kubeconfig: {reason}; write it again, for example with kubectl config"
    )]
    NotAKubeconfig {
        /// The file.
        file: String,
        /// The problem with the file.
        reason: String,
    },
    /// The file does not select one of its clusters.
    #[error(
        "the kubeconfig {file} has no current-context: choose one with kubectl config use-context"
    )]
    NoContext {
        /// The file.
        file: String,
    },
    /// The file refers to an entry that it does not contain.
    #[error(
        "the kubeconfig {file} names the {what} {name:?}, but has none of that name: add it, or choose another context"
    )]
    Dangling {
        /// The file.
        file: String,
        /// `context`, `cluster` or `user`.
        what: &'static str,
        /// The entry's name.
        name: String,
    },
    /// The address of the server is missing or invalid.
    #[error(
        "{place}: {address:?} is not the address of an API server; use a form such as \
         https://192.0.2.1:6443"
    )]
    Address {
        /// Place of the address.
        place: String,
        /// The text found there.
        address: String,
    },
    /// A certificate or key is invalid.
    #[error("{place}: {what} cannot be used: {reason}; give a file or data in PEM format")]
    Material {
        /// Place of the certificate or key.
        place: String,
        /// The kind of material.
        what: &'static str,
        /// The problem with the material.
        reason: String,
    },
    /// The credentials cannot be obtained.
    #[error("{place}: the user's credentials cannot be obtained: {reason}")]
    Credentials {
        /// Place that describes the credentials.
        place: String,
        /// The problem with the credentials.
        reason: String,
    },
    /// A proxy of an unsupported kind.
    #[error("{place}: the proxy {proxy} cannot be used; reach the API server without it")]
    Proxy {
        /// Place of the proxy's address.
        place: String,
        /// The proxy's address.
        proxy: String,
    },
    /// The process does not run in a pod, or the pod has no ServiceAccount.
    #[error("cannot find the ServiceAccount of a pod ({reason}); use --kubeconfig")]
    NotInCluster {
        /// The missing part.
        reason: String,
    },
}

/// A connection to the API server that can be renewed. All code that talks to the server shares it.
#[derive(Debug)]
pub struct Api {
    access: Access,
    own_mark: u32,
    current: Mutex<Current>,
    failures: Failures,
    requests: Arc<Requests>,
}

struct Current {
    client: kube::Client,
    server: String,
    renewed_at: Instant,
}

impl std::fmt::Debug for Current {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Current").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Api {
    /// Reads the credentials, without connecting to the server yet. Connections will carry the mark `own_mark`, 0
    /// = none.
    ///
    /// # Errors
    /// [`AccessError`] when the configuration is invalid.
    pub async fn new(access: Access, own_mark: u32) -> Result<Self, AccessError> {
        let requests = Arc::default();
        let current = open(&access, own_mark, &requests).await?;
        Ok(Self {
            access,
            own_mark,
            current: Mutex::new(current),
            failures: Failures::default(),
            requests,
        })
    }

    /// Creates a connection whose client answers for the server: for tests.
    pub fn of(client: kube::Client) -> Self {
        let server = "https://192.0.2.1".to_owned();
        Self {
            access: Access::Anonymous {
                master: server.clone(),
            },
            own_mark: 0,
            current: Mutex::new(Current {
                client,
                server,
                renewed_at: Instant::now(),
            }),
            failures: Failures::default(),
            requests: Arc::default(),
        }
    }

    /// Returns the current client. Call this again for each piece of work.
    pub fn client(&self) -> kube::Client {
        self.current.lock().client.clone()
    }

    /// Classifies an error of the client.
    pub fn failure(&self, error: &kube::Error) -> Failure {
        self.access.explain(Failure::of_client(error))
    }

    /// Returns the counts of requests that failed.
    pub fn failures(&self) -> &Failures {
        &self.failures
    }

    /// Returns the counts of all requests.
    pub fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Returns the address of the server.
    pub fn server(&self) -> String {
        self.current.lock().server.clone()
    }

    /// Reads the credentials again, unless that was done a moment ago. To be called when the server refused them:
    /// the files may have newer ones.
    ///
    /// # Errors
    /// [`AccessError`] when they are invalid; the old ones stay then.
    pub async fn renew(&self) -> Result<(), AccessError> {
        {
            let mut current = self.current.lock();
            if current.renewed_at.elapsed() < RENEW_EVERY {
                return Ok(());
            }
            current.renewed_at = Instant::now();
        }
        let renewed = open(&self.access, self.own_mark, &self.requests).await?;
        *self.current.lock() = renewed;
        Ok(())
    }
}

async fn open(
    access: &Access,
    own_mark: u32,
    requests: &Arc<Requests>,
) -> Result<Current, AccessError> {
    let (config, place) = match access {
        Access::Kubeconfig { file, master } => {
            let mut config = read(file).await?;
            if let Some(master) = master {
                config.cluster_url = address("--master", master)?;
            }
            (config, format!("the kubeconfig {}", file.display()))
        }
        Access::InCluster { master } => {
            // With `master`, the environment need not name an address.
            let config = match master {
                Some(_) => Config::incluster_dns(),
                None => Config::incluster(),
            };
            let mut config = config.map_err(|error| AccessError::NotInCluster {
                reason: one_line(&error.to_string()),
            })?;
            if let Some(master) = master {
                config.cluster_url = address("--master", master)?;
            }
            (config, "the pod's ServiceAccount".to_owned())
        }
        Access::Anonymous { master } => {
            let place = "--master".to_owned();
            (Config::new(address(&place, master)?), place)
        }
    };
    let client = connector::client(&config, own_mark, requests)
        .map_err(|error| client_error(&place, &error))?;
    Ok(Current {
        client,
        server: config.cluster_url.to_string().trim_end_matches('/').to_owned(),
        renewed_at: Instant::now(),
    })
}

async fn read(path: &Path) -> Result<Config, AccessError> {
    let explain = |error| kubeconfig_error(path, error);
    let kubeconfig = Kubeconfig::read_from(path).map_err(explain)?;
    check_names(path, &kubeconfig)?;
    let cluster = cluster_of(&kubeconfig);
    let server = cluster.and_then(|cluster| cluster.server.clone());
    if let Some(proxy) = cluster.and_then(|c| c.proxy_url.clone()).filter(|p| !p.is_empty()) {
        return Err(AccessError::Proxy {
            place: format!("the kubeconfig {}", path.display()),
            proxy,
        });
    }
    let options = KubeConfigOptions::default();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(
        |error| match error {
            KubeconfigError::MissingClusterUrl | KubeconfigError::ParseClusterUrl(_) => {
                AccessError::Address {
                    place: format!("the kubeconfig {}", path.display()),
                    address: server.clone().unwrap_or_default(),
                }
            }
            error => kubeconfig_error(path, error),
        },
    )?;
    let place = format!("the kubeconfig {}", path.display());
    config.cluster_url = address(&place, &server.unwrap_or_default())?;
    Ok(config)
}

/// Returns the cluster of the current context.
fn cluster_of(kubeconfig: &Kubeconfig) -> Option<&Cluster> {
    let current = kubeconfig.current_context.as_ref()?;
    let named = kubeconfig.contexts.iter().find(|c| c.name == *current)?;
    let cluster = &named.context.as_ref()?.cluster;
    let named = kubeconfig.clusters.iter().find(|c| c.name == *cluster)?;
    named.cluster.as_ref()
}

/// Checks that all names refer to existing entries. With a missing user, requests would silently be anonymous.
fn check_names(path: &Path, kubeconfig: &Kubeconfig) -> Result<(), AccessError> {
    let file = || path.display().to_string();
    let Some(current) = kubeconfig.current_context.as_ref().filter(|c| !c.is_empty()) else {
        return Err(AccessError::NoContext { file: file() });
    };
    let context = kubeconfig.contexts.iter().find(|c| c.name == *current);
    let user = context
        .and_then(|named| named.context.as_ref())
        .and_then(|context| context.user.as_ref())
        .filter(|user| !user.is_empty());
    match user {
        Some(user) if !kubeconfig.auth_infos.iter().any(|u| u.name == *user) => {
            Err(AccessError::Dangling {
                file: file(),
                what: "user",
                name: user.clone(),
            })
        }
        _ => Ok(()),
    }
}

fn address(place: &str, text: &str) -> Result<http::Uri, AccessError> {
    let url = if text.contains("://") || text.is_empty() {
        text.to_owned()
    } else {
        format!("http://{text}")
    };
    let known = |uri: &http::Uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            && uri.host().is_some_and(|host| !host.is_empty())
    };
    url.parse().ok().filter(known).ok_or_else(|| AccessError::Address {
        place: place.to_owned(),
        address: text.to_owned(),
    })
}

fn kubeconfig_error(path: &Path, error: KubeconfigError) -> AccessError {
    let file = path.display().to_string();
    let place = format!("the kubeconfig {file}");
    let material = |what, reason: String| AccessError::Material {
        place: place.clone(),
        what,
        reason: one_line(&reason),
    };
    match error {
        KubeconfigError::ReadConfig(source, _) => AccessError::Unreadable { file, source },
        KubeconfigError::CurrentContextNotSet => AccessError::NoContext { file },
        KubeconfigError::LoadContext(name) => AccessError::Dangling {
            file,
            what: "context",
            name,
        },
        KubeconfigError::LoadClusterOfContext(name) => AccessError::Dangling {
            file,
            what: "cluster",
            name,
        },
        KubeconfigError::LoadCertificateAuthority(error) => {
            material("certificate-authority", error.to_string())
        }
        KubeconfigError::ParseCertificates(error) => {
            material("certificate-authority", error.to_string())
        }
        KubeconfigError::LoadClientCertificate(error) => {
            material("client-certificate", error.to_string())
        }
        KubeconfigError::LoadClientKey(error) => material("client-key", error.to_string()),
        other => AccessError::NotAKubeconfig {
            file,
            // The text after the arrow quotes the file, and with it the credentials.
            reason: one_line(other.to_string().split("-->").next().unwrap_or_default()),
        },
    }
}

fn client_error(place: &str, error: &kube::Error) -> AccessError {
    let place = place.to_owned();
    let reason = one_line(&error.to_string());
    match error {
        kube::Error::RustlsTls(_) => AccessError::Material {
            place,
            what: "a certificate or key",
            reason,
        },
        _ => AccessError::Credentials { place, reason },
    }
}

#[cfg(test)]
mod tests;
