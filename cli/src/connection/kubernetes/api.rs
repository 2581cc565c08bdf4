//! Requests to the API server, and the meaning of its refusals.

use std::collections::BTreeMap;
use std::fmt;

use http::Request;
use http::request::Builder;
use http_body_util::{BodyExt as _, Limited};
use kplane_model::one_line;
use kube::Client;
use kube::client::{Body, UpgradeConnectionError};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::connection::root_cause;

/// Largest answer in bytes: a page of 500 nodes with all their images takes a third of that.
const MAX_ANSWER_BYTES: usize = 32 << 20;

/// A ConfigMap, as far as it matters here.
#[derive(Debug, Default, Deserialize)]
pub(super) struct ConfigMap {
    #[serde(default)]
    pub(super) data: BTreeMap<String, String>,
}

/// An explanation by the API server.
#[derive(Debug, Default, Deserialize)]
struct Explanation {
    #[serde(default)]
    message: String,
}

/// A request, in the words of the rights that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked(pub(crate) &'static str);

impl Asked {
    pub(super) const PODS: Self = Self("list pods");
    pub(super) const AUTHORITY: Self = Self("get configmaps/kplane-ca");
    pub(super) const FORWARD: Self = Self("get and create pods/portforward");
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// A request that failed. The text continues "the API server NAME".
#[derive(Debug, thiserror::Error)]
pub(super) enum Problem {
    /// No connection.
    #[error("cannot be reached: {0}")]
    Unreachable(String),
    /// One side does not trust the other's certificate.
    #[error(
        "cannot be used: {0}. certificate-authority and client-certificate in the kubeconfig must \
         belong to this server and be valid now"
    )]
    Certificate(String),
    /// 401
    #[error(
        "does not accept your credentials (401), which may have expired: log in again, or renew \
         the token or certificate in the kubeconfig"
    )]
    Unauthorized,
    /// 403
    #[error("does not let you {asked} (403: {message})")]
    Forbidden { asked: Asked, message: String },
    /// 404
    #[error("has nothing to {0} (404)")]
    Missing(Asked),
    /// Any other status.
    #[error("refuses to {asked} ({code}: {message})")]
    Refused {
        asked: Asked,
        code: u16,
        message: String,
    },
    /// The answer is not what the API defines.
    #[error("sent an invalid answer to {asked}: {reason}")]
    Malformed { asked: Asked, reason: String },
}

impl Problem {
    /// Returns whether the problem concerns more than one pod.
    pub(super) fn is_general(&self) -> bool {
        matches!(
            self,
            Self::Unreachable(_)
                | Self::Certificate(_)
                | Self::Unauthorized
                | Self::Forbidden { .. }
        )
    }

    /// Returns whether the same request may succeed a second later.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            // An API server that has just started refuses everything until it has read its rules.
            Self::Unreachable(_) | Self::Forbidden { .. } => true,
            Self::Refused { code, .. } => *code == 429 || *code >= 500,
            _ => false,
        }
    }

    /// Classifies an error of the client.
    pub(super) fn of(error: &kube::Error, asked: Asked) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(status.code, &status.message, asked),
            kube::Error::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(code)) => {
                Self::of_status(code.as_u16(), "it does not change to a WebSocket", asked)
            }
            kube::Error::UpgradeConnection(error) => Self::Malformed {
                asked,
                reason: one_line(&error.to_string()),
            },
            error => {
                let text = one_line(&root_cause(error));
                if is_about_certificates(&text) {
                    Self::Certificate(text)
                } else {
                    Self::Unreachable(text)
                }
            }
        }
    }

    fn of_status(code: u16, message: &str, asked: Asked) -> Self {
        let message = one_line(message);
        match code {
            401 => Self::Unauthorized,
            403 => Self::Forbidden { asked, message },
            404 => Self::Missing(asked),
            code => Self::Refused {
                asked,
                code,
                message,
            },
        }
    }
}

/// Gets an object or a list.
pub(super) async fn get<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    asked: Asked,
) -> Result<T, Problem> {
    send(client, Request::get(path), Vec::new(), asked).await
}

/// Sends any request.
pub(super) async fn send<T: DeserializeOwned>(
    client: &Client,
    request: Builder,
    body: Vec<u8>,
    asked: Asked,
) -> Result<T, Problem> {
    let malformed = |reason: &dyn fmt::Display| Problem::Malformed {
        asked,
        reason: one_line(&reason.to_string()),
    };
    let request = request.body(Body::from(body)).map_err(|error| malformed(&error))?;
    let answer = client.send(request).await.map_err(|error| Problem::of(&error, asked))?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES)
        .collect()
        .await
        .map_err(|error| malformed(&error))?;
    let bytes = body.to_bytes();
    if status.is_success() {
        return serde_json::from_slice(&bytes).map_err(|error| malformed(&error));
    }
    let explanation: Explanation = serde_json::from_slice(&bytes).unwrap_or_default();
    Err(Problem::of_status(
        status.as_u16(),
        &explanation.message,
        asked,
    ))
}

/// Returns whether an error is about certificates. The client does not expose errors of rustls, so only their text
/// identifies them.
fn is_about_certificates(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    ["certificate", "fatal alert", "corrupt message"]
        .iter()
        .any(|sign| text.contains(sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_outlives_an_api_server_that_restarts() {
        let of = |code| Problem::of_status(code, "", Asked::PODS);
        for code in [403, 429, 500, 502, 503, 504] {
            assert!(of(code).is_transient(), "{code}");
        }
        for code in [400, 401, 404, 405] {
            assert!(!of(code).is_transient(), "{code}");
        }
        // Every pod would be refused alike; a single one may be gone.
        assert!(of(401).is_general() && of(403).is_general());
        assert!(!of(404).is_general() && !of(500).is_general());
    }
}
