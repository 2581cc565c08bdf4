//! The audit log: one JSON line for each refusal, and for each call that changed something.
//!
//! A thread of its own writes, so that no stream waits for a disk or a pipe. A caller with many refusals gets few
//! lines; the next line says how many were left out.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use jiff::Timestamp;
use kplane_util::buckets::{Buckets, Rate};
use parking_lot::Mutex;
use serde::Serialize;

use crate::connection_limits::network;

/// Lines that may wait for the disk. More are dropped, and counted.
const QUEUE: usize = 1_024;
/// Lines about refusals that a caller gets.
const LINES: Rate = Rate {
    burst: 10,
    refill: Duration::from_secs(10),
};
/// Most callers whose lines are counted; further ones share their lines.
const MAX_CALLERS: usize = 4_096;

/// The place of the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AuditLog {
    /// No log.
    #[default]
    Off,
    /// Standard output.
    Stdout,
    /// A file, to whose end lines are added.
    File(PathBuf),
}

/// A writer of the audit log.
#[derive(Debug)]
pub struct Audit {
    lines: Option<SyncSender<String>>,
    callers: Mutex<Buckets<IpAddr>>,
    dropped: AtomicU64,
}

/// A decision about a call.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct AuditEntry<'a> {
    /// `refused` or `allowed`.
    pub(super) decision: &'a str,
    /// The reason of a refusal, as in metrics.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(super) reason: &'a str,
    /// The caller's proven name; empty if there is none.
    pub(super) user: &'a str,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    pub(super) groups: &'a [String],
    /// The caller's address.
    pub(super) from: String,
    /// The port's name.
    pub(super) port: &'a str,
    /// The action: a verb and a path.
    pub(super) action: &'a str,
    /// Explanation, human-readable.
    pub(super) text: &'a str,
}

/// A line of the log.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    #[serde(flatten)]
    entry: &'a AuditEntry<'a>,
    /// Number of lines about this caller that were left out before this one.
    #[serde(skip_serializing_if = "is_zero")]
    left_out: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Default for Audit {
    fn default() -> Self {
        Self {
            lines: None,
            callers: Mutex::new(Buckets::new(LINES, MAX_CALLERS)),
            dropped: AtomicU64::new(0),
        }
    }
}

impl Audit {
    /// Opens the log.
    ///
    /// # Errors
    /// The file cannot be opened, or the thread cannot be started.
    pub fn open(log: &AuditLog) -> io::Result<Self> {
        let to: Box<dyn Write + Send> = match log {
            AuditLog::Off => return Ok(Self::default()),
            AuditLog::Stdout => Box::new(io::stdout()),
            AuditLog::File(path) => {
                Box::new(OpenOptions::new().create(true).append(true).open(path)?)
            }
        };
        let (lines, queue) = sync_channel(QUEUE);
        std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || write(to, &queue))?;
        Ok(Self {
            lines: Some(lines),
            ..Self::default()
        })
    }

    /// Records a refusal, unless its caller had many of them.
    pub(super) fn refused(&self, from: IpAddr, entry: &AuditEntry<'_>) {
        if let Some(left_out) = self.take(from) {
            self.write(entry, left_out);
        }
    }

    /// Records a call that changed something.
    pub(super) fn changed(&self, entry: &AuditEntry<'_>) {
        self.write(entry, 0);
    }

    /// Returns the number of lines that were dropped because the disk was too slow.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn write(&self, entry: &AuditEntry<'_>, left_out: u64) {
        let Some(lines) = &self.lines else {
            return;
        };
        let line = Line {
            time: Timestamp::now().to_string(),
            entry,
            left_out,
        };
        let line = serde_json::to_string(&line).unwrap_or_default();
        if lines.try_send(line).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes one of a caller's lines; returns the number of those left out before it. `None` = none is left.
    fn take(&self, from: IpAddr) -> Option<u64> {
        let mut callers = self.callers.lock();
        callers.take(network(from), 1).ok()
    }
}

fn write(mut to: Box<dyn Write + Send>, lines: &Receiver<String>) {
    let mut failing = false;
    for line in lines {
        match writeln!(to, "{line}").and_then(|()| to.flush()) {
            Ok(()) => failing = false,
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "cannot write the audit log; check the disk");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_caller_with_many_refusals_gets_few_lines_and_a_count() {
        let audit = Audit::default();
        let [one, other] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(IpAddr::from);
        let taken = (0..100).filter(|_| audit.take(one).is_some()).count();
        assert_eq!(taken, 10);
        assert_eq!(audit.take(other), Some(0));
        tokio::time::advance(LINES.refill).await;
        assert_eq!(audit.take(one), Some(90));
        assert_eq!(audit.take(one), None);
    }

    #[test]
    fn lines_are_json_with_who_what_and_why() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit");
        let audit = Audit::open(&AuditLog::File(path.clone())).unwrap();
        audit.changed(&AuditEntry {
            decision: "allowed",
            user: "alice",
            action: "update /kplane/fleet",
            text: "a \"quoted\"\ntext",
            ..AuditEntry::default()
        });
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let line = loop {
            let text = std::fs::read_to_string(&path).unwrap();
            if text.ends_with('\n') {
                break text;
            }
            assert!(std::time::Instant::now() < deadline, "no line");
            std::thread::yield_now();
        };
        assert_eq!(line.lines().count(), 1);
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["user"], "alice");
        assert_eq!(value["text"], "a \"quoted\"\ntext");
    }
}
