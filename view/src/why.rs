//! The fate of a packet: what `kpctl why` shows.

use std::time::Duration;

use kplane_proto::v1::{self as pb, PacketOutcome};
use serde::Serialize;

use super::findings::{self, FindingView};
use super::{KeyView, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, paragraph};
use crate::time::human;
use crate::wire::{FromWire, known, known_name, view_of};

view_of! {
    /// An endpoint that a packet may reach or not.
    pub struct CandidateView: Candidate {
        address: String,
        node: String,
        chosen: bool,
        reason: String,
    }

    /// The node's kernel, asked for this answer.
    pub struct KernelView: KernelAnswer {
        /// Whether it does what the fate says; `null` if that is not known.
        agrees: Option<bool> = agreement => agrees,
        summary: String,
        /// Where it has the destination, such as the names of nftables sets.
        places: Vec<String>,
        endpoints: Vec<String>,
    }
}

fn agrees(agreement: i32) -> Option<bool> {
    match known(agreement) {
        pb::KernelAgreement::Unspecified => None,
        pb::KernelAgreement::Agrees => Some(true),
        pb::KernelAgreement::Differs => Some(false),
    }
}

impl KernelView {
    /// Returns what the kernel said, and where it has that.
    fn span(&self) -> Span {
        let tone = match self.agrees {
            Some(true) => Tone::Good,
            Some(false) => Tone::Bad,
            None => Tone::Plain,
        };
        let places = if self.places.is_empty() {
            String::new()
        } else {
            format!(" ({})", self.places.join(", "))
        };
        let asked = self.agrees.map_or("", |_| "asked just now: ");
        Span::new(format!("{asked}{}{places}", self.summary), tone)
    }
}

/// A connection that the node has tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AttemptView {
    pub(crate) address: String,
    /// Through the Service and the node's data path, or to an endpoint's own address.
    pub(crate) through_service: bool,
    /// The endpoint's node. For the Service: the node that has connected, empty if it is the one that handles the packet.
    pub(crate) node: String,
    pub(crate) outcome: AttemptOutcome,
    pub(crate) took_us: u32,
    /// Reason of a failure; empty otherwise.
    pub(crate) error: String,
}

/// What came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum AttemptOutcome {
    /// The endpoint answered.
    Connected,
    /// Nobody listens there.
    Refused,
    /// No answer came in time.
    Silent,
    /// Nothing was tried.
    NotTried,
}

impl FromWire<pb::TriedConnection> for AttemptView {
    fn from_wire(tried: pb::TriedConnection) -> Self {
        let attempt = tried.attempt.unwrap_or_default();
        Self {
            outcome: match attempt.outcome() {
                pb::AttemptOutcome::Connected => AttemptOutcome::Connected,
                pb::AttemptOutcome::Refused => AttemptOutcome::Refused,
                pb::AttemptOutcome::Silent => AttemptOutcome::Silent,
                pb::AttemptOutcome::Unspecified => AttemptOutcome::NotTried,
            },
            address: attempt.address,
            through_service: tried.through_service,
            node: tried.node,
            took_us: attempt.took_us,
            error: attempt.error,
        }
    }
}

impl AttemptView {
    fn target(&self) -> Span {
        let which = if self.through_service { "the Service" } else { "endpoint" };
        let from = match self.node.as_str() {
            node if self.through_service && !node.is_empty() => format!(", from {node}"),
            _ => String::new(),
        };
        Span::plain(format!("{which} {}{from}", self.address))
    }

    fn result(&self) -> Span {
        match self.outcome {
            AttemptOutcome::Connected => {
                let took = human(Duration::from_micros(self.took_us.into()));
                Span::new(format!("connected in {took}"), Tone::Good)
            }
            AttemptOutcome::Refused => Span::new("refused", Tone::Bad),
            AttemptOutcome::Silent => Span::new("no answer within 1s", Tone::Bad),
            AttemptOutcome::NotTried => Span::new(&self.error, Tone::Bad),
        }
    }
}

view_of! {
    /// The view of `kpctl why`.
    pub struct WhyView: Explanation as "Explanation" {
        namespace: String = _,
        name: String = _,
        /// The port; `null` if the Service is not proxied.
        port: Option<KeyView> = key,
        from: String = _,
        to: String,
        node: String,
        #[serde(serialize_with = "known_name")]
        outcome: PacketOutcome => known,
        summary: String,
        steps: Vec<String>,
        candidates: Vec<CandidateView>,
        /// The node's kernel holds the newest state, and has been read back since.
        programmed: bool,
        verified: bool,
        /// The reason why the kernel does not hold it; empty otherwise.
        lag: String,
        findings: Vec<FindingView>,
        /// What the kernel said; `null` if the control plane is older than the question.
        kernel: Option<KernelView>,
        /// Connections that the node has tried.
        attempts: Vec<AttemptView> = _,
        /// Reason why it has tried none; empty otherwise.
        not_tried: String = _,
    }
}

impl WhyView {
    /// Creates the view; `from` names the sender.
    pub fn new(namespace: &str, name: &str, from: String, tried: pb::TryResponse) -> Self {
        let announced = tried.explanation.unwrap_or_default();
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            from,
            attempts: FromWire::from_wire(tried.attempts),
            not_tried: tried.error,
            ..announced.into()
        }
    }

    fn fate(&self) -> Span {
        let tone = match self.outcome {
            PacketOutcome::Reaches => Tone::Good,
            PacketOutcome::NotProxied | PacketOutcome::Unspecified => Tone::Warn,
            PacketOutcome::Refused
            | PacketOutcome::Dropped
            | PacketOutcome::NotAdmitted
            | PacketOutcome::Denied => Tone::Bad,
        };
        Span::new(&self.summary, tone)
    }

    /// Returns whether the node's kernel does what is shown here, as its agent has reported.
    fn state(&self) -> Span {
        match (self.outcome, self.programmed, self.verified) {
            (PacketOutcome::NotProxied, _, _) => Span::none(),
            (_, false, _) => {
                Span::new(format!("does not hold this state: {}", self.lag), Tone::Bad)
            }
            (_, true, true) => Span::new("holds this state, and has been read back", Tone::Good),
            (_, true, false) => {
                Span::plain("has acknowledged this state, and has not been read back since")
            }
        }
    }
}

impl View for WhyView {
    fn text(&self, canvas: &Canvas) -> String {
        let to = match self.to.as_str() {
            "" => String::new(),
            to => format!(" to {to}"),
        };
        let mut out = field(
            "Packet",
            &[Span::plain(format!(
                "from {}{to}, handled by {}",
                self.from, self.node
            ))],
            canvas,
        );
        let service = Span::plain(format!("{}/{}", self.namespace, self.name));
        out.push_str(&field("Service", &[service], canvas));
        out.push_str(&Tone::Strong.paint("Fate"));
        out.push('\n');
        out.push_str(&paragraph(&self.fate(), canvas, 2));
        if self.outcome != PacketOutcome::NotProxied {
            out.push_str(&Tone::Strong.paint(&format!("Kernel of {}", self.node)));
            out.push('\n');
            out.push_str(&paragraph(&self.state(), canvas, 2));
            if let Some(kernel) = &self.kernel {
                out.push_str(&paragraph(&kernel.span(), canvas, 2));
            }
        }
        if !self.steps.is_empty() {
            out.push('\n');
            out.push_str(&Tone::Strong.paint("Why"));
            out.push('\n');
        }
        for (n, step) in self.steps.iter().enumerate() {
            let step = Span::plain(format!("{}. {step}", n + 1));
            out.push_str(&paragraph(&step, canvas, 2));
        }
        if !self.candidates.is_empty() {
            out.push('\n');
            out.push_str(&candidates(&self.candidates, canvas));
        }
        out.push_str(&attempts(&self.attempts, &self.not_tried, canvas));
        out.push_str(&findings::text(&self.findings, canvas));
        out
    }
}

fn attempts(all: &[AttemptView], not_tried: &str, canvas: &Canvas) -> String {
    if !not_tried.is_empty() {
        let text = format!("Not tried: {not_tried}");
        return format!("\n{}", paragraph(&Span::new(text, Tone::Warn), canvas, 0));
    }
    if all.is_empty() {
        return String::new();
    }
    let table = Table::new(all)
        .column(Column::new("TRIED"), AttemptView::target)
        .text(Column::new("NODE").elastic(12), |one| {
            if one.through_service { "" } else { &one.node }
        })
        .column(Column::new("RESULT"), AttemptView::result);
    format!("\n{}", table.render(canvas))
}

fn candidates(all: &[CandidateView], canvas: &Canvas) -> String {
    Table::new(all)
        .text(Column::new("ENDPOINT"), |one| &one.address)
        .text(Column::new("NODE").elastic(12), |one| &one.node)
        .column(Column::new("CHOSEN"), |one| {
            if one.chosen { Span::new("Yes", Tone::Good) } else { Span::plain("No") }
        })
        .text(Column::new("REASON"), |one| &one.reason)
        .render(canvas)
}
