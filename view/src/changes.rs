//! The history of one Service: what changed, why, and when each node had it.

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;

use super::View;
use super::replicas::{MissingReplicaView, missing_text};
use crate::style::{Canvas, Tone};
use crate::text::{Span, paragraph, plural};
use crate::time::{Time, human};
use crate::wire::{FromWire, name, view_of};

view_of! {
    /// The view of `kpctl history service`.
    pub struct ServiceHistoryView: ServiceHistory as "ServiceHistory" {
        namespace: String = _,
        name: String = _,
        /// The node that was asked for; `null` = all.
        node: Option<String> = _,
        /// Newest first.
        changes: Vec<ChangeView>,
        /// The time from which on the record is complete.
        since: Option<Time> = since_ms,
        /// The number of recorded changes that are older.
        older: u64,
        missing_replicas: Vec<MissingReplicaView>,
        #[serde(skip)]
        now: Option<Time> = now_ms,
    }

    pub(crate) struct ChangeView: ServiceChange {
        /// The revision; `null` = nodes hold the Service as before.
        revision: Option<u64>,
        observed: Option<Time> = observed_ms,
        published: Option<Time> = published_ms,
        /// Whether only endpoints of single nodes changed.
        single_nodes: bool,
        causes: Vec<CauseView>,
        /// Whether the causes are about other objects.
        indirect: bool,
        nodes: u64,
        reached: u64,
        first: Option<Time> = first_ms,
        last: Option<Time> = last_ms,
        slowest: Vec<ReachedView>,
        waiting: Vec<ReachedView>,
    }

    /// When a node had a change.
    pub(crate) struct ReachedView: NodeReached {
        node: String,
        /// The time; `null` = not yet.
        at: Option<Time> = at_ms,
        /// Whether the node may have had it before.
        or_before: bool,
        applied_revision: u64,
    }

    /// An object that changed.
    pub(crate) struct CauseView: ChangeCause {
        kind: String,
        namespace: Option<String>,
        name: String,
        /// Its version; `null` = unknown.
        resource_version: Option<String> = version => |version| (version > 0).then(|| version.to_string()),
        location: Option<String>,
        verb: String => name::<pb::ChangeVerb>,
        /// Time that the client that changed the object wrote into it.
        written: Option<Time> = written_ms,
        endpoints: Vec<EndpointChangeView>,
        fields: Vec<FieldChangeView>,
        omitted: u32,
    }

    /// An endpoint that changed.
    pub struct EndpointChangeView: RecordedEndpoint {
        address: String,
        node: Option<String>,
        before: String => name::<pb::RecordedState>,
        after: String => name::<pb::RecordedState>,
    }

    /// A field that changed.
    pub struct FieldChangeView: RecordedField {
        field: String,
        before: Option<String>,
        after: Option<String>,
    }
}

/// The state of an endpoint that does not exist.
const ABSENT: &str = "Absent";

impl EndpointChangeView {
    /// Returns the change in one line.
    pub fn line(&self) -> Span {
        let node = self.node.as_deref();
        let node = node.map_or_else(String::new, |node| format!(" on {node}"));
        let address = &self.address;
        match (self.before.as_str(), self.after.as_str()) {
            (ABSENT, after) => Span::new(format!("+ {address}{node}: {after}"), Tone::Good),
            (before, ABSENT) => Span::new(format!("- {address}{node}: was {before}"), Tone::Bad),
            (before, after) => Span::new(
                format!("~ {address}{node}: {before} -> {after}"),
                Tone::Warn,
            ),
        }
    }
}

impl FieldChangeView {
    /// Returns the change in one line.
    pub fn line(&self) -> Span {
        let field = &self.field;
        match (&self.before, &self.after) {
            (None, Some(after)) => Span::new(format!("+ {field}: {after}"), Tone::Good),
            (Some(before), None) => Span::new(format!("- {field}: was {before}"), Tone::Bad),
            (before, after) => {
                let text = |value: &Option<String>| value.clone().unwrap_or_default();
                let (before, after) = (text(before), text(after));
                Span::new(format!("~ {field}: {before} -> {after}"), Tone::Warn)
            }
        }
    }
}

impl ServiceHistoryView {
    /// Creates the view; `node` is empty if it is about all nodes.
    pub fn new(name: &ServiceName, node: &str, history: pb::ServiceHistory) -> Self {
        Self {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            node: FromWire::from_wire(node.to_owned()),
            ..history.into()
        }
    }

    /// Returns the last lines: how far the record reaches.
    fn end(&self, canvas: &Canvas) -> String {
        let since = |time: Option<Time>| time.map_or_else(|| "?".to_owned(), Time::local);
        let (count, since) = (self.changes.len(), since(self.since));
        let text = match (count, self.older) {
            (0, _) => format!("No change of it is recorded since {since}."),
            (_, 0) => format!("{} recorded since {since}.", plural(count, "change")),
            (_, older) => format!(
                "{} shown, {older} older recorded since {since}: --limit shows more.",
                plural(count, "change")
            ),
        };
        let mut end = paragraph(&Span::new(text, Tone::Faint), canvas, 0);
        end += &missing_text(&self.missing_replicas, canvas);
        end
    }

    fn change(&self, change: &ChangeView, canvas: &Canvas) -> String {
        let at = change.published.or(change.observed);
        let mut head = at.map_or_else(|| "?".to_owned(), Time::local);
        if let Some((at, now)) = at.zip(self.now) {
            head += &format!("  ({} ago)", at.age_text(now));
        }
        head += &match change.revision {
            Some(revision) => format!("  revision {revision}"),
            None => "  no change for nodes".to_owned(),
        };
        let mut text = paragraph(&Span::new(head, Tone::Strong), canvas, 0);
        for cause in &change.causes {
            text += &paragraph(&cause.head(change), canvas, 2);
            if change.indirect {
                continue;
            }
            for line in cause.lines() {
                text += &paragraph(&line, canvas, 4);
            }
        }
        if change.causes.is_empty() {
            let unknown = "no object is recorded as its cause";
            text += &paragraph(&Span::new(unknown, Tone::Faint), canvas, 2);
        }
        if change.revision.is_some() {
            text += &paragraph(&change.progress(self.node.as_deref()), canvas, 2);
            for node in &change.waiting {
                let applied = match node.applied_revision {
                    0 => "it has not reported a revision".to_owned(),
                    revision => format!("it holds revision {revision}"),
                };
                let line = format!("{} does not have it: {applied}", node.node);
                text += &paragraph(&Span::new(line, Tone::Bad), canvas, 4);
            }
        }
        text
    }
}

impl CauseView {
    fn head(&self, change: &ChangeView) -> Span {
        let namespace = self.namespace.as_ref();
        let namespace = namespace.map_or_else(String::new, |namespace| format!("{namespace}/"));
        let mut text = format!("{} {namespace}{} ", self.kind, self.name);
        text += &self.verb.to_ascii_lowercase();
        let mut facts = Vec::new();
        if let Some(version) = &self.resource_version {
            facts.push(format!("resourceVersion {version}"));
        }
        facts.extend(self.location.clone());
        if let Some((written, observed)) = self.written.zip(change.observed) {
            let late = observed.age(written);
            facts.push(if late.is_zero() {
                "written just before".to_owned()
            } else {
                format!("written {} before", human(late))
            });
        }
        if !facts.is_empty() {
            text += &format!(" ({})", facts.join(", "));
        }
        if change.indirect {
            text += ", in the same step";
        }
        Span::plain(text)
    }

    fn lines(&self) -> Vec<Span> {
        let fields = self.fields.iter().map(FieldChangeView::line);
        let endpoints = self.endpoints.iter().map(EndpointChangeView::line);
        let more = (self.omitted > 0).then(|| {
            let text = format!("and {} more, or changes of hints", self.omitted);
            Span::new(text, Tone::Faint)
        });
        fields.chain(endpoints).chain(more).collect()
    }
}

impl ChangeView {
    /// Returns which nodes hold the change, and since when.
    fn progress(&self, only: Option<&str>) -> Span {
        let after = |at: Option<Time>| {
            at.zip(self.observed)
                .map_or_else(|| "?".to_owned(), |(at, from)| human(at.age(from)))
        };
        if let Some(node) = only {
            return match self.slowest.first() {
                Some(reached) => Span::new(
                    format!(
                        "{node} has it since {}{}, {} after the change",
                        reached.at.map_or_else(|| "?".to_owned(), Time::local),
                        if reached.or_before { " or before" } else { "" },
                        after(reached.at)
                    ),
                    Tone::Good,
                ),
                None if self.nodes == 0 && self.single_nodes => Span::new(
                    format!("{node} is not concerned: endpoints of other nodes changed"),
                    Tone::Faint,
                ),
                None if self.nodes == 0 => Span::new(
                    format!("{node} has no agent at a replica that answered"),
                    Tone::Bad,
                ),
                None => Span::new(format!("{node} does not have it"), Tone::Bad),
            };
        }
        let which = if self.single_nodes { "nodes with these endpoints" } else { "nodes" };
        let mut text = format!("{which}: {} of {} have it", self.reached, self.nodes);
        if self.reached > 0 {
            text += &format!(": the first {} after the change", after(self.first));
        }
        if self.reached > 1
            && let Some(last) = self.slowest.first()
        {
            let before = if last.or_before { " or before" } else { "" };
            text += &format!(", the last ({}) {}{before}", last.node, after(last.at));
        }
        let all = self.reached == self.nodes;
        Span::new(text, if all { Tone::Good } else { Tone::Warn })
    }
}

impl View for ServiceHistoryView {
    fn text(&self, canvas: &Canvas) -> String {
        let head = format!("Service {}/{}", self.namespace, self.name);
        let mut text = paragraph(&Span::new(head, Tone::Strong), canvas, 0);
        for change in &self.changes {
            text += &self.change(change, canvas);
        }
        text + &self.end(canvas)
    }
}
