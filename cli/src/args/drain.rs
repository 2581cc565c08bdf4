//! The arguments of `kpctl drain-status`.

use clap::Args;
use clap::error::ErrorKind;
use kplane_model::ServiceName;

use super::error;
use super::names::service_name;

/// The end of the help text.
pub(super) const HELP: &str = "\
Every node's agent counts the flows in its kernel's connection tracking, or in the table of IPVS in mode
ipvs: connections that are not closed on both sides, and UDP packets that the kernel still remembers. A
node that does not answer is never counted as one without flows.

Without a subject: the latest Pods whose preStop hooks waited until no kernel led to them any more
(docs/rolling-updates.md), for how long, and which nodes did not confirm.

Examples:
  kpctl drain-status                                Pods that ended lately
  kpctl drain-status shop/web                       endpoints of the Service that are being shut down
  kpctl drain-status shop/web --all                 all of its endpoints
  kpctl drain-status pod/shop/web-1 --wait --timeout 10m
  kpctl drain-status node/node-1 --all              before the node is switched off
  kpctl drain-status shop/web -o json | jq '.endpoints[] | select(.verdict != \"Safe\")'

Exit codes: 0 no flow is left on any node, 5 flows are left, 6 none is known, and a node did not answer";

/// The question: whose flows.
#[derive(Args, Debug)]
pub(crate) struct DrainArgs {
    /// NAMESPACE/NAME of a Service, pod/NAMESPACE/NAME (needs a kubeconfig, or nodes that enforce NetworkPolicies), or node/NAME; none = Pods that ended lately
    #[arg(value_name = "SUBJECT")]
    subject: Option<String>,
    /// Namespace of the Service, if SUBJECT does not name it
    #[arg(short, long, requires = "subject")]
    namespace: Option<String>,
    /// Count the flows of all endpoints, not only of those that are being shut down
    #[arg(short, long, requires = "subject")]
    all: bool,
    /// Wait until no flow is left, for --timeout at most
    #[arg(short, long, requires = "subject")]
    pub(crate) wait: bool,
}

/// The endpoints that a question means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// A Service's.
    Service(ServiceName),
    /// A Pod's; its addresses are looked up.
    Pod { namespace: String, name: String },
    /// The endpoints on a node.
    Node(String),
}

impl DrainArgs {
    /// Returns the subject, or the error in it; `None` if there is none.
    pub(crate) fn subject(&self) -> Result<Option<Subject>, clap::Error> {
        let subject = self.subject.as_deref();
        subject.map(|text| self.read(text)).transpose()
    }

    fn read(&self, text: &str) -> Result<Subject, clap::Error> {
        let parts: Vec<&str> = text.split('/').collect();
        match parts.as_slice() {
            ["pod", namespace, name] if !namespace.is_empty() && !name.is_empty() => {
                Ok(Subject::Pod {
                    namespace: (*namespace).to_owned(),
                    name: (*name).to_owned(),
                })
            }
            ["node", name] if !name.is_empty() => Ok(Subject::Node((*name).to_owned())),
            ["pod" | "node", ..] => Err(error(
                ErrorKind::ValueValidation,
                "expected NAMESPACE/NAME of a Service, pod/NAMESPACE/NAME or node/NAME",
            )),
            _ => service_name(text, self.namespace.as_deref()).map(Subject::Service),
        }
    }

    /// Returns whether all endpoints count.
    pub(crate) fn all(&self) -> bool {
        self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_are_read_as_people_write_them() {
        let subject = |text: &str| {
            let args = DrainArgs {
                subject: Some(text.to_owned()),
                namespace: None,
                all: false,
                wait: false,
            };
            args.subject().ok().flatten()
        };
        let service = |ns, name| Some(Subject::Service(ServiceName::new(ns, name)));
        assert_eq!(subject("shop/web"), service("shop", "web"));
        assert_eq!(subject("web"), service("default", "web"));
        assert_eq!(subject("node/n1"), Some(Subject::Node("n1".to_owned())));
        let pod = Subject::Pod {
            namespace: "shop".to_owned(),
            name: "web-1".to_owned(),
        };
        assert_eq!(subject("pod/shop/web-1"), Some(pod));
        for wrong in ["", "pod/web", "node/", "pod//web", "a/b/c", "node/a/b"] {
            assert_eq!(subject(wrong), None, "{wrong}");
        }
    }
}
