//! The arguments of `wait`.

use clap::Args;
use clap::error::ErrorKind;
use kplane_model::ServiceName;

use super::error;
use super::names::service_name;
use kplane_view::goal::{Goal, Threshold};

/// The names of the kind that can be waited for, as kubectl knows them.
const KINDS: [&str; 3] = ["service", "services", "svc"];

/// The end of the help text.
pub(super) const HELP: &str = "\
A node counts when its kernel holds the newest state of the Service and its agent is connected.
Agents read the kernel back a minute or more after a change, so --for=verified takes that long. A
Service that does not exist yet is waited for.

Examples:
  kpctl wait service/shop/web                       in every kernel within 60s
  kpctl wait svc/web -n shop --for=verified --timeout 5m
  kpctl wait svc/shop/web --threshold 99%           some nodes may be away
  kpctl wait svc/shop/web svc/shop/api --for=deleted
  kpctl wait svc/shop/web -o json | jq '.services[].laggards'

Exit codes: 0 the goal is reached, 1 it was not reached in time, or the control plane did not answer";

/// Options of `wait`.
#[derive(Args, Debug)]
pub(crate) struct WaitArgs {
    /// service/NAMESPACE/NAME, or service/NAME in the namespace of -n, else in `default`; one or more
    #[arg(value_name = "SERVICE", required = true)]
    services: Vec<String>,
    /// The namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// The goal: programmed (in the kernel), verified (and read back from it), or deleted (gone from it)
    #[arg(
        long = "for",
        value_enum,
        value_name = "GOAL",
        default_value = "programmed"
    )]
    #[arg(hide_possible_values = true)]
    pub(crate) goal: Goal,
    /// The share of the nodes that must reach the goal
    #[arg(long, value_name = "PERCENT", default_value = "100%")]
    pub(crate) threshold: Threshold,
}

impl WaitArgs {
    /// Returns the Services, or the error in a name. As with kubectl, the kind comes before each name and a slash, or
    /// once before all names.
    pub(crate) fn names(&self) -> Result<Vec<ServiceName>, clap::Error> {
        let namespace = self.namespace.as_deref();
        match self.services.split_first() {
            Some((kind, names)) if KINDS.contains(&kind.as_str()) && !names.is_empty() => {
                names.iter().map(|name| service_name(name, namespace)).collect()
            }
            _ => self.services.iter().map(|text| named(text, namespace)).collect(),
        }
    }
}

/// Returns the Service with the kind before its name.
fn named(text: &str, namespace: Option<&str>) -> Result<ServiceName, clap::Error> {
    match text.split_once('/') {
        Some((kind, name)) if KINDS.contains(&kind) => service_name(name, namespace),
        _ => {
            let text = format!("'{text}' names no Service: write service/NAMESPACE/NAME");
            Err(error(ErrorKind::ValueValidation, &text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_as_kubectl_knows_them() {
        let names = |services: &[&str], namespace: Option<&str>| {
            let args = WaitArgs {
                services: services.iter().map(|&text| text.to_owned()).collect(),
                namespace: namespace.map(str::to_owned),
                goal: Goal::Programmed,
                threshold: Threshold::ALL,
            };
            let names = args.names().ok()?;
            Some(names.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        for (services, namespace, expected) in [
            (&["service/shop/web"][..], None, Some(&["shop/web"][..])),
            (
                &["svc/web", "svc/api"],
                Some("shop"),
                Some(&["shop/web", "shop/api"]),
            ),
            (
                &["svc", "web", "shop/api"],
                None,
                Some(&["default/web", "shop/api"]),
            ),
            (&["services/web"], None, Some(&["default/web"])),
            (&["service/shop/web"], Some("other"), None),
            (&["shop/web"], None, None),
            (&["deployment/web"], None, None),
            (&["service"], None, None),
            (&["service/"], None, None),
            (&["service/a/b/c"], None, None),
        ] {
            let expected = expected.map(|all| all.iter().map(ToString::to_string).collect());
            assert_eq!(names(services, namespace), expected, "{services:?}");
        }
    }
}
