//! The arguments of `wait`.

use std::str::FromStr;

use clap::error::ErrorKind;
use clap::{Args, ValueEnum};
use kplane_model::ServiceName;

use super::{error, service_name};

/// The names of the kind that can be waited for, as kubectl knows them.
const KINDS: [&str; 3] = ["service", "services", "svc"];

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

/// The state to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Goal {
    /// The kernel holds the newest state.
    Programmed,
    /// The agent has read the newest state back from the kernel.
    Verified,
    /// The Service is deleted, and the kernel has nothing of it.
    Deleted,
}

/// A share of the nodes, in thousandths of a percent; more than none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Threshold(u32);

impl Threshold {
    const ALL: u32 = 100_000;

    /// Returns the number of nodes that are enough.
    pub(crate) fn of(self, nodes: u64) -> u64 {
        let needed = u128::from(nodes) * u128::from(self.0);
        let needed = needed.div_ceil(u128::from(Self::ALL));
        u64::try_from(needed).unwrap_or(u64::MAX)
    }

    /// Returns the share in percent.
    pub(crate) fn percent(self) -> f64 {
        f64::from(self.0) / 1_000.0
    }
}

impl FromStr for Threshold {
    type Err = String;

    /// Parses a share such as `99%` or `99.5`.
    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').unwrap_or(text);
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        let digits = format!("{whole}{part:0<3}");
        let are_digits = part.len() <= 3 && digits.bytes().all(|b| b.is_ascii_digit());
        let share = digits.parse().ok().filter(|_| are_digits);
        let share = share.filter(|share| (1..=Self::ALL).contains(share));
        let share = share.ok_or("expected a share such as 99% or 99.5%, 100% at most")?;
        Ok(Self(share))
    }
}

impl WaitArgs {
    /// Returns the Services, or the error in a name. As with kubectl, the kind comes before each name and a slash, or
    /// once before all names.
    pub(crate) fn names(&self) -> Result<Vec<ServiceName>, clap::Error> {
        let namespace = self.namespace.as_deref();
        match self.services.split_first() {
            Some((kind, names)) if KINDS.contains(&kind.as_str()) && !names.is_empty() => {
                let names = names.iter();
                names.map(|name| service_name(name, namespace)).collect()
            }
            _ => {
                let all = self.services.iter();
                all.map(|text| named(text, namespace)).collect()
            }
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
                threshold: Threshold(Threshold::ALL),
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

    #[test]
    fn thresholds() {
        for (text, of_5_000) in [
            ("100%", Some(5_000)),
            ("99%", Some(4_950)),
            ("99.9", Some(4_995)),
            ("99.99%", Some(5_000)),
            ("0.001%", Some(1)),
            ("0", None),
            ("99.9999%", None),
            ("-1%", None),
            ("", None),
            ("101%", None),
            ("NaN", None),
            ("most", None),
        ] {
            let threshold = text.parse::<Threshold>().ok();
            assert_eq!(threshold.map(|t| t.of(5_000)), of_5_000, "{text}");
        }
        assert_eq!("99%".parse::<Threshold>().unwrap().of(0), 0);
        assert_eq!("99%".parse::<Threshold>().unwrap().of(3), 3);
    }
}
