//! Rights of callers, as far as the transport proves who a caller is.
//!
//! A port without TLS proves nothing about anybody; [`crate::app`] opens such a port only on loopback or with
//! `--insecure`. On a port with TLS, every caller needs a certificate of the authority of clients:
//!
//! | certificate | agents' port | status port |
//! |---|---|---|
//! | none | refused | refused |
//! | of node N (`CN=system:node:N`, `O=system:nodes`, as kubelet's) | serves N alone | refused |
//! | any other | refused | may read; may act with `O=kplane:admins` |

use kplane_model::NodeName;
use kplane_tls::Subject;
use tonic::Status;

use crate::doors::Caller;

/// Group (organization of a certificate) whose members may act: approve deletions.
pub const ADMINS: &str = "kplane:admins";

/// Checks that the caller is the agent of a node.
///
/// # Errors
/// `UNAUTHENTICATED` without a certificate, `PERMISSION_DENIED` with that of another node or of a user.
pub fn check_agent(caller: &Caller, node: &NodeName) -> Result<(), Status> {
    let subject = match caller {
        Caller::PlainText => return Ok(()),
        Caller::Anonymous => {
            return Err(Status::unauthenticated(
                "agents need a certificate of their node; give the agent --client-certificate and --client-key",
            ));
        }
        Caller::Certificate(subject) => subject,
    };
    match subject.node() {
        Some(own) if own == &**node => Ok(()),
        Some(own) => Err(Status::permission_denied(format!(
            "the certificate is of node {own:?} and does not allow its owner to speak for node {node:?}; check the \
             agent's --node-name and --client-certificate"
        ))),
        None => Err(Status::permission_denied(format!(
            "the certificate of {:?} names no node: an agent's certificate has the subject \
             CN=system:node:NAME, O=system:nodes",
            subject.name
        ))),
    }
}

/// Checks that the caller may read the state of the fleet.
///
/// # Errors
/// `UNAUTHENTICATED` without a certificate, `PERMISSION_DENIED` with that of a node.
pub fn check_reader(caller: &Caller) -> Result<(), Status> {
    person(caller).map(drop)
}

/// Checks that the caller may act on the fleet.
///
/// # Errors
/// `UNAUTHENTICATED` without a certificate, `PERMISSION_DENIED` with that of a node or of a user who may only
/// read.
pub fn check_actor(caller: &Caller) -> Result<(), Status> {
    match person(caller)? {
        Some(subject) if !subject.groups.iter().any(|group| group == ADMINS) => {
            Err(Status::permission_denied(format!(
                "{:?} may read the state of the fleet and not change it; that needs a certificate with O={ADMINS}",
                subject.name
            )))
        }
        _ => Ok(()),
    }
}

/// Returns the person or tool that calls; `None` on a port in plain text.
fn person(caller: &Caller) -> Result<Option<&Subject>, Status> {
    match caller {
        Caller::PlainText => Ok(None),
        Caller::Anonymous => Err(Status::unauthenticated(
            "the status API needs a certificate; give kpctl --client-certificate and --client-key",
        )),
        Caller::Certificate(subject) if subject.is_of_node() => {
            Err(Status::permission_denied(format!(
                "{:?} is a node, and nodes may not use the status API",
                subject.name
            )))
        }
        Caller::Certificate(subject) => Ok(Some(subject)),
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn caller(name: &str, groups: &[&str]) -> Caller {
        Caller::Certificate(Subject {
            name: name.to_owned(),
            groups: groups.iter().map(ToString::to_string).collect(),
        })
    }

    fn code(result: Result<(), Status>) -> Code {
        result.map_or_else(|status| status.code(), |()| Code::Ok)
    }

    /// Every kind of caller at every door.
    #[test]
    fn each_caller_gets_what_its_certificate_allows() {
        use Code::{Ok, PermissionDenied as Denied, Unauthenticated as Nobody};
        let nodes = &["system:nodes"][..];
        let cases = [
            (Caller::PlainText, [Ok, Ok, Ok]),
            (Caller::Anonymous, [Nobody, Nobody, Nobody]),
            (caller("system:node:n1", nodes), [Ok, Denied, Denied]),
            (caller("system:node:n2", nodes), [Denied, Denied, Denied]),
            (caller("system:node:n1", &[]), [Denied, Denied, Denied]),
            (caller("system:node:n11", nodes), [Denied, Denied, Denied]),
            (caller("n1", nodes), [Denied, Denied, Denied]),
            (caller("alice", &[]), [Denied, Ok, Denied]),
            (
                caller("alice", &["kplane:admins-not"]),
                [Denied, Ok, Denied],
            ),
            (caller("bob", &[ADMINS]), [Denied, Ok, Ok]),
        ];
        let node: NodeName = "n1".into();
        for (caller, wanted) in cases {
            let found = [
                check_agent(&caller, &node),
                check_reader(&caller),
                check_actor(&caller),
            ];
            assert_eq!(found.map(code), wanted, "{caller:?}");
        }
    }
}
