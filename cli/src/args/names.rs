//! The names of Services and nodes on the command line.

use clap::error::ErrorKind;
use kplane_model::{PodName, PolicyName, ServiceName};

use super::error;

/// Returns the Service with this name, in the namespace of -n if the name has none.
pub(super) fn service_name(
    service: &str,
    namespace: Option<&str>,
) -> Result<ServiceName, clap::Error> {
    named("Service", &["service/", "endpoints/"], service, namespace)
}

/// Returns the NetworkPolicy with this name, in the namespace of -n if the name has none. Without both, the namespace is
/// empty.
pub(super) fn policy_name(
    policy: &str,
    namespace: Option<&str>,
) -> Result<PolicyName, clap::Error> {
    if let Some(name) = policy.strip_prefix("clusterpolicy/") {
        return Ok(PolicyName::new("", name));
    }
    if namespace.is_none() && !policy.is_empty() && !policy.contains('/') {
        return Ok(PolicyName::new("", policy));
    }
    named("NetworkPolicy", &["policy/"], policy, namespace)
}

/// Returns the Pod with this name, in the namespace of -n if the name has none.
pub(super) fn pod_name(pod: &str, namespace: Option<&str>) -> Result<PodName, clap::Error> {
    named("Pod", &["pod/"], pod, namespace)
}

/// Returns the name of an object of a kind, which may stand behind one of the prefixes that -o name prints.
fn named(
    kind: &str,
    prefixes: &[&str],
    text: &str,
    namespace: Option<&str>,
) -> Result<ServiceName, clap::Error> {
    let plain = prefixes.iter().find_map(|prefix| text.strip_prefix(prefix));
    let text = plain.filter(|rest| rest.contains('/')).unwrap_or(text);
    let (in_name, name) = match text.split_once('/') {
        Some((namespace, name)) => (Some(namespace), name),
        None => (None, text),
    };
    let wrong = |why: &str| {
        let text = format!("'{text}' {why}");
        Err(error(ErrorKind::ValueValidation, &text))
    };
    match (in_name, namespace) {
        (Some(""), _) => wrong("has no namespace before the '/'"),
        (Some(a), Some(b)) if a != b => wrong(&format!("is not in the namespace of -n {b}")),
        _ if name.is_empty() || name.contains('/') => {
            wrong(&format!("is not a {kind}: write NAMESPACE/NAME"))
        }
        (a, b) => Ok(ServiceName::new(a.or(b).unwrap_or("default"), name)),
    }
}

/// Returns the name of a node, which may be as `-o name` prints it.
pub(super) fn node_name(text: &str) -> Result<String, String> {
    match text.strip_prefix("node/").unwrap_or(text) {
        "" => Err("a node's name is missing".to_owned()),
        name => Ok(name.to_owned()),
    }
}
