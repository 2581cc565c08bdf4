//! The names of Services and nodes on the command line.

use clap::error::ErrorKind;
use kplane_model::ServiceName;

use super::error;

/// Returns the Service with this name, in the namespace of -n if the name has none.
pub(super) fn service_name(
    service: &str,
    namespace: Option<&str>,
) -> Result<ServiceName, clap::Error> {
    // As -o name prints it.
    let kinds = ["service/", "endpoints/"];
    let plain = kinds.iter().find_map(|kind| service.strip_prefix(kind));
    let service = plain.filter(|rest| rest.contains('/')).unwrap_or(service);
    let (in_name, name) = match service.split_once('/') {
        Some((namespace, name)) => (Some(namespace), name),
        None => (None, service),
    };
    let wrong = |why: &str| {
        let text = format!("'{service}' {why}");
        Err(error(ErrorKind::ValueValidation, &text))
    };
    match (in_name, namespace) {
        (Some(""), _) => wrong("has no namespace before the '/'"),
        (Some(a), Some(b)) if a != b => wrong(&format!("is not in the namespace of -n {b}")),
        _ if name.is_empty() || name.contains('/') => {
            wrong("is not a Service: write NAMESPACE/NAME")
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
