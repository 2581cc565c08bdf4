//! Failures between kplane and an API server, and the operator's remedy for each.

use std::io;
use std::time::Duration;

use kplane_model::{Reason, one_line};

/// The request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// `list`, `watch`, `create`, ...
    pub verb: &'static str,
    /// The resource in the plural, such as `endpointslices`.
    pub resource: &'static str,
    /// The API group; empty for the core group.
    pub group: &'static str,
}

impl Asked {
    /// Creates a request; an empty group is the core group.
    pub const fn new(verb: &'static str, resource: &'static str, group: &'static str) -> Self {
        Self {
            verb,
            resource,
            group,
        }
    }

    /// Returns whether only NetworkPolicies need the resource.
    fn is_of_policies(self) -> bool {
        let resources = [
            "networkpolicies",
            "clusternetworkpolicies",
            "namespaces",
            "pods",
        ];
        matches!(self.verb, "list" | "watch") && resources.contains(&self.resource)
    }
}

impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        match self.group {
            "" => Ok(()),
            group => write!(f, ".{group}"),
        }
    }
}

/// A failed request. Each kind of failure may be temporary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection: refused, no route, no such host, or no answer.
    Unreachable(String),
    /// TLS: one side does not trust the other's certificate.
    Certificate(String),
    /// kplane's credentials cannot be obtained, for example from a program that the kubeconfig
    /// names.
    Credentials(String),
    /// 401: the server does not accept the credentials, or no longer does.
    Unauthorized,
    /// 403 with the server's explanation.
    Forbidden(String),
    /// 404: the server has no such resource.
    NotServed,
    /// 410: the version from which the request should continue is too old.
    Gone,
    /// Another 4xx: the server does not accept the request.
    Refused {
        /// The HTTP status.
        code: u16,
        /// The server's explanation.
        message: String,
    },
    /// 429: the server asks to try again later.
    Busy {
        /// Pause that the server asks for.
        after: Option<Duration>,
    },
    /// 5xx, or an ERROR event of another kind.
    Server {
        /// The HTTP status.
        code: u16,
        /// The server's explanation.
        message: String,
    },
    /// The answer is invalid.
    Malformed(String),
    /// The connection broke in the middle of an answer.
    Broken(String),
    /// The server sent no byte for this long.
    Silent(Duration),
}

impl Failure {
    /// Classifies an HTTP status. `message` is the server's explanation.
    pub fn of_status(code: u16, message: &str, after: Option<Duration>) -> Self {
        let message = one_line(message);
        match code {
            401 => Self::Unauthorized,
            403 => Self::Forbidden(message),
            404 => Self::NotServed,
            410 => Self::Gone,
            429 => Self::Busy { after },
            400..=499 => Self::Refused { code, message },
            _ => Self::Server { code, message },
        }
    }

    /// Classifies an error of the client.
    pub fn of_client(error: &kube::Error) -> Self {
        if matches!(error, kube::Error::Auth(_)) {
            return Self::Credentials(one_line(&innermost(error)));
        }
        let mut connecting = false;
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(error) = cause {
            if error.downcast_ref::<kube::client::AuthError>().is_some() {
                return Self::Credentials(one_line(&error.to_string()));
            }
            let legacy = error.downcast_ref::<hyper_util::client::legacy::Error>();
            connecting |= legacy.is_some_and(hyper_util::client::legacy::Error::is_connect);
            cause = error.source();
        }
        let text = one_line(&innermost(error));
        if is_about_certificates(&text) {
            Self::Certificate(text)
        } else if connecting {
            Self::Unreachable(text)
        } else {
            Self::Broken(text)
        }
    }

    /// Returns the code of the failure.
    pub fn code(&self) -> Reason {
        match self {
            Self::Unreachable(_) | Self::Certificate(_) | Self::Broken(_) | Self::Silent(_) => {
                Reason::ApiUnreachable
            }
            Self::Credentials(_) | Self::Unauthorized => Reason::ApiUnauthorized,
            Self::Forbidden(_) => Reason::ApiForbidden,
            Self::NotServed
            | Self::Gone
            | Self::Refused { .. }
            | Self::Busy { .. }
            | Self::Server { .. }
            | Self::Malformed(_) => Reason::ApiFailing,
        }
    }

    /// Returns whether the failure concerns the whole connection, not just one resource.
    pub fn is_general(&self) -> bool {
        match self {
            Self::Unreachable(_)
            | Self::Certificate(_)
            | Self::Credentials(_)
            | Self::Unauthorized
            | Self::Broken(_)
            | Self::Silent(_) => true,
            Self::Forbidden(_)
            | Self::NotServed
            | Self::Gone
            | Self::Refused { .. }
            | Self::Busy { .. }
            | Self::Server { .. }
            | Self::Malformed(_) => false,
        }
    }

    /// Returns whether reading the credentials again may help.
    pub fn wants_new_credentials(&self) -> bool {
        matches!(
            self,
            Self::Unauthorized | Self::Certificate(_) | Self::Credentials(_)
        )
    }

    /// Returns a short name for metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "unreachable",
            Self::Certificate(_) => "certificate",
            Self::Credentials(_) => "credentials",
            Self::Unauthorized => "unauthorized",
            Self::Forbidden(_) => "forbidden",
            Self::NotServed => "not_served",
            Self::Gone => "gone",
            Self::Refused { .. } => "refused",
            Self::Busy { .. } => "busy",
            Self::Server { .. } => "server_error",
            Self::Malformed(_) => "malformed",
            Self::Broken(_) => "broken",
            Self::Silent(_) => "silent",
        }
    }

    /// Explains on one line what failed and what to do about it.
    pub fn explain(&self, asked: Asked) -> String {
        match self {
            Self::Unreachable(why) => {
                format!(
                    "cannot be reached ({why}); check that it runs, and that its address is right"
                )
            }
            Self::Certificate(why) => format!(
                "TLS failed ({why}): certificate-authority and client-certificate in the \
                 kubeconfig must belong to this server and be valid"
            ),
            Self::Credentials(why) => {
                format!(
                    "kplane's credentials cannot be obtained ({why}); fix the user in the \
                     kubeconfig"
                )
            }
            Self::Unauthorized => "does not accept kplane's credentials (401), which may have \
                                   expired; renew the token or certificate. kplane reads changed \
                                   files by itself"
                .to_owned(),
            Self::Forbidden(why) => {
                let granted = match asked.resource {
                    "pods" if asked.is_of_policies() => {
                        "the chart does with networkPolicies.enforce=true or controlPlane.watchPods=true"
                    }
                    _ if asked.is_of_policies() => {
                        "the chart does with networkPolicies.enforce=true"
                    }
                    _ => "deploy/kubernetes/rbac.yaml does",
                };
                format!("does not permit kplane to {asked} (403: {why}); grant it, as {granted}")
            }
            Self::NotServed => format!(
                "does not have the resource to {asked} (404); Kubernetes 1.21 or newer is needed"
            ),
            Self::Gone => {
                format!("cannot {asked} from the version that kplane knows (410); listing again")
            }
            Self::Refused { code, message } => format!(
                "refuses to {asked} ({code}: {message}); check that it is a Kubernetes API server \
                 of a supported version"
            ),
            Self::Busy { .. } => format!("is too busy to {asked} (429); trying again"),
            Self::Server { code, message } => {
                format!("fails to {asked} ({code}: {message}); check the log of the API server")
            }
            Self::Malformed(why) => format!(
                "sends an invalid answer to {asked} ({why}); check that it is a Kubernetes API \
                 server"
            ),
            Self::Broken(why) => format!("closes the connection ({why}); trying again"),
            Self::Silent(time) => format!("sent nothing for {} s; trying again", time.as_secs()),
        }
    }
}

impl From<&io::Error> for Failure {
    fn from(error: &io::Error) -> Self {
        Self::Broken(one_line(&error.to_string()))
    }
}

/// Returns the root cause of an error.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

/// Returns whether an error text is about certificates. The client does not expose rustls errors,
/// so only their text identifies them.
fn is_about_certificates(text: &str) -> bool {
    let signs = [
        "certificate",
        "fatal alert",
        "invalid peer",
        "corrupt message",
    ];
    let text = text.to_ascii_lowercase();
    signs.iter().any(|sign| text.contains(sign))
}

#[cfg(test)]
mod tests;
