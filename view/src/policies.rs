//! NetworkPolicies: the list, one of them, and the verdict on a connection.

use kplane_proto::v1::{self as pb, PolicyVerdict};
use serde::Serialize;

use super::{API_VERSION, IssueView, List, View, issues_text, protocol};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, none_text, paragraph, plural};
use crate::wire::{FromWire, known, known_name, view_of};

/// Most Pods that a description shows before it refers to `-o wide`.
const PODS_SHOWN: usize = 20;

/// A NetworkPolicy, and whom it is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyView {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The directions for which it isolates its Pods.
    pub(crate) policy_types: Vec<&'static str>,
    /// The number of Pods that it selects.
    pub(crate) pods: u64,
    /// The tier and priority of a ClusterNetworkPolicy; `null` = it is a NetworkPolicy.
    pub(crate) tier: Option<String>,
    pub(crate) priority: Option<u32>,
}

impl From<pb::PolicySummary> for PolicyView {
    fn from(policy: pb::PolicySummary) -> Self {
        let types = [(policy.ingress, "Ingress"), (policy.egress, "Egress")]
            .into_iter()
            .filter(|(is, _)| *is);
        Self {
            namespace: policy.namespace,
            name: policy.name,
            policy_types: types.map(|(_, name)| name).collect(),
            pods: policy.pods,
            priority: (!policy.tier.is_empty()).then_some(policy.priority),
            tier: Some(policy.tier).filter(|tier| !tier.is_empty()),
        }
    }
}

impl FromWire<Option<pb::PolicySummary>> for PolicyView {
    fn from_wire(policy: Option<pb::PolicySummary>) -> Self {
        policy.unwrap_or_default().into()
    }
}

impl PolicyView {
    /// Returns the name as `kpctl describe policy` takes it.
    fn full_name(&self) -> String {
        match &self.tier {
            None => format!("policy/{}/{}", self.namespace, self.name),
            Some(_) => format!("clusterpolicy/{}", self.name),
        }
    }

    fn tier_span(&self) -> Span {
        let (Some(tier), Some(priority)) = (&self.tier, self.priority) else {
            return Span::plain("-");
        };
        Span::plain(format!("{tier} {priority}"))
    }

    fn pods_span(&self) -> Span {
        let tone = if self.pods == 0 { Tone::Warn } else { Tone::Plain };
        Span::new(self.pods.to_string(), tone)
    }
}

/// The view of `kpctl get policies`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyListView {
    api_version: &'static str,
    kind: &'static str,
    items: Vec<PolicyView>,
    /// The namespace, if the user asked for a single one.
    #[serde(skip)]
    namespace: Option<String>,
}

impl PolicyListView {
    /// Creates the view of all policies, or of those in one namespace.
    pub fn new(policies: Vec<pb::PolicySummary>, namespace: Option<&str>) -> Self {
        Self {
            api_version: API_VERSION,
            kind: "PolicyList",
            items: policies.into_iter().map(PolicyView::from).collect(),
            namespace: namespace.map(str::to_owned),
        }
    }
}

impl List for PolicyListView {
    type Item = PolicyView;

    fn items(&mut self) -> &mut Vec<PolicyView> {
        &mut self.items
    }
}

impl View for PolicyListView {
    fn names(&self) -> Option<Vec<String>> {
        Some(self.items.iter().map(PolicyView::full_name).collect())
    }

    fn text(&self, canvas: &Canvas) -> String {
        if self.items.is_empty() {
            return none_text("NetworkPolicies", self.namespace.as_deref());
        }
        Table::new(&self.items)
            .column_if(
                self.namespace.is_none(),
                Column::new("NAMESPACE").elastic(12),
                |of| match of.namespace.as_str() {
                    "" => Span::plain("-"),
                    namespace => Span::plain(namespace),
                },
            )
            .text(Column::new("NAME").elastic(16), |of| &of.name)
            .text(Column::new("TYPES"), |of| of.policy_types.join(","))
            .column(Column::new("PODS"), PolicyView::pods_span)
            .column_if(
                self.items.iter().any(|of| of.tier.is_some()),
                Column::new("TIER"),
                PolicyView::tier_span,
            )
            .render(canvas)
    }
}

view_of! {
    /// The view of `kpctl describe policy`.
    pub struct PolicyDescriptionView: PolicyDescription as "PolicyDescription" {
        policy: PolicyView = summary,
        /// The selector of its Pods; empty = all of the namespace.
        selector: String,
        /// What may come to them, in words.
        ingress: Vec<String>,
        /// What they may reach, in words.
        egress: Vec<String>,
        /// The number of rules that the server did not list.
        rules_omitted: u64 = more_rules,
        /// The names of its first 100 Pods.
        pods: Vec<String>,
        issues: Vec<IssueView> => IssueView::list,
    }
}

impl PolicyDescriptionView {
    fn pods(&self, canvas: &Canvas) -> Vec<Span> {
        let shown = if canvas.all { usize::MAX } else { PODS_SHOWN };
        let mut pods: Vec<_> = self.pods.iter().take(shown).map(Span::plain).collect();
        let all = usize::try_from(self.policy.pods).unwrap_or(usize::MAX);
        match all.saturating_sub(pods.len()) {
            0 if pods.is_empty() => pods.push(Span::new("none", Tone::Warn)),
            0 => {}
            more => pods.push(Span::plain(format!("and {more} more"))),
        }
        pods
    }

    fn rules(&self, direction: &str, rules: &[String], canvas: &Canvas) -> String {
        let mut out = format!("\n{}\n", Tone::Strong.paint(direction));
        let is_about = self.policy.policy_types.contains(&direction);
        let text = match (is_about, rules) {
            _ if self.policy.tier.is_some() => match rules {
                [] => "no rule",
                _ => "the first rule that matches counts:",
            },
            (false, _) => "not isolated by this policy",
            (true, []) => "isolated, and nothing is allowed",
            (true, _) => "isolated; allowed is:",
        };
        out.push_str(&paragraph(&Span::plain(text), canvas, 2));
        for (at, rule) in rules.iter().enumerate() {
            let rule = Span::plain(format!("[{at}] {rule}"));
            out.push_str(&paragraph(&rule, canvas, 2));
        }
        out
    }
}

impl View for PolicyDescriptionView {
    fn names(&self) -> Option<Vec<String>> {
        Some(vec![self.policy.full_name()])
    }

    fn text(&self, canvas: &Canvas) -> String {
        let PolicyView {
            namespace, name, ..
        } = &self.policy;
        let selector = match self.selector.as_str() {
            selector if self.policy.tier.is_some() => selector.to_owned(),
            "" => format!("all Pods of namespace {namespace}"),
            selector => format!("Pods {selector} of namespace {namespace}"),
        };
        let mut out = match self.policy.tier {
            None => {
                let policy = Span::plain(format!("{namespace}/{name}"));
                field("NetworkPolicy", &[policy], canvas)
            }
            Some(_) => {
                let policy = field("Cluster policy", &[Span::plain(name)], canvas);
                policy + &field("Tier", &[self.policy.tier_span()], canvas)
            }
        };
        out.push_str(&field("For", &[Span::plain(selector)], canvas));
        out.push_str(&field("Pods", &self.pods(canvas), canvas));
        out.push_str(&self.rules("Ingress", &self.ingress, canvas));
        out.push_str(&self.rules("Egress", &self.egress, canvas));
        if self.rules_omitted > 0 {
            let more = usize::try_from(self.rules_omitted).unwrap_or(usize::MAX);
            let more = format!("{} more are not listed", plural(more, "rule"));
            out.push_str(&paragraph(&Span::plain(more), canvas, 2));
        }
        out.push_str(&issues_text(&self.issues, 0, canvas));
        out
    }
}

view_of! {
    /// What the policies of one end of a connection say.
    pub struct DirectionView: DirectionJudgement {
        #[serde(serialize_with = "known_name")]
        verdict: PolicyVerdict => known,
        reason: String,
        /// The policy that allows the connection, its rule, and the rule's peer; `null` = none does.
        policy: Option<String>,
        rule: Option<String>,
        peer: Option<String>,
        /// The policies that isolate the Pod and do not allow the connection, the first 100.
        isolating: Vec<String>,
    }

    /// The view of `kpctl why` for a connection that NetworkPolicies judge.
    pub struct JudgementView: ConnectionJudgement as "ConnectionJudgement" {
        from: String = _,
        to: String = _,
        protocol: &'static str = _,
        port: u32 = _,
        allowed: bool,
        egress: Option<DirectionView>,
        ingress: Option<DirectionView>,
        notes: Vec<String>,
    }
}

impl JudgementView {
    /// Creates the view of an answer.
    pub fn new(asked: &pb::JudgeConnectionRequest, answer: pb::ConnectionJudgement) -> Self {
        Self {
            from: asked.from.clone(),
            to: asked.to.clone(),
            protocol: protocol(asked.protocol()),
            port: asked.port,
            ..answer.into()
        }
    }
}

impl DirectionView {
    fn text(&self, title: &str, canvas: &Canvas) -> String {
        let (word, tone) = match self.verdict {
            PolicyVerdict::NotIsolated => ("not isolated", Tone::Good),
            PolicyVerdict::Allowed => ("allowed", Tone::Good),
            PolicyVerdict::Itself => ("itself", Tone::Good),
            PolicyVerdict::Denied => ("denied", Tone::Bad),
            PolicyVerdict::TierAccepted => ("accepted", Tone::Good),
            PolicyVerdict::TierDenied => ("denied", Tone::Bad),
            PolicyVerdict::Unspecified => ("unknown", Tone::Warn),
        };
        let mut out = format!("\n{}\n", Tone::Strong.paint(title));
        let reason = Span::new(format!("{word}: {}", self.reason), tone);
        out.push_str(&paragraph(&reason, canvas, 2));
        let rule = self.rule.iter().map(|rule| format!("rule: {rule}"));
        let peer = self.peer.iter();
        let peer = peer.map(|peer| format!("the other end is in: {peer}"));
        // The reason names the first few.
        let isolating = (canvas.wide && !self.isolating.is_empty())
            .then(|| format!("isolated by: {}", self.isolating.join(", ")));
        for line in rule.chain(peer).chain(isolating) {
            out.push_str(&paragraph(&Span::plain(line), canvas, 4));
        }
        out
    }
}

impl View for JudgementView {
    fn text(&self, canvas: &Canvas) -> String {
        let connection = format!(
            "from {} to {}, {} {}",
            self.from, self.to, self.protocol, self.port
        );
        let (verdict, tone) = if self.allowed {
            ("NetworkPolicies allow it", Tone::Good)
        } else {
            ("NetworkPolicies deny it", Tone::Bad)
        };
        let mut out = field("Connection", &[Span::plain(connection)], canvas);
        out.push_str(&field("Verdict", &[Span::new(verdict, tone)], canvas));
        for (title, side) in [
            (format!("Egress of {}", self.from), &self.egress),
            (format!("Ingress of {}", self.to), &self.ingress),
        ] {
            let side = side.as_ref().map(|side| side.text(&title, canvas));
            out.push_str(&side.unwrap_or_default());
        }
        if !self.notes.is_empty() {
            out.push('\n');
        }
        for note in &self.notes {
            out.push_str(&paragraph(&Span::plain(note), canvas, 0));
        }
        out
    }
}
