//! The reasons why there is no connection to a control plane.

use std::time::Duration;

use kplane_tls::FileError;

use super::kubernetes;
use kplane_view::time::human;

/// The reason why there is no connection to a control plane.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReachError {
    /// A certificate, key or token cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The kubeconfig, the API server or the cluster leads to no control plane.
    #[error(transparent)]
    Kubernetes(#[from] kubernetes::DiscoveryError),
    /// An address without an answer.
    #[error("cannot connect to {to}: {cause}. {advice}")]
    Connect {
        to: String,
        cause: String,
        advice: String,
    },
    /// No answer came in time.
    #[error("no answer from {from} within {}. Wait longer with --timeout", human(*timeout))]
    Timeout { from: String, timeout: Duration },
}

impl ReachError {
    /// Returns whether the API server does not have the object.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Kubernetes(error) if error.is_missing())
    }

    /// Returns whether another program has changed the object, or created it.
    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self, Self::Kubernetes(error) if error.is_conflict())
    }

    /// Returns whether the same attempt may succeed a second later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Timeout { .. } => true,
            Self::Kubernetes(error) => error.is_transient(),
            Self::File(_) => false,
        }
    }
}

/// Returns the innermost reason, such as `connection refused`.
pub(crate) fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let text = innermost.to_string();
    // In "Connection refused (os error 111)" the number adds nothing.
    match text.split_once(" (os error") {
        Some((text, _)) => text.to_lowercase(),
        None => text,
    }
}

/// Words of rustls about a refusal by the other side.
const ALERT: &str = "received fatal alert";

/// Words of the crate h2 about bytes that are not HTTP/2, such as a record of TLS.
const NO_HTTP: &str = "frame with invalid size";

/// Returns the reason why the control plane at `server` and kpctl have no connection.
pub(crate) fn cause_at(server: &str, error: &(dyn std::error::Error + 'static)) -> String {
    let text = root_cause(error);
    // kpctl asks for nothing unusual, so only the caller's certificate can be the reason.
    if text.contains(ALERT) {
        return format!(
            "{text}: the control plane does not accept your certificate. It must be valid now, and \
             of an authority in the control plane's --client-ca-file"
        );
    }
    // A server of TLS answers plain text with a record of its own, or not at all.
    if let Some(address) = server.strip_prefix("http://")
        && [NO_HTTP, "broken pipe", "reset"].iter().any(|of| text.contains(of))
    {
        return format!(
            "{text}: if it speaks TLS: --server https://{address} --certificate-authority FILE"
        );
    }
    if text.contains(NO_HTTP) {
        return format!(
            "{text}: if the control plane speaks TLS, leave out --insecure, and use https:// with \
             --certificate-authority for an address"
        );
    }
    text
}

/// Returns the reason why a control plane and kpctl have no connection.
pub(crate) fn plane_cause(error: &(dyn std::error::Error + 'static)) -> String {
    cause_at("", error)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn plain_text_at_a_port_of_tls_is_explained() {
        let lost = |server| cause_at(server, &io::Error::from_raw_os_error(32));
        assert_eq!(
            lost("http://10.0.0.5:7466"),
            "broken pipe: if it speaks TLS: --server https://10.0.0.5:7466 --certificate-authority FILE"
        );
        assert_eq!(lost("https://10.0.0.5:7466"), "broken pipe");
    }
}
