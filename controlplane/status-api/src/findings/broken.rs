//! Findings of all objects, and a bounded list of the worst ones.

use std::cmp::Reverse;
use std::collections::HashMap;

use kplane_desired_state::k8s::Kind;
use kplane_model::{Issue, ObjectRef, ServiceName};
use kplane_proto::v1 as pb;

use super::cut;

/// A finding, and the object that it is about.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Broken {
    pub(crate) object: ObjectRef,
    pub(crate) finding: pb::Finding,
    /// Its start, in milliseconds since 1970; 0 = not known.
    pub(crate) since_ms: u64,
}

impl Broken {
    /// Creates a finding about a Service.
    pub(crate) fn of_service(service: &ServiceName, finding: pb::Finding) -> Self {
        let kind = Kind::Service.as_str();
        Self {
            object: ObjectRef::new(kind, &service.namespace, &service.name),
            finding,
            since_ms: 0,
        }
    }

    /// Creates a finding about the nodes that it names.
    pub(crate) fn of_nodes(finding: pb::Finding) -> Self {
        let first = finding.nodes.first().map_or("", String::as_str);
        Self {
            object: ObjectRef::new(Kind::Node.as_str(), "", first),
            finding,
            since_ms: 0,
        }
    }

    /// Creates a finding from a problem of the input, whose text also says what to do.
    pub(crate) fn of_issue(issue: &Issue) -> Self {
        let object = &issue.object;
        let is_node = object.kind == Kind::Node.as_str() && !object.name.is_empty();
        let place = match issue.location.as_str() {
            "" => None,
            location => Some(format!("see {location}")),
        };
        let steps: Vec<_> = place.into_iter().chain(describe(object)).collect();
        let finding = pb::Finding {
            code: issue.code.code().to_owned(),
            severity: pb::Severity::from(issue.severity).into(),
            text: issue.reason.clone(),
            fix: steps.join("; "),
            nodes: is_node.then(|| object.name.clone()).into_iter().collect(),
            nodes_omitted: 0,
        };
        Self {
            object: object.clone(),
            finding,
            since_ms: 0,
        }
    }

    pub(crate) fn since(self, since_ms: u64) -> Self {
        Self { since_ms, ..self }
    }

    /// Returns the object as kubectl takes it, such as `service/shop/web`.
    pub(crate) fn object(&self) -> String {
        let ObjectRef {
            kind,
            namespace,
            name,
        } = &self.object;
        let mut text = kind.to_lowercase();
        for part in [namespace, name].into_iter().filter(|part| !part.is_empty()) {
            text.push('/');
            text.push_str(part);
        }
        text
    }

    /// Returns the number of nodes that the finding is about; 0 = it is not about single nodes.
    fn nodes(&self) -> u64 {
        self.finding.nodes.len() as u64 + self.finding.nodes_omitted
    }

    /// Returns what sorts the worst first: errors, then what concerns most nodes.
    pub(crate) fn urgency(&self) -> impl Ord + use<'_> {
        // A finding that is not about single nodes concerns all of them.
        let extent = match self.nodes() {
            0 => u64::MAX,
            nodes => nodes,
        };
        (
            self.harm(),
            Reverse(extent),
            &self.object,
            &self.finding.code,
        )
    }

    /// Returns the place of the severity: 0 for errors.
    fn harm(&self) -> u8 {
        match self.finding.severity() {
            pb::Severity::Error | pb::Severity::Unspecified => 0,
            pb::Severity::Warning => 1,
            pb::Severity::Info => 2,
        }
    }

    /// Returns the finding for a row of a list, with one node at most.
    pub(crate) fn in_brief(&self) -> pb::Finding {
        let mut finding = self.finding.clone();
        cut(&mut finding.text);
        cut(&mut finding.fix);
        finding.nodes.truncate(1);
        finding.nodes_omitted = self.nodes().saturating_sub(1);
        finding
    }

    /// Returns the finding as the API shows it.
    pub(crate) fn to_wire(&self) -> pb::ObjectFinding {
        pb::ObjectFinding {
            object: self.object(),
            severity: self.finding.severity,
            code: self.finding.code.clone(),
            cause: self.finding.text.clone(),
            fix: self.finding.fix.clone(),
            nodes: self.nodes(),
            since_ms: self.since_ms,
        }
    }
}

/// Returns the command that describes an object, if there is one.
fn describe(object: &ObjectRef) -> Option<String> {
    let kind = match object.kind.as_str() {
        "Service" => "service",
        "NetworkPolicy" | "ClusterNetworkPolicy" => "policy",
        "Node" => "node",
        _ => return None,
    };
    let name = match (object.namespace.as_str(), object.name.as_str()) {
        (_, "") => return None,
        ("", name) => name.to_owned(),
        (namespace, name) => format!("{namespace}/{name}"),
    };
    Some(format!("kpctl describe {kind} {name}"))
}

/// A bounded list of the worst findings of a cluster. If not all fit, namespaces take turns, each with its worst finding first, and
/// none has more than half of the list while others wait. Objects without a namespace, such as nodes, wait for none.
#[derive(Debug)]
pub(crate) struct WorstFirst {
    rows: Vec<Broken>,
    most: usize,
    /// Number of findings that did not fit.
    more: u64,
}

impl WorstFirst {
    /// Creates an empty list for at most `most` findings.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            rows: Vec::new(),
            most,
            more: 0,
        }
    }

    pub(crate) fn add(&mut self, mut row: Broken) {
        cut(&mut row.finding.text);
        cut(&mut row.finding.fix);
        self.rows.push(row);
        // More rows of its namespace never bring one back that has been left out.
        if self.rows.len() >= 2 * self.most {
            self.shrink();
        }
    }

    /// Returns the findings, the worst first, and the number of further ones.
    pub(crate) fn finish(mut self) -> (Vec<Broken>, u64) {
        self.shrink();
        (self.rows, self.more)
    }

    /// Sorts the rows, and leaves out those that do not fit.
    fn shrink(&mut self) {
        self.rows.sort_by(|a, b| a.urgency().cmp(&b.urgency()));
        let surplus = self.rows.len().saturating_sub(self.most);
        if surplus == 0 {
            return;
        }
        let mut turns = HashMap::<&str, usize>::new();
        let mut order: Vec<_> = self
            .rows
            .iter()
            .enumerate()
            .map(|(place, row)| {
                let namespace = &*row.object.namespace;
                let turn = turns.entry(namespace).or_default();
                let is_beyond = *turn >= self.most / 2;
                let waits = if namespace.is_empty() { 0 } else { *turn };
                *turn += 1;
                // Rows are sorted, so the place breaks ties.
                (is_beyond, row.harm(), waits, place)
            })
            .collect();
        order.sort_unstable();
        let mut is_kept = vec![false; self.rows.len()];
        for (.., place) in order.into_iter().take(self.most) {
            is_kept[place] = true;
        }
        let mut is_kept = is_kept.into_iter();
        self.rows.retain(|_| is_kept.next().unwrap_or_default());
        self.more += surplus as u64;
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::{NodeName, Reason, Severity};

    use super::super::Finding;
    use super::*;

    fn broken(namespace: &str, name: &str, severity: Severity) -> Broken {
        let finding = Finding::new(Reason::NoReadyEndpoint, severity, name, "");
        Broken::of_service(&ServiceName::new(namespace, name), finding.to_wire())
    }

    fn on_nodes(severity: Severity, names: &[&str]) -> Broken {
        let finding = Finding::new(Reason::ForwardingOff, severity, "is off", "");
        let names = names.iter().map(|name| NodeName::from(*name));
        Broken::of_nodes(finding.on(names.collect()).to_wire())
    }

    fn list(most: usize, rows: impl IntoIterator<Item = Broken>) -> (Vec<String>, u64) {
        let mut list = WorstFirst::new(most);
        for row in rows {
            list.add(row);
            assert!(list.rows.len() < 2 * most, "it is bounded");
        }
        let (rows, more) = list.finish();
        (rows.iter().map(Broken::object).collect(), more)
    }

    #[test]
    fn errors_come_first_then_what_concerns_most() {
        let (error, warning) = (Severity::Error, Severity::Warning);
        let rows = [
            on_nodes(warning, &["n1", "n2", "n3"]),
            broken("shop", "web", warning),
            on_nodes(error, &["n4"]),
            on_nodes(error, &["n1", "n2"]),
            broken("shop", "b", error),
            broken("shop", "a", error),
        ];
        let wanted = [
            "service/shop/a",
            "service/shop/b",
            "node/n1",
            "node/n4",
            "service/shop/web",
            "node/n1",
        ];
        assert_eq!(
            list(10, rows.clone()),
            (wanted.map(str::to_owned).to_vec(), 0)
        );
        assert_eq!(rows[0].to_wire().nodes, 3);
        assert_eq!(rows[1].to_wire().nodes, 0);
    }

    /// A tenant with 10,000 broken Services hides neither errors nor warnings of others, nor nodes.
    #[test]
    fn a_flood_of_one_namespace_hides_no_other() {
        let flood = (0..10_000).map(|n| broken("evil", &format!("s-{n}"), Severity::Error));
        let others = (0..3).flat_map(|n| {
            [Severity::Error, Severity::Warning]
                .map(|severity| broken(&format!("tenant-{n}"), &severity.to_string(), severity))
        });
        let nodes = (0..20).map(|n| on_nodes(Severity::Warning, &[&format!("n{n}")]));
        let rows: Vec<_> = flood.chain(others).chain(nodes).collect();
        let mut backwards = rows.clone();
        backwards.reverse();
        for rows in [rows, backwards] {
            let (shown, more) = list(100, rows);
            assert_eq!((shown.len(), more), (100, 10_000 + 6 + 20 - 100));
            let count = |of: &str| shown.iter().filter(|object| object.starts_with(of)).count();
            assert_eq!(
                (count("service/tenant-"), count("node/")),
                (6, 20),
                "{shown:?}"
            );
            assert_eq!(count("service/evil/"), 74);
        }
    }

    /// Namespaces take turns: each of many has its worst finding in the list before any has two.
    #[test]
    fn namespaces_take_turns() {
        let rows = (0..40).flat_map(|namespace| {
            (0..=namespace % 7).map(move |n| {
                broken(
                    &format!("ns-{namespace:02}"),
                    &format!("s-{n}"),
                    Severity::Error,
                )
            })
        });
        let (shown, more) = list(60, rows);
        assert_eq!(shown.len() as u64 + more, 155);
        for namespace in 0..40 {
            let first = format!("service/ns-{namespace:02}/s-0");
            assert!(shown.contains(&first), "{first}: {shown:?}");
        }
        assert_eq!(
            shown.iter().filter(|object| object.ends_with("s-1")).count(),
            20
        );
    }

    #[test]
    fn a_problem_of_the_input_says_where_it_is_and_what_shows_more() {
        for (kind, namespace, name, object, fix) in [
            (
                "Service",
                "shop",
                "web",
                "service/shop/web",
                "kpctl describe service shop/web",
            ),
            (
                "NetworkPolicy",
                "shop",
                "deny",
                "networkpolicy/shop/deny",
                "kpctl describe policy shop/deny",
            ),
            (
                "ClusterNetworkPolicy",
                "",
                "deny",
                "clusternetworkpolicy/deny",
                "kpctl describe policy deny",
            ),
            ("Node", "", "n1", "node/n1", "kpctl describe node n1"),
            ("source", "", "", "source", ""),
        ] {
            let reason = "no".repeat(2_000);
            let issue = Issue::error(
                Reason::TooLarge,
                ObjectRef::new(kind, namespace, name),
                reason,
            );
            let row = Broken::of_issue(&issue);
            assert_eq!((&*row.object(), &*row.finding.fix), (object, fix));
            assert_eq!(row.to_wire().nodes, u64::from(kind == "Node"));
            let mut list = WorstFirst::new(1);
            list.add(Broken::of_issue(&issue.at("a.yaml, line 3")));
            let row = list.finish().0[0].to_wire();
            assert!(row.fix.starts_with("see a.yaml, line 3"), "{}", row.fix);
            assert!(row.cause.len() < 1_100, "{}", row.cause.len());
        }
    }
}
