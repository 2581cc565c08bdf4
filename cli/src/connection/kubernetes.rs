//! The control plane of a cluster: found through the API server, and reached by port forwarding as with `kubectl
//! port-forward`.
//!
//! ```text
//! kubeconfig --> login --> list pods, read the authority --> forward a port --> TLS with the control plane
//! ```
//!
//! The API server carries the bytes of that TLS and cannot read them.

mod api;
mod error;
mod forward;
mod kubeconfig;
mod login;
mod objects;
mod pods;

use std::sync::Arc;
use std::time::Duration;

use kplane_tls::{Authorities, ClientConfig, Token, Wire, client_config};
use tokio::time::{Instant, timeout, timeout_at};

use super::{Connection, Peer, ReachError};
use crate::args::{Identity, Place, STATUS_PORT};
use kplane_view::time::human;

pub(crate) use api::Asked;
pub(crate) use error::DiscoveryError;
pub(super) use kubeconfig::Environment;
pub(crate) use objects::ObjectClient;

use api::Problem;
use error::ClusterWords;
use forward::ForwardError;
use kubeconfig::{Selected, Selection};
use login::Login;
use pods::{Pods, SELECTOR};

/// Name of the control plane's Service in a cluster.
const NAME: &str = "kplane-controlplane";

/// ConfigMap with the authority of the control plane's certificate, which the control plane writes.
const AUTHORITY: &str = "kplane-ca";

/// Key of the authority in that ConfigMap.
const AUTHORITY_KEY: &str = "ca.crt";

/// The result of the search for a cluster.
pub(super) enum Found {
    /// The control plane in a cluster.
    Cluster(Box<Kubernetes>),
    /// No cluster, for this reason.
    Nothing(String),
}

/// A cluster, and the user's credentials for it.
pub(super) struct Kubernetes {
    place: Place,
    identity: Identity,
    environment: Environment,
    cluster: ClusterWords,
    /// The content of the kubeconfig, until the first login.
    selected: Option<Selected>,
    /// The login, which serves all connections until it is refused.
    login: Option<Login>,
}

impl std::fmt::Debug for Kubernetes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kubernetes")
            .field("cluster", &self.cluster)
            .finish_non_exhaustive()
    }
}

impl Kubernetes {
    /// Finds the cluster that the kubeconfig names. Asks no server.
    pub(super) fn find(
        place: &Place,
        identity: &Identity,
        environment: &Environment,
    ) -> Result<Found, DiscoveryError> {
        let selected = match kubeconfig::select(place, environment)? {
            Selection::Nothing(reason) => return Ok(Found::Nothing(reason)),
            Selection::Selected(selected) => selected,
        };
        let cluster = ClusterWords::new(place, &selected);
        let mut place = place.clone();
        // A changed current-context must not lead a running watch to another cluster.
        place.context = Some(selected.context.clone());
        Ok(Found::Cluster(Box::new(Self {
            cluster,
            place,
            identity: identity.clone(),
            environment: environment.clone(),
            selected: Some(*selected),
            login: None,
        })))
    }

    /// Returns the API server and the context.
    pub(super) fn describe(&self) -> String {
        self.cluster.to_string()
    }

    /// Forgets the login.
    pub(super) fn forget_credentials(&mut self) {
        self.login = None;
    }

    /// Returns the way to objects of the cluster, with the user's credentials.
    pub(super) async fn into_objects(
        mut self,
        limit: Duration,
    ) -> Result<ObjectClient, DiscoveryError> {
        let client = self.log_in(limit).await?.client;
        Ok(ObjectClient::new(self, client, limit))
    }

    /// Obtains the user's credentials, outside of the limit: a person may have to type a password.
    async fn log_in(&mut self, limit: Duration) -> Result<Login, DiscoveryError> {
        let login = login::login(self.select()?, limit).await;
        login.map_err(DiscoveryError::Login)
    }

    /// Connects to a pod of the control plane. Credentials that the API server no longer accepts are read again,
    /// once.
    pub(super) async fn connect(&mut self, limit: Duration) -> Result<Connection, ReachError> {
        if let Some(login) = &self.login {
            match self.connect_as(login, limit).await {
                Err(ReachError::Kubernetes(error)) if error.is_unauthorized() => {}
                outcome => return outcome,
            }
        }
        let login = self.log_in(limit).await?;
        let outcome = self.connect_as(&login, limit).await;
        self.login = Some(login);
        outcome
    }

    /// Returns the content of the kubeconfig, which is read again after the first time.
    fn select(&mut self) -> Result<Selected, DiscoveryError> {
        match self.selected.take() {
            Some(selected) => Ok(selected),
            None => match kubeconfig::select(&self.place, &self.environment)? {
                Selection::Selected(selected) => Ok(*selected),
                Selection::Nothing(reason) => {
                    Err(kubeconfig::KubeconfigError::NoCluster { reason }.into())
                }
            },
        }
    }

    async fn connect_as(&self, login: &Login, limit: Duration) -> Result<Connection, ReachError> {
        let token = self.token(login)?;
        let deadline = Instant::now() + limit;
        let questions = async { tokio::join!(self.pods(login), self.tls(login)) };
        let Ok((pods, tls)) = timeout_at(deadline, questions).await else {
            return Err(ReachError::Timeout {
                from: self.cluster.api.clone(),
                timeout: limit,
            });
        };
        let (pods, tls) = (pods?, tls?);
        let (wire, pod) = self.first_that_answers(login, pods, tls, deadline).await?;
        let (namespace, api) = (&self.place.kplane_namespace, &self.cluster.api);
        Ok(Connection {
            wire,
            peer: Peer {
                url: format!("https://{}:{STATUS_PORT}", self.host()),
                name: format!("pod {namespace}/{pod} of {api}"),
            },
            token,
        })
    }

    /// Returns the name in the control plane's certificate.
    fn host(&self) -> String {
        format!("{NAME}.{}.svc", self.place.kplane_namespace)
    }

    /// Returns whether to speak plain text with the control plane.
    fn is_plain(&self) -> bool {
        self.identity.insecure && self.identity.certificate_authority.is_none()
    }

    /// Returns the token for the control plane: that of the flags, or else that of the kubeconfig, unless the flags
    /// give another proof or the connection is plain text.
    fn token(&self, login: &Login) -> Result<Option<Token>, ReachError> {
        match (&self.identity.token_file, self.is_plain()) {
            (Some(_), true) => Err(DiscoveryError::PlainToken.into()),
            (Some(file), false) => Ok(Some(Token::read(file)?)),
            (None, true) => Ok(None),
            (None, false) if self.identity.pair().is_some() => Ok(None),
            (None, false) => Ok(login.token.clone()),
        }
    }

    /// Returns the pods to try, the best first.
    async fn pods(&self, login: &Login) -> Result<Vec<String>, DiscoveryError> {
        let namespace = &self.place.kplane_namespace;
        let path =
            format!("/api/v1/namespaces/{namespace}/pods?limit=100&labelSelector={SELECTOR}");
        let pods: Result<Pods, Problem> = api::get(&login.client, &path, Asked::PODS).await;
        pods.map_err(|problem| self.cluster.refused(problem))?
            .candidates()
            .map_err(|none| self.cluster.no_pod(none))
    }

    /// Returns the configuration of TLS with the control plane; `None` for plain text.
    async fn tls(&self, login: &Login) -> Result<Option<Arc<ClientConfig>>, ReachError> {
        if self.is_plain() {
            return Ok(None);
        }
        let authorities = match &self.identity.certificate_authority {
            Some(file) => Authorities::read(file)?,
            None => self.authority(login).await?,
        };
        let identity = match (self.identity.pair(), &self.identity.token_file) {
            (Some(pair), _) => kplane_tls::Identity::Pair(pair),
            (None, Some(_)) => kplane_tls::Identity::Anonymous,
            (None, None) => kplane_tls::Identity::Loaded(Arc::clone(&login.certificate)),
        };
        Ok(Some(client_config(&authorities, &identity)?))
    }

    /// Reads the authority of the control plane's certificate.
    async fn authority(&self, login: &Login) -> Result<Authorities, DiscoveryError> {
        let namespace = &self.place.kplane_namespace;
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/{AUTHORITY}");
        let map: api::ConfigMap = api::get(&login.client, &path, Asked::AUTHORITY).await.map_err(
            |problem| match problem {
                Problem::Missing(_) => self.cluster.no_authority("does not exist"),
                problem => self.cluster.refused(problem),
            },
        )?;
        let Some(text) = map.data.get(AUTHORITY_KEY) else {
            return Err(self.cluster.no_authority("has no key ca.crt"));
        };
        let origin = format!("ConfigMap {namespace}/{AUTHORITY}");
        Ok(Authorities::of_text(text.as_str(), origin))
    }

    /// Connects to the first of these pods that answers. Each gets an equal part of the time that is left.
    async fn first_that_answers(
        &self,
        login: &Login,
        pods: Vec<String>,
        tls: Option<Arc<ClientConfig>>,
        deadline: Instant,
    ) -> Result<(Box<dyn Wire>, String), DiscoveryError> {
        let (namespace, host) = (&self.place.kplane_namespace, self.host());
        let mut failures = Vec::new();
        let mut left = u32::try_from(pods.len()).unwrap_or(u32::MAX);
        for pod in pods {
            let share = deadline.saturating_duration_since(Instant::now()) / left.max(1);
            left = left.saturating_sub(1);
            let wire = forward::open(&login.client, (namespace, &pod), tls.clone(), &host);
            let cause = match timeout(share, wire).await {
                Ok(Ok(wire)) => return Ok((wire, pod)),
                // Every other pod would meet the same.
                Ok(Err(ForwardError::Api(problem))) if problem.is_general() => {
                    return Err(self.cluster.refused(problem));
                }
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no answer within {}", human(share)),
            };
            failures.push(format!("{pod}: {cause}"));
        }
        Err(self.cluster.no_answer(&failures))
    }
}
