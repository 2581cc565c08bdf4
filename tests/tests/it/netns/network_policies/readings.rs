//! Wrong readings of the API: each fails a case of the truth table. A judge of its own, which reads policies as they are
//! written, gets every line right, and with any one mistake gets some wrong.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Cidr, Family, Protocol};
use kplane_tests::support::node_ip;
use serde_json::{Map, Value};

use super::{
    ADMIN, Case, NETWORK_POLICIES, PODS, Question, WEB, cases, namespace_and_spec, pod_ips,
};

macro_rules! readings {
    ($($reading:ident: $what:literal,)*) => {
        /// A mistake in reading the API.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Reading { $(#[doc = $what] $reading,)* }

        const READINGS: &[(Reading, &str)] = &[$((Reading::$reading, $what),)*];
    };
}

readings! {
    NoEgress: "NP1: the source's policies do not count",
    NoIngress: "NP1: the destination's policies do not count",
    OneEndIsEnough: "NP1: one end's permission is enough",
    BothDirections: "NP1: a policy isolates for both directions",
    WholeNamespace: "NP1: a policy isolates Pods that it does not select",
    OtherNamespaces: "NP1: a policy selects Pods of other namespaces",
    FirstPolicy: "NP2: the first policy decides",
    LastPolicy: "NP2: the last policy decides",
    AllPolicies: "NP2: all policies must allow",
    MixedRules: "NP2: a peer of one rule and a port of another are enough",
    PeerOrPort: "NP2: a peer or a port is enough",
    TypesAreIngress: "NP3: without policyTypes a policy is about ingress only",
    TypesAreBoth: "NP3: without policyTypes a policy is about both directions",
    TypesAreRules: "NP3: a policy is about the directions of which it has a list of rules",
    NoRulesAllow: "NP4: a policy without rules allows everything",
    EmptyRuleDenies: "NP4: an empty rule allows nothing",
    EmptyPeersDeny: "NP4: an empty list of peers is nobody",
    EmptyPortsDeny: "NP4: an empty list of ports is none",
    NobodyIsAnybody: "NP4: peers that match nobody do not restrict",
    EmptySelectsNone: "NP5: an empty podSelector selects no Pod",
    NotInNeedsKey: "NP5: NotIn needs the label",
    DoesNotExistHolds: "NP5: DoesNotExist always holds",
    DoesNotExistFails: "NP5: DoesNotExist never holds",
    ExistsHolds: "NP5: Exists always holds",
    InIsFirst: "NP5: In means its first value",
    NoExpressions: "NP5: matchExpressions do not count",
    LabelsOrExpressions: "NP5: labels or expressions are enough",
    PodsAnywhere: "NP6: a podSelector alone means all namespaces",
    OwnNamespaceToo: "NP6: a namespaceSelector means the policy's own namespace, too",
    NamespaceOrPods: "NP6: one of both selectors of a peer is enough",
    AllPeers: "NP6: all peers must match",
    AllIsWorld: "NP6: an empty namespaceSelector is the world",
    AllIsOwn: "NP6: an empty namespaceSelector is the policy's own namespace",
    NoNameLabel: "NP6: a namespace has no label with its name",
    NoExcept: "NP7: except does not count",
    ExceptIsFinal: "NP7: what one peer excepts no other allows",
    NoPodsInBlocks: "NP7: a block means no Pods",
    OnlyPodsInBlocks: "NP7: a block means Pods only",
    BlocksOfBothFamilies: "NP7: a block means everybody of the other family",
    EmptyProtocolIsAny: "NP8: a port without a protocol is of any",
    ProtocolIsIgnored: "NP8: the protocol does not count",
    NoPortIsNone: "NP8: a protocol without a port is no port",
    NoPortIsAnyProtocol: "NP8: a protocol without a port is all of all protocols",
    SctpIsolatesNot: "NP8: a rule for SCTP does not isolate",
    SctpIsTcp: "NP8: SCTP is TCP",
    NameOfSelected: "NP9: for egress a name is the selected Pod's port",
    NameOfClient: "NP9: for ingress a name is the client's port",
    NameOfAnyProtocol: "NP9: a name is of any protocol",
    UnknownNameIsAll: "NP9: a name that the Pod does not have is all ports",
    NameIsOneNumber: "NP9: a name is the same number at all Pods",
    EndIsExclusive: "NP10: endPort is exclusive",
    NoEnd: "NP10: endPort does not count",
    BeginsAtZero: "NP10: a range begins at 0",
    OwnNodeIsJudged: "NP11: the own node is an ordinary address",
    NodesAreAllowed: "NP11: all nodes are allowed",
    ServiceAddressCounts: "NP14: egress sees the Service's address",
    NodePortKeepsClient: "NP14: by node port ingress always sees the client",
    NodePortHidesClient: "NP14: by node port ingress never sees the client",
    ClusterIpHidesClient: "NP14: behind a ClusterIP ingress sees the client's node",
    SelfIsJudged: "NP15: a Pod's connections to itself are judged",
}

/// An end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) ip: IpAddr,
    /// Its index among the Pods.
    pod: Option<usize>,
    node: Option<u8>,
}

impl End {
    pub(super) fn named(name: &str, family: Family) -> Self {
        if let Some(pod) = PODS.iter().position(|(pod, ..)| *pod == name) {
            let (_, node, number, ..) = PODS[pod];
            let ip = pod_ips(node, number)[family as usize];
            let (pod, node) = (Some(pod), None);
            return Self { ip, pod, node };
        }
        let outside = match family {
            Family::V4 => [172, 30, 0, 3].into(),
            Family::V6 => IpAddr::V6(0xfd30_u128.rotate_right(16).into()),
        };
        let node = name.strip_prefix("node").and_then(|of| of.parse().ok());
        let ip = node.map_or(outside, |node| node_ip(node, family));
        let pod = None;
        Self { ip, pod, node }
    }

    /// The node on which a Pod runs.
    fn home(self) -> Option<u8> {
        self.pod.map(|pod| PODS[pod].1)
    }

    fn namespace(self) -> Option<&'static str> {
        self.pod.map(|pod| PODS[pod].3)
    }
}

type Labels = BTreeMap<String, String>;

fn labels(text: &str) -> Labels {
    text.split(", ")
        .filter_map(|label| label.split_once(": "))
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .collect()
}

fn list<'a>(of: &'a Value, key: &str) -> &'a [Value] {
    of[key].as_array().map_or(&[], Vec::as_slice)
}

/// A connection as policies see it: its ends, protocol and port, and the address that the client has named.
struct Seen {
    from: End,
    /// The client as ingress sees it.
    client: End,
    to: End,
    named: IpAddr,
    protocol: &'static str,
    port: u16,
}

/// A judge, who may make a mistake.
struct Judge<'a> {
    wrong: Option<Reading>,
    policies: Vec<(&'a str, Value)>,
}

impl Judge<'_> {
    fn errs(&self, reading: Reading) -> bool {
        self.wrong == Some(reading)
    }

    /// Returns what policies see of a question.
    fn see(&self, question: &Question) -> Result<Seen> {
        let (_, to) = question.line.split_once('>').context("no end")?;
        let to = to.split([':', '/', ' ']).next().unwrap_or_default();
        let family = Family::of(question.to.ip());
        let from = End::named(&question.from, family);
        let (behind, port) = match to {
            "svc1" | "port1" => ("a", WEB),
            "svc2" | "port2" => ("c", WEB),
            _ => (to, question.to.port()),
        };
        let to_end = End::named(behind, family);
        let asked = End::named("node1", family);
        let client = if to.starts_with("port") {
            // A node port of node-1.
            if self.errs(Reading::NodePortHidesClient) {
                End::named("node2", family)
            } else if to_end.home() == Some(1) || self.errs(Reading::NodePortKeepsClient) {
                from
            } else {
                asked
            }
        } else if to.starts_with("svc") && self.errs(Reading::ClusterIpHidesClient) {
            from.home().map_or(from, |node| End::named(&format!("node{node}"), family))
        } else {
            from
        };
        Ok(Seen {
            from,
            client,
            to: to_end,
            named: question.to.ip(),
            protocol: match question.protocol {
                Protocol::Tcp => "TCP",
                Protocol::Udp => "UDP",
                Protocol::Sctp => "SCTP",
            },
            port,
        })
    }

    fn allows(&self, seen: &Seen) -> bool {
        let is_self = seen.from.pod.is_some() && seen.from.pod == seen.to.pod;
        if is_self && !self.errs(Reading::SelfIsJudged) {
            return true;
        }
        let egress = self.errs(Reading::NoEgress) || self.side(seen, "egress");
        let ingress = self.errs(Reading::NoIngress) || self.side(seen, "ingress");
        match self.wrong {
            Some(Reading::OneEndIsEnough) => egress || ingress,
            _ => egress && ingress,
        }
    }

    fn side(&self, seen: &Seen, direction: &str) -> bool {
        let (subject, mut other) = match direction {
            "egress" => (seen.from, seen.to),
            _ => (seen.to, seen.client),
        };
        let Some(namespace) = subject.namespace() else {
            return true;
        };
        if let Some(node) = other.node {
            let is_own = subject.home() == Some(node) && !self.errs(Reading::OwnNodeIsJudged);
            if is_own || self.errs(Reading::NodesAreAllowed) {
                return true;
            }
        }
        if direction == "egress"
            && self.errs(Reading::ServiceAddressCounts)
            && seen.named != other.ip
        {
            (other.ip, other.pod) = (seen.named, None);
        }
        let pod_labels = labels(PODS[subject.pod.unwrap_or_default()].4);
        let selects = |(of, spec): &&(&str, Value)| {
            let is_there = *of == namespace || self.errs(Reading::OtherNamespaces);
            let selector = &spec["podSelector"];
            let is_empty = selector.as_object().is_none_or(Map::is_empty);
            let is_none = is_empty && self.errs(Reading::EmptySelectsNone);
            let is_one = self.matches(selector, &pod_labels) || self.errs(Reading::WholeNamespace);
            is_there && is_one && !is_none && self.is_about(spec, direction)
        };
        let policies: Vec<_> = self.policies.iter().filter(selects).collect();
        let mut verdicts = policies
            .iter()
            .map(|(of, spec)| self.policy(of, spec, direction, (subject, other), seen));
        match self.wrong {
            _ if policies.is_empty() => true,
            Some(Reading::FirstPolicy) => verdicts.next() == Some(true),
            Some(Reading::LastPolicy) => verdicts.next_back() == Some(true),
            Some(Reading::AllPolicies) => verdicts.all(|allows| allows),
            _ => verdicts.any(|allows| allows),
        }
    }

    fn is_about(&self, spec: &Value, direction: &str) -> bool {
        let types = list(spec, "policyTypes");
        let has_rules = !list(spec, "egress").is_empty();
        let is_sctp =
            |rule: &Value| list(rule, "ports").iter().any(|port| port["protocol"] == "SCTP");
        match self.wrong {
            Some(Reading::BothDirections) => return true,
            Some(Reading::TypesAreRules) => return spec.get(direction).is_some(),
            Some(Reading::SctpIsolatesNot) if list(spec, direction).iter().any(is_sctp) => {
                return false;
            }
            _ => {}
        }
        let capital = if direction == "egress" { "Egress" } else { "Ingress" };
        match (types.is_empty(), direction) {
            (false, _) => types.iter().any(|of| of == capital),
            (true, "ingress") => true,
            (true, _) if self.errs(Reading::TypesAreIngress) => false,
            (true, _) => has_rules || self.errs(Reading::TypesAreBoth),
        }
    }

    fn policy(
        &self,
        of: &str,
        spec: &Value,
        direction: &str,
        ends: (End, End),
        seen: &Seen,
    ) -> bool {
        let rules = list(spec, direction);
        if rules.is_empty() {
            return self.errs(Reading::NoRulesAllow);
        }
        let key = if direction == "egress" { "to" } else { "from" };
        let peers = |rule: &Value| self.peers(rule, key, of, ends.1);
        let ports = |rule: &Value| self.ports(rule, direction, ends, seen);
        match self.wrong {
            Some(Reading::MixedRules) => rules.iter().any(peers) && rules.iter().any(ports),
            Some(Reading::PeerOrPort) => rules.iter().any(|rule| peers(rule) || ports(rule)),
            _ => rules.iter().any(|rule| {
                let is_empty = rule.as_object().is_some_and(Map::is_empty);
                let denies = is_empty && self.errs(Reading::EmptyRuleDenies);
                peers(rule) && ports(rule) && !denies
            }),
        }
    }

    fn peers(&self, rule: &Value, key: &str, own: &str, other: End) -> bool {
        let peers = list(rule, key);
        if peers.is_empty() {
            return rule.get(key).is_none() || !self.errs(Reading::EmptyPeersDeny);
        }
        let excepts = |peer: &Value| {
            let except = list(&peer["ipBlock"], "except");
            except.iter().any(|range| contains(range, other.ip))
        };
        match self.wrong {
            Some(Reading::AllPeers) => peers.iter().all(|peer| self.peer(peer, own, other)),
            Some(Reading::ExceptIsFinal) if peers.iter().any(excepts) => false,
            Some(Reading::NobodyIsAnybody)
                if !peers.iter().any(|peer| self.is_somebody(peer, own)) =>
            {
                true
            }
            _ => peers.iter().any(|peer| self.peer(peer, own, other)),
        }
    }

    fn is_somebody(&self, peer: &Value, own: &str) -> bool {
        let mut pods = PODS.iter().map(|(pod, ..)| End::named(pod, Family::V4));
        peer.get("ipBlock").is_some() || pods.any(|pod| self.peer(peer, own, pod))
    }

    fn peer(&self, peer: &Value, own: &str, other: End) -> bool {
        if let Some(block) = peer.get("ipBlock") {
            let is_pod = other.pod.is_some();
            return match self.wrong {
                Some(Reading::NoPodsInBlocks) if is_pod => false,
                Some(Reading::OnlyPodsInBlocks) if !is_pod => false,
                Some(Reading::BlocksOfBothFamilies)
                    if family(&block["cidr"]) != Some(Family::of(other.ip)) =>
                {
                    true
                }
                _ => {
                    let mut except = list(block, "except").iter();
                    let is_excepted = except.any(|range| contains(range, other.ip));
                    contains(&block["cidr"], other.ip)
                        && (!is_excepted || self.errs(Reading::NoExcept))
                }
            };
        }
        let namespaces = peer.get("namespaceSelector");
        let is_all = namespaces.is_some_and(|of| of.as_object().is_none_or(Map::is_empty));
        if is_all && peer.get("podSelector").is_none() && self.errs(Reading::AllIsWorld) {
            return true;
        }
        let Some(pod) = other.pod else { return false };
        let (_, _, _, namespace, pod_labels) = PODS[pod];
        let is_there = match namespaces {
            None => namespace == own || self.errs(Reading::PodsAnywhere),
            Some(_) if is_all && self.errs(Reading::AllIsOwn) => namespace == own,
            Some(selector) => {
                let its_own = namespace == own && self.errs(Reading::OwnNamespaceToo);
                self.matches(selector, &self.namespace(namespace)) || its_own
            }
        };
        let pods = peer.get("podSelector");
        let is_it = pods.is_none_or(|pods| self.matches(pods, &labels(pod_labels)));
        match (namespaces, pods) {
            (Some(_), Some(_)) if self.errs(Reading::NamespaceOrPods) => is_there || is_it,
            _ => is_there && is_it,
        }
    }

    fn namespace(&self, name: &str) -> Labels {
        let mut of = labels(match name {
            "x" => "team: red",
            "y" => "team: blue",
            _ => "",
        });
        if !self.errs(Reading::NoNameLabel) {
            of.insert("kubernetes.io/metadata.name".to_owned(), name.to_owned());
        }
        of
    }

    fn matches(&self, selector: &Value, labels: &Labels) -> bool {
        let mut wanted = selector["matchLabels"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(key, value)| labels.get(key).map(String::as_str) == value.as_str());
        let expressions = list(selector, "matchExpressions");
        let has_labels = selector.get("matchLabels").is_some();
        let by_labels = wanted.all(|holds| holds);
        let by_expressions = expressions.iter().all(|of| self.requirement(of, labels));
        match self.wrong {
            Some(Reading::NoExpressions) => by_labels,
            Some(Reading::LabelsOrExpressions) if has_labels && !expressions.is_empty() => {
                by_labels || by_expressions
            }
            _ => by_labels && by_expressions,
        }
    }

    fn requirement(&self, of: &Value, labels: &Labels) -> bool {
        let value = of["key"].as_str().and_then(|key| labels.get(key));
        let values = list(of, "values");
        let is_in = |value: &String| {
            if self.errs(Reading::InIsFirst) {
                values.first().is_some_and(|of| of == value.as_str())
            } else {
                values.iter().any(|of| of == value.as_str())
            }
        };
        match of["operator"].as_str() {
            Some("In") => value.is_some_and(is_in),
            Some("NotIn") => match value {
                Some(value) => !values.iter().any(|of| of == value.as_str()),
                None => !self.errs(Reading::NotInNeedsKey),
            },
            Some("Exists") => value.is_some() || self.errs(Reading::ExistsHolds),
            _ => match self.wrong {
                Some(Reading::DoesNotExistHolds) => true,
                Some(Reading::DoesNotExistFails) => false,
                _ => value.is_none(),
            },
        }
    }

    fn ports(&self, rule: &Value, direction: &str, ends: (End, End), seen: &Seen) -> bool {
        let ports = list(rule, "ports");
        if ports.is_empty() {
            return rule.get("ports").is_none() || !self.errs(Reading::EmptyPortsDeny);
        }
        ports.iter().any(|port| self.port(port, direction, ends, seen))
    }

    fn port(&self, of: &Value, direction: &str, (subject, other): (End, End), seen: &Seen) -> bool {
        let protocol = match of["protocol"].as_str() {
            None if self.errs(Reading::EmptyProtocolIsAny) => seen.protocol,
            Some("SCTP") if self.errs(Reading::SctpIsTcp) => "TCP",
            named => named.unwrap_or("TCP"),
        };
        let is_protocol = protocol == seen.protocol || self.errs(Reading::ProtocolIsIgnored);
        let number = of["port"].as_u64().and_then(|port| u16::try_from(port).ok());
        match (number, of["port"].as_str()) {
            (None, None) if self.errs(Reading::NoPortIsNone) => false,
            (None, None) => is_protocol || self.errs(Reading::NoPortIsAnyProtocol),
            (None, Some(name)) => {
                let of_pod = match self.wrong {
                    Some(Reading::NameOfSelected) => subject,
                    Some(Reading::NameOfClient) if direction == "ingress" => other,
                    _ => seen.to,
                };
                self.named(name, of_pod, is_protocol, seen)
            }
            (Some(first), _) => {
                let last = of["endPort"].as_u64().and_then(|port| u16::try_from(port).ok());
                let range = match (last, self.wrong) {
                    (None, _) | (_, Some(Reading::NoEnd)) => first..=first,
                    (Some(last), Some(Reading::EndIsExclusive)) => first..=last - 1,
                    (Some(last), Some(Reading::BeginsAtZero)) => 0..=last,
                    (Some(last), _) => first..=last,
                };
                is_protocol && range.contains(&seen.port)
            }
        }
    }

    /// All Pods have the names `web` and `admin`, in both protocols.
    fn named(&self, name: &str, of: End, is_protocol: bool, seen: &Seen) -> bool {
        let is_other =
            of.pod.is_some_and(|pod| PODS[pod].0 == "c") && !self.errs(Reading::NameIsOneNumber);
        let port = match (name, is_other) {
            ("web", false) | ("admin", true) => WEB,
            ("web", true) | ("admin", false) => ADMIN,
            _ => return self.errs(Reading::UnknownNameIsAll),
        };
        let is_protocol = is_protocol || self.errs(Reading::NameOfAnyProtocol);
        of.pod.is_some() && is_protocol && port == seen.port
    }
}

fn family(range: &Value) -> Option<Family> {
    let range: Cidr = range.as_str()?.parse().ok()?;
    Some(range.family())
}

fn contains(range: &Value, ip: IpAddr) -> bool {
    let range = range.as_str().and_then(|text| text.parse::<Cidr>().ok());
    range.is_some_and(|range| range.contains(ip))
}

/// Returns the lines of a case that a judge gets wrong.
fn wrong_lines(case: &Case, wrong: Option<Reading>) -> Result<Vec<String>> {
    let policies = case.policies.iter().map(|text| {
        let (namespace, spec) = namespace_and_spec(text);
        let spec = serde_saphyr::from_str(&format!("{{{spec}}}"));
        Ok((namespace, spec.with_context(|| case.name.clone())?))
    });
    let judge = Judge {
        wrong,
        policies: policies.collect::<Result<_>>()?,
    };
    let mut lines = Vec::new();
    for question in Question::all(&case.lines)? {
        if judge.allows(&judge.see(&question)?) != question.through {
            lines.push(format!("{} ({})", question.line, question.to));
        }
    }
    Ok(lines)
}

pub(crate) fn each_wrong_reading_of_the_api_fails_a_case() -> Result<()> {
    let cases = cases(&NETWORK_POLICIES);
    for case in &cases {
        let wrong = wrong_lines(case, None)?;
        ensure!(wrong.is_empty(), "{}: the judge errs: {wrong:?}", case.name);
    }
    let mut uncaught = Vec::new();
    for (reading, what) in READINGS {
        let mut caught = Vec::new();
        for case in &cases {
            if !wrong_lines(case, Some(*reading))?.is_empty() {
                caught.push(&case.name);
            }
        }
        match caught.first() {
            Some(first) => println!("{what}: caught by {} cases, first {first}", caught.len()),
            None => uncaught.push(*what),
        }
    }
    ensure!(uncaught.is_empty(), "no case catches: {uncaught:#?}");
    ensure!(READINGS.len() >= 30, "{} readings", READINGS.len());
    Ok(())
}
