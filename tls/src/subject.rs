//! The subject of a certificate: the name of a peer, and its groups.

use std::time::{Duration, SystemTime};

use x509_parser::prelude::{ASN1Time, FromDer as _, X509Certificate};

/// Prefix of the common name in a kubelet's certificate (Kubernetes, Node authorizer).
const NODE: &str = "system:node:";
/// Organization in a kubelet's certificate.
const NODES: &str = "system:nodes";

/// The subject of a certificate that was verified during a handshake.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// The common name (CN): a user name, in Kubernetes' terms.
    pub name: String,
    /// The organizations (O): groups, in Kubernetes' terms.
    pub groups: Vec<String>,
}

/// Returns the time at which a certificate in DER ends. `None` if it cannot be parsed.
pub fn ends_at(certificate: &[u8]) -> Option<SystemTime> {
    let Validity { until, .. } = Validity::of(certificate)?;
    SystemTime::UNIX_EPOCH.checked_add(until)
}

/// The time in which a certificate is valid, since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Validity {
    pub(crate) from: Duration,
    pub(crate) until: Duration,
}

impl Validity {
    /// Reads it from a certificate in DER. `None` if the certificate cannot be parsed.
    pub(crate) fn of(certificate: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let since_1970 =
            |time: ASN1Time| Some(Duration::from_secs(u64::try_from(time.timestamp()).ok()?));
        let validity = certificate.validity();
        Some(Self {
            from: since_1970(validity.not_before)?,
            until: since_1970(validity.not_after)?,
        })
    }
}

impl Subject {
    /// Reads the subject of a certificate in DER. `None` if the certificate cannot be parsed or has no single
    /// common name.
    pub fn of(certificate: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let subject = certificate.subject();
        let mut names = subject.iter_common_name();
        let (name, more) = (names.next()?, names.next());
        if more.is_some() {
            return None;
        }
        let groups: Option<Vec<String>> = subject
            .iter_organization()
            .map(|group| group.as_str().ok().map(str::to_owned))
            .collect();
        Some(Self {
            name: name.as_str().ok()?.to_owned(),
            groups: groups?,
        })
    }

    /// Returns the subject of a node, in the form of kubelet's certificates: `CN=system:node:NAME`,
    /// `O=system:nodes`.
    pub fn of_node(name: &str) -> Self {
        Self {
            name: format!("{NODE}{name}"),
            groups: vec![NODES.to_owned()],
        }
    }

    /// Returns whether the name or a group is that of a node, even if the other is not.
    pub fn is_of_node(&self) -> bool {
        self.name.starts_with(NODE) || self.groups.iter().any(|group| group == NODES)
    }

    /// Returns the node that the certificate names, in the form of [`Subject::of_node`].
    pub fn node(&self) -> Option<&str> {
        let node = self.name.strip_prefix(NODE).filter(|node| !node.is_empty());
        if self.groups.iter().any(|group| group == NODES) { node } else { None }
    }
}
