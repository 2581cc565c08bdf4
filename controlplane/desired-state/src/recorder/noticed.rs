//! Events: what the control plane noticed besides changes of Services.

use std::collections::VecDeque;
use std::time::SystemTime;

use kplane_util::clock::millis;

/// Maximum number of events.
const MAX_EVENTS: usize = 8_192;
/// Longest name of an object, and longest text, in bytes.
const MAX_OBJECT: usize = 256;
const MAX_TEXT: usize = 300;

/// The kind of an event. Its name is stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeKind {
    /// An agent's stream began.
    NodeConnected,
    /// An agent's stream ended.
    NodeLost,
    /// Neighbours do not reach a node.
    NodeSuspected,
    /// A node has been suspected for some time: connections to its endpoints end.
    NodeDead,
    /// A node is suspected no more.
    NodeReached,
    /// Objects fail on a node that did not fail before.
    NodeFailing,
    /// Nothing fails on a node any more.
    NodeRecovered,
    /// An agent repaired what another program changed.
    Repaired,
    /// A problem of the input appeared.
    ProblemAppeared,
    /// A problem of the input is gone.
    ProblemGone,
    /// Objects are kept although the source does not name them, or no longer are.
    Held,
    /// Nothing is kept any more.
    Released,
}

impl NoticeKind {
    /// Returns the stable name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NodeConnected => "NodeConnected",
            Self::NodeLost => "NodeLost",
            Self::NodeSuspected => "NodeSuspected",
            Self::NodeDead => "NodeDead",
            Self::NodeReached => "NodeReached",
            Self::NodeFailing => "NodeFailing",
            Self::NodeRecovered => "NodeRecovered",
            Self::Repaired => "Repaired",
            Self::ProblemAppeared => "ProblemAppeared",
            Self::ProblemGone => "ProblemGone",
            Self::Held => "Held",
            Self::Released => "Released",
        }
    }
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Number of the event, from 1.
    pub number: u64,
    /// Time, milliseconds since 1970.
    pub at_ms: u64,
    /// The kind.
    pub kind: NoticeKind,
    /// The object, such as `Node/n1`; may be empty.
    pub object: String,
    /// Human-readable.
    pub text: String,
}

/// The record of events.
#[derive(Debug)]
pub(super) struct Notices {
    kept: VecDeque<Notice>,
    number: u64,
    bytes: usize,
    since_ms: u64,
}

impl Default for Notices {
    fn default() -> Self {
        Self {
            kept: VecDeque::new(),
            number: 0,
            bytes: 0,
            since_ms: millis(SystemTime::now()),
        }
    }
}

fn bytes(notice: &Notice) -> usize {
    size_of::<Notice>() + notice.object.capacity() + notice.text.capacity()
}

impl Notices {
    pub(super) fn add(
        &mut self,
        kind: NoticeKind,
        mut object: String,
        mut text: String,
        at: SystemTime,
    ) {
        for (text, most) in [(&mut object, MAX_OBJECT), (&mut text, MAX_TEXT)] {
            text.truncate(text.floor_char_boundary(most));
            text.shrink_to_fit();
        }
        self.number += 1;
        let notice = Notice {
            number: self.number,
            at_ms: millis(at),
            kind,
            object,
            text,
        };
        self.bytes += bytes(&notice);
        self.kept.push_back(notice);
        if self.kept.len() > MAX_EVENTS
            && let Some(oldest) = self.kept.pop_front()
        {
            self.bytes -= bytes(&oldest);
            self.since_ms = oldest.at_ms;
        }
    }

    pub(super) fn after(&self, after: u64, limit: usize) -> (Vec<Notice>, u64) {
        let since = self.kept.partition_point(|notice| notice.number <= after);
        let from = since.max(self.kept.len().saturating_sub(limit));
        (self.kept.range(from..).cloned().collect(), self.since_ms)
    }

    pub(super) fn size(&self) -> (usize, usize) {
        (self.kept.len(), self.bytes)
    }
}
