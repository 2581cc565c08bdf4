//! The reasons why a cluster leads to no control plane, each with the command to type.

use std::fmt;

use kplane_model::one_line;

use super::NAME;
use super::api::Problem;

use super::kubeconfig::{KubeconfigError, Selected};
use super::login::LoginError;
use super::pods::NoPod;
use crate::args::Place;

/// Advice for readers who meant no cluster at all.
const ELSEWHERE: &str = "--server 127.0.0.1 asks a control plane on this machine";

/// Words of rustls about a server that is not trusted.
const UNTRUSTED: &str = "invalid peer certificate";

/// Words of kplane-tls about a server without TLS.
const PLAIN: &str = "speaks plain text";

/// The reason why a cluster leads to no control plane.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiscoveryError {
    /// The kubeconfig cannot be used.
    #[error("{0}; {ELSEWHERE}")]
    Kubeconfig(#[from] KubeconfigError),
    /// The credentials cannot be obtained.
    #[error(transparent)]
    Login(LoginError),
    /// The API server did not do what kpctl asked for.
    #[error(transparent)]
    Api(Box<ApiError>),
    /// The cluster has no control plane that can be used.
    #[error("{text}")]
    Plane {
        text: String,
        /// Whether a control plane that starts changes this.
        transient: bool,
    },
    /// A token would go in plain text.
    #[error(
        "a token is not sent in plain text to another machine, not even with --insecure: leave \
         out one of --token-file and --insecure"
    )]
    PlainToken,
}

/// A request that the API server did not carry out.
#[derive(Debug, thiserror::Error)]
#[error("the API server {server} {problem}. {advice}")]
pub(crate) struct ApiError {
    server: String,
    problem: Problem,
    advice: String,
}

impl DiscoveryError {
    /// Returns whether the API server does not accept the credentials.
    pub(super) fn is_unauthorized(&self) -> bool {
        matches!(self, Self::Api(error) if matches!(error.problem, Problem::Unauthorized))
    }

    /// Explains that no kubeconfig names a cluster.
    pub(in crate::connection) fn no_cluster(reason: String) -> Self {
        KubeconfigError::NoCluster { reason }.into()
    }

    /// Returns whether the object does not exist.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Api(error) if matches!(error.problem, Problem::Missing(_)))
    }

    /// Returns whether another program has changed the object, or created it.
    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self, Self::Api(error) if matches!(error.problem, Problem::Refused { code: 409, .. }))
    }

    /// Returns whether the same attempt may succeed a second later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Api(error) => error.problem.is_transient(),
            Self::Plane { transient, .. } => *transient,
            Self::Kubeconfig(_) | Self::Login(_) | Self::PlainToken => false,
        }
    }
}

/// The cluster in the words of errors.
#[derive(Clone, Debug)]
pub(super) struct ClusterWords {
    /// URL of the API server.
    pub(super) api: String,
    context: String,
    /// Host and port of the proxy, without the password in its URL.
    proxy: Option<String>,
    /// Namespace of the control plane.
    namespace: String,
    /// The start of kubectl's command line for the same cluster.
    kubectl: String,
}

impl fmt::Display for ClusterWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (context {}", self.api, self.context)?;
        if let Some(proxy) = &self.proxy {
            write!(f, ", through the proxy {proxy}")?;
        }
        f.write_str(")")
    }
}

impl ClusterWords {
    pub(super) fn new(place: &Place, selected: &Selected) -> Self {
        let mut kubectl = "kubectl".to_owned();
        if let Some(file) = &place.kubeconfig {
            kubectl += &format!(" --kubeconfig {}", file.display());
        }
        if let Some(context) = &place.context {
            kubectl += &format!(" --context {context}");
        }
        let api = selected.config.cluster_url.to_string();
        let proxy = selected
            .config
            .proxy_url
            .as_ref()
            .and_then(|url| Some((url.host()?, url.port_u16())));
        Self {
            api: api.trim_end_matches('/').to_owned(),
            context: selected.context.clone(),
            proxy: proxy.map(|(host, port)| match port {
                Some(port) => format!("{host}:{port}"),
                None => host.to_owned(),
            }),
            namespace: place.kplane_namespace.clone(),
            kubectl,
        }
    }

    /// Explains a refusal by the API server.
    pub(super) fn refused(&self, problem: Problem) -> DiscoveryError {
        let Self {
            namespace, kubectl, ..
        } = self;
        let advice = match &problem {
            Problem::Forbidden { .. } => format!(
                "An administrator permits it with: kubectl apply -f \
                 deploy/kubernetes/rbac.yaml; kubectl -n {namespace} create rolebinding \
                 kpctl-USER --role=kpctl --user=USER"
            ),
            Problem::Unauthorized => format!("Check with: {kubectl} auth whoami"),
            _ => format!("Check with: {kubectl} get --raw /readyz; {ELSEWHERE}"),
        };
        DiscoveryError::Api(Box::new(ApiError {
            server: self.to_string(),
            problem,
            advice,
        }))
    }

    /// Explains a refusal of a request of an administrator.
    pub(super) fn denied(&self, problem: Problem) -> DiscoveryError {
        let advice = match &problem {
            Problem::Forbidden { .. } => {
                "This command needs the rights of a cluster administrator".to_owned()
            }
            _ => return self.refused(problem),
        };
        DiscoveryError::Api(Box::new(ApiError {
            server: self.to_string(),
            problem,
            advice,
        }))
    }

    /// Explains that there is no pod to try.
    pub(super) fn no_pod(&self, none: NoPod) -> DiscoveryError {
        let Self {
            namespace, kubectl, ..
        } = self;
        let text = match none {
            NoPod::Unknown => format!(
                "no control plane runs in namespace {namespace} of {self}: no pod has the labels \
                 app.kubernetes.io/name=kplane and app.kubernetes.io/component=controlplane. Check with: {kubectl} -n {namespace} get \
                 pods --show-labels; --kplane-namespace names another namespace, and {ELSEWHERE}"
            ),
            NoPod::Stopped(states) => format!(
                "no pod of the control plane runs in namespace {namespace} of {self}: {}. Check \
                 with: {kubectl} -n {namespace} describe pods",
                one_line(&states)
            ),
        };
        DiscoveryError::Plane {
            text,
            transient: true,
        }
    }

    /// Explains that the control plane's certificate cannot be checked. `why` is about the ConfigMap.
    pub(super) fn no_authority(&self, why: &str) -> DiscoveryError {
        let Self {
            namespace, kubectl, ..
        } = self;
        DiscoveryError::Plane {
            text: format!(
                "cannot check the certificate of the control plane of {self}: ConfigMap \
                 {namespace}/kplane-ca {why}. A control plane with TLS publishes its authority \
                 there; check with: {kubectl} -n {namespace} get configmap kplane-ca -o yaml. \
                 --certificate-authority FILE replaces it, and --insecure is for a control plane \
                 without TLS"
            ),
            transient: true,
        }
    }

    /// Explains that no pod could be reached. `failures` has a line for each.
    pub(super) fn no_answer(&self, failures: &[String]) -> DiscoveryError {
        let Self {
            namespace, kubectl, ..
        } = self;
        let failures = failures.join("; ");
        let advice = if failures.contains(UNTRUSTED) {
            format!(
                "The certificate must be of an authority in ConfigMap {namespace}/kplane-ca or in \
                 --certificate-authority, and name {NAME}.{namespace}.svc"
            )
        } else if failures.contains(PLAIN) {
            "--insecure speaks plain text with it, without your credentials".to_owned()
        } else {
            format!("Check with: {kubectl} -n {namespace} get pods")
        };
        DiscoveryError::Plane {
            text: format!(
                "cannot connect to the control plane in namespace {namespace} of {self}: \
                 {failures}. {advice}"
            ),
            transient: true,
        }
    }
}
