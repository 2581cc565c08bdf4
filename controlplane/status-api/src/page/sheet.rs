//! The sheets that can be asked for.

use std::collections::HashMap;

use kplane_model::ServiceName;

use super::html::query;

/// Longest value in a query, in bytes: a name of an object has 253 at most.
const MAX_VALUE: usize = 253;

/// What a browser asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Sheet {
    /// The overview of the fleet.
    Fleet,
    /// Nodes, by state and part of the name, after one of them.
    Nodes(Filter),
    /// Services of a namespace, by name, after one of them.
    Services(Filter),
    /// One node.
    Node(String),
    /// One Service.
    Service(ServiceName),
    /// The map of who talked to whom, through Services of a namespace, or one.
    Map(Filter),
    /// What changed.
    Changes,
    /// The explanations of reasons.
    Reasons,
}

/// What a list is limited to; empty = no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Filter {
    /// A state of nodes, or a namespace.
    pub(super) of: String,
    /// The name of an object.
    pub(super) name: String,
    /// The token of the page.
    pub(super) after: String,
    /// Only Services with a finding.
    pub(super) bad: bool,
}

impl Filter {
    /// Returns the Service that is named; without a namespace, that of namespace `default`, as kubectl does.
    pub(super) fn service(&self) -> Option<String> {
        let namespace = match self.of.as_str() {
            "" => "default",
            namespace => namespace,
        };
        (!self.name.is_empty()).then(|| format!("{namespace}/{}", self.name))
    }
}

impl Sheet {
    /// Returns the sheet at a path and query; `None` if there is none, or if a value is longer than names are.
    pub(super) fn find(path: &str, text: Option<&str>) -> Option<Self> {
        let text = text.unwrap_or_default().as_bytes();
        let mut values: HashMap<String, String> =
            form_urlencoded::parse(text).into_owned().take(8).collect();
        if values.values().any(|value| value.len() > 3 * MAX_VALUE) {
            return None;
        }
        let mut value = |name: &str| values.remove(name).unwrap_or_default().trim().to_owned();
        Some(match path {
            "" | "fleet" => Self::Fleet,
            "nodes" => Self::Nodes(Filter {
                of: value("state"),
                name: value("name"),
                after: value("after"),
                bad: false,
            }),
            "services" => Self::Services(Filter {
                of: value("namespace"),
                name: value("name"),
                after: value("after"),
                bad: !value("bad").is_empty(),
            }),
            "node" => Self::Node(Some(value("name")).filter(|name| !name.is_empty())?),
            "service" => {
                let name = ServiceName::new(&value("namespace"), &value("name"));
                if name.namespace.is_empty() || name.name.is_empty() {
                    return None;
                }
                Self::Service(name)
            }
            "map" => Self::Map(Filter {
                of: value("namespace"),
                name: value("name"),
                ..Filter::default()
            }),
            "changes" => Self::Changes,
            "reasons" => Self::Reasons,
            _ => return None,
        })
    }

    /// Returns the sheet at an address, as [`Sheet::address`] writes it.
    pub(super) fn at(address: &str) -> Option<Self> {
        match address.split_once('?') {
            Some((path, query)) => Self::find(path, Some(query)),
            None => Self::find(address, None),
        }
    }

    /// Returns path and query.
    pub(super) fn address(&self) -> String {
        let list = |path: &str, of: &str, filter: &Filter| {
            let bad = if filter.bad { "yes" } else { "" };
            let values: Vec<String> = [
                (of, &*filter.of),
                ("name", &filter.name),
                ("after", &filter.after),
                ("bad", bad),
            ]
            .into_iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| format!("{name}={}", query(value)))
            .collect();
            if values.is_empty() {
                path.to_owned()
            } else {
                format!("{path}?{}", values.join("&"))
            }
        };
        match self {
            Self::Fleet => "fleet".to_owned(),
            Self::Nodes(filter) => list("nodes", "state", filter),
            Self::Services(filter) => list("services", "namespace", filter),
            Self::Map(filter) => list("map", "namespace", filter),
            Self::Node(name) => super::terminal::node(name),
            Self::Service(name) => super::terminal::service(&name.namespace, &name.name),
            Self::Changes => "changes".to_owned(),
            Self::Reasons => "reasons".to_owned(),
        }
    }

    /// Returns the sheet in the navigation to which it belongs.
    pub(super) fn current(&self) -> &'static str {
        match self {
            Self::Fleet => "fleet",
            Self::Nodes(_) | Self::Node(_) => "nodes",
            Self::Services(_) | Self::Service(_) => "services",
            Self::Map(_) => "map",
            Self::Changes => "changes",
            Self::Reasons => "reasons",
        }
    }

    pub(super) fn title(&self) -> String {
        match self {
            Self::Fleet => "Fleet".to_owned(),
            Self::Nodes(_) => "Nodes".to_owned(),
            Self::Services(_) => "Services".to_owned(),
            Self::Node(name) => format!("Node {name}"),
            Self::Service(name) => format!("Service {name}"),
            Self::Map(_) => "Map".to_owned(),
            Self::Changes => "Changes".to_owned(),
            Self::Reasons => "Reasons".to_owned(),
        }
    }

    /// Returns whether viewers share the sheet, which follows changes. The map needs a right of its own, and asks
    /// all nodes.
    pub(super) fn is_live(&self) -> bool {
        !matches!(self, Self::Map(_) | Self::Reasons)
    }

    /// Returns the command that shows the same. Names are those that a user asked for, so they are only put into a
    /// command if they cannot mean anything else to a shell.
    pub(super) fn command(&self) -> Option<String> {
        let with = |command: &str, option: &str, value: &str| match value {
            "" => Some(command.to_owned()),
            value if is_plain(value) => Some(format!("{command}{option}{value}")),
            _ => None,
        };
        match self {
            Self::Fleet => Some("kpctl status".to_owned()),
            Self::Nodes(filter) => with("kpctl get nodes", " --state ", &filter.of),
            Self::Services(filter) if filter.of.is_empty() => {
                Some("kpctl get services -A".to_owned())
            }
            Self::Services(filter) => with("kpctl get services", " -n ", &filter.of),
            Self::Node(name) => with("kpctl describe node ", "", name),
            Self::Service(name) => with("kpctl describe service ", "", &name.to_string()),
            Self::Map(filter) => match filter.service() {
                Some(service) => with("kpctl get graph ", "", &service),
                None => with("kpctl get graph", " -n ", &filter.of),
            },
            Self::Changes => Some("kpctl get events".to_owned()),
            Self::Reasons => None,
        }
    }
}

/// Returns whether a text has only characters of Kubernetes' names.
fn is_plain(text: &str) -> bool {
    text.bytes()
        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_leads_to_its_sheet() {
        let filter = Filter {
            of: "a b".to_owned(),
            name: "x&y=<z>".to_owned(),
            after: "n/1".to_owned(),
            bad: false,
        };
        for sheet in [
            Sheet::Fleet,
            Sheet::Nodes(Filter::default()),
            Sheet::Nodes(filter.clone()),
            Sheet::Services(Filter {
                bad: true,
                ..filter.clone()
            }),
            Sheet::Map(Filter {
                after: String::new(),
                ..filter
            }),
            Sheet::Node("n 1?".to_owned()),
            Sheet::Service(ServiceName::new("shop", "web&")),
            Sheet::Changes,
            Sheet::Reasons,
        ] {
            assert_eq!(Sheet::at(&sheet.address()), Some(sheet));
        }
    }

    #[test]
    fn there_is_no_other_sheet() {
        assert_eq!(Sheet::find("", None), Some(Sheet::Fleet));
        let long = format!("name={}", "x".repeat(1000));
        for (path, query) in [
            ("other", None),
            ("node", None),
            ("service", Some("name=web")),
            ("nodes", Some(&*long)),
        ] {
            assert_eq!(Sheet::find(path, query), None, "{path}");
        }
    }

    #[test]
    fn a_command_is_never_made_of_hostile_names() {
        let hostile = Sheet::Node("n1; rm -rf ~".to_owned());
        assert_eq!(hostile.command(), None);
        let good = Sheet::Service(ServiceName::new("shop", "web"));
        assert_eq!(good.command().unwrap(), "kpctl describe service shop/web");
    }
}
