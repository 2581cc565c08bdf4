//! The catalog of objects in all files: file contents in, events out, no I/O.
//!
//! Invariants: an object is deleted only when a file that held it was parsed completely, or is gone
//! (invariant: absence). Of several objects with one
//! identity, the first one is served, in the order of file names and documents. Every event reports
//! a real difference.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use kplane_model::{Issue, ObjectRef, Reason, Severity};

use super::claims::{ObjectClaim, ObjectClaims};
use super::document::{Contents, FilePosition, Memo, read};
use super::doubts::{Doubts, is_cut};
use super::object::{Keeps, ParsedItem, Problem};
use super::{Loaded, MAX_ISSUES, MAX_OBJECTS};
use crate::k8s::{Kind, Object, ObjectId};
use crate::source::{Event, Located};

#[cfg(test)]
mod tests;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FileChange {
    /// The file was read completely.
    Contents(Vec<u8>),
    /// The file exists and cannot be read, for this reason.
    Unreadable(String),
    /// The file does not exist.
    Gone,
    /// The file was removed, and nothing else has changed.
    Removed,
}

/// The state of a source of manifests.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    files: BTreeMap<Arc<str>, File>,
    claims: ObjectClaims,
    served: BTreeMap<ObjectId, Arc<Object>>,
    /// Problems of the folder as a whole.
    notices: Vec<Issue>,
    reported_issues: Vec<Issue>,
    doubts: Doubts,
    reported_doubts: Vec<String>,
}

/// A file and its objects.
#[derive(Debug, Default)]
struct File {
    ids: HashSet<ObjectId>,
    issues: Vec<Issue>,
    memo: Memo,
    /// The file was parsed completely, now or earlier.
    was_whole: bool,
}

/// A file between its old state and the new.
struct Update {
    file: Arc<str>,
    before: Vec<(ObjectId, ObjectClaim)>,
    /// The reason why the file may contain more than was read.
    cut: Option<&'static str>,
    problems: Vec<(Option<FilePosition>, Problem)>,
    keeps_all: bool,
    keeps: HashSet<ObjectId>,
}

impl Catalog {
    /// Returns the number of objects that are served.
    pub(super) fn len(&self) -> usize {
        self.served.len()
    }

    /// Applies changes of files, and the problems of the folder as a whole; returns the
    /// differences.
    pub(super) fn apply(
        &mut self,
        changes: impl IntoIterator<Item = (Arc<str>, FileChange)>,
        notices: Vec<Issue>,
    ) -> Vec<Event> {
        let mut touched = BTreeSet::new();
        let mut removed = HashSet::new();
        let updates: Vec<Update> = changes
            .into_iter()
            .map(|(file, change)| {
                if change == FileChange::Removed
                    && let Some(file) = self.files.get(&file)
                {
                    removed.extend(file.ids.iter().cloned());
                }
                self.replace(file, change, &mut touched)
            })
            .collect();
        // Only after all files is it known which objects have moved to another file.
        for update in updates {
            self.keep(update);
        }
        let mut events: Vec<Event> = touched.into_iter().filter_map(|id| self.settle(id)).collect();
        gather_vanished(&mut events, &removed);
        self.notices = notices;
        let issues = self.issues();
        if issues != self.reported_issues {
            self.reported_issues.clone_from(&issues);
            events.push(Event::Issues(issues));
        }
        let doubts = self.doubts.all(self.serves(Kind::Service), self.serves(Kind::EndpointSlice));
        if doubts != self.reported_doubts {
            self.reported_doubts.clone_from(&doubts);
            events.push(Event::Doubts(doubts));
        }
        events
    }

    /// Sets the folders that cannot be listed, and the files that could never be read: their
    /// content is unknown. Passed on with the next change.
    pub(super) fn set_unseen(&mut self, unseen: BTreeSet<String>) {
        self.doubts.folder = unseen;
    }

    /// Returns whether an object of the kind is served.
    fn serves(&self, kind: Kind) -> bool {
        let first = ObjectId {
            kind,
            namespace: "".into(),
            name: "".into(),
        };
        let next = self.served.range(first..).next();
        next.is_some_and(|(id, _)| id.kind == kind)
    }

    /// Returns all objects, as at the start.
    pub(super) fn snapshot(&self) -> Vec<Event> {
        let mut events = Vec::with_capacity(self.served.len() + 16);
        for kind in Kind::WITH_POLICIES {
            events.push(Event::Init(kind));
            let of_kind = self.served.keys().filter(|id| id.kind == kind);
            let located = of_kind.filter_map(|id| self.located(id));
            events.extend(located.map(|located| Event::InitApply(Box::new(located))));
            events.push(Event::InitDone(kind));
        }
        events.push(Event::Issues(self.reported_issues.clone()));
        events.push(Event::Doubts(self.reported_doubts.clone()));
        events
    }

    /// Returns all objects and problems, for a check.
    pub(super) fn into_loaded(self) -> Loaded {
        Loaded {
            objects: self.served.keys().filter_map(|id| self.located(id)).collect(),
            issues: self.reported_issues,
            doubts: self.reported_doubts,
        }
    }

    fn located(&self, id: &ObjectId) -> Option<Located> {
        let claim = self.claims.first(id)?;
        Some(Located {
            object: Object::clone(&claim.object),
            location: claim.to_string().into(),
        })
    }

    /// Replaces the objects of a file; the caller then restores those that must not be deleted.
    fn replace(
        &mut self,
        file: Arc<str>,
        change: FileChange,
        touched: &mut BTreeSet<ObjectId>,
    ) -> Update {
        let old = self.files.remove(&file).unwrap_or_default();
        let mut update = Update {
            before: self.claims.release(&file, &old.ids),
            file,
            cut: None,
            problems: Vec::new(),
            keeps_all: false,
            keeps: HashSet::new(),
        };
        touched.extend(old.ids);
        let mut new = File {
            was_whole: old.was_whole,
            ..File::default()
        };
        match change {
            FileChange::Gone | FileChange::Removed => {
                self.doubts.set(&update.file, None);
                return update;
            }
            FileChange::Unreadable(reason) => {
                update.refuse_file(format!("cannot be read: {reason}"));
            }
            FileChange::Contents(bytes) => match String::from_utf8(bytes) {
                Err(error) => {
                    let line = line_of(error.as_bytes(), error.utf8_error().valid_up_to());
                    update.refuse_file(format!("is not UTF-8 text (line {line}); convert it"));
                }
                Ok(text) => {
                    update.cut = is_cut(&text);
                    let is_json = update.file.ends_with(".json");
                    let contents = read(&text, is_json, &old.memo);
                    self.take_in(contents, &mut update, &mut new, touched);
                }
            },
        }
        self.files.insert(update.file.clone(), new);
        update
    }

    fn take_in(
        &mut self,
        contents: Contents,
        update: &mut Update,
        new: &mut File,
        touched: &mut BTreeSet<ObjectId>,
    ) {
        if self.claims.len() + contents.found.len() > MAX_OBJECTS {
            update.refuse_file(format!(
                "would bring the number of objects over {MAX_OBJECTS} and is refused; remove some"
            ));
            return;
        }
        if contents.blank && !update.before.is_empty() {
            update.keep_all(
                Severity::Warning,
                "is empty; delete the file to remove its objects".to_owned(),
            );
            return;
        }
        new.memo = contents.memo;
        for (index, (place, found)) in contents.found.into_iter().enumerate() {
            match found {
                ParsedItem::Problem(problem) => update.refuse(place, problem),
                ParsedItem::Object(id, object) => {
                    touched.insert(id.clone());
                    new.ids.insert(id.clone());
                    let claim = ObjectClaim {
                        kept: false,
                        file: update.file.clone(),
                        index,
                        place,
                        object,
                    };
                    self.claims.add(id, claim);
                }
            }
        }
    }

    /// Keeps objects that an update must not delete, and adds an issue about them.
    fn keep(&mut self, update: Update) {
        let doubt = update.doubt();
        let mut kept = HashSet::new();
        for (index, (id, claim)) in update.before.into_iter().enumerate() {
            let keeps = update.keeps_all || update.keeps.contains(&id);
            if !keeps || self.claims.contains(&id) {
                continue;
            }
            let Some(file) = self.files.get_mut(&update.file) else {
                continue;
            };
            file.ids.insert(id.clone());
            kept.insert(id.clone());
            let kept = true;
            self.claims.add(
                id,
                ObjectClaim {
                    kept,
                    index,
                    ..claim
                },
            );
        }
        let Some(file) = self.files.get_mut(&update.file) else {
            return;
        };
        file.was_whole |= doubt.is_none();
        let doubt = if file.was_whole { None } else { doubt };
        self.doubts.set(&update.file, doubt);
        for (place, problem) in update.problems {
            let keeps = match &problem.keeps {
                Keeps::Nothing => String::new(),
                Keeps::Object(id) if kept.contains(id) => "; its last good state stays".to_owned(),
                Keeps::Object(_) => String::new(),
                Keeps::All => keeps_note(kept.len()),
            };
            let location = place.map(|place| format!(", {place}")).unwrap_or_default();
            file.issues.push(Issue {
                severity: problem.severity,
                code: Reason::Unreadable,
                location: format!("{}{location}", update.file),
                object: problem.object,
                reason: problem.reason + &keeps,
            });
        }
    }

    /// Decides which claim counts; returns an event if the served object changes.
    fn settle(&mut self, id: ObjectId) -> Option<Event> {
        self.claims.settle(&id);
        let Some(winner) = self.claims.first(&id) else {
            return self.served.remove(&id).map(|_| Event::Delete(id));
        };
        if self.served.get(&id).is_some_and(|served| same(served, &winner.object)) {
            return None;
        }
        self.served.insert(id.clone(), winner.object.clone());
        self.located(&id).map(|located| Event::Apply(Box::new(located)))
    }

    /// Returns all current problems, those of the folder first, then by file.
    fn issues(&self) -> Vec<Issue> {
        let of_files = self.files.values().flat_map(|file| &file.issues);
        let mut issues: Vec<Issue> = self.notices.iter().chain(of_files).cloned().collect();
        issues.extend(self.claims.duplicates());
        if issues.len() > MAX_ISSUES {
            issues.sort_by_key(|issue| std::cmp::Reverse(issue.severity));
            let omitted = issues.len() - MAX_ISSUES;
            issues.truncate(MAX_ISSUES);
            issues.push(Issue {
                severity: Severity::Warning,
                code: Reason::MoreProblems,
                location: String::new(),
                object: spoken_of("input"),
                reason: format!("{omitted} further problems are not listed; fix these first"),
            });
        }
        issues
    }
}

/// Joins the deletions of all objects that no file names any more into one event. Objects of
/// removed files are deleted by name.
fn gather_vanished(events: &mut Vec<Event>, removed: &HashSet<ObjectId>) {
    let vanished: Vec<ObjectId> = events
        .extract_if(.., |event| match event {
            Event::Delete(id) => !removed.contains(id),
            _ => false,
        })
        .filter_map(|event| match event {
            Event::Delete(id) => Some(id),
            _ => None,
        })
        .collect();
    if !vanished.is_empty() {
        events.push(Event::Vanished(vanished));
    }
}

/// Compares two objects. An object that was not read again is the same allocation, which is fast to
/// compare.
fn same(a: &Arc<Object>, b: &Arc<Object>) -> bool {
    Arc::ptr_eq(a, b) || a == b
}

fn keeps_note(kept: usize) -> String {
    match kept {
        0 => String::new(),
        kept => format!("; {}", keep(kept, " of this file")),
    }
}

/// Returns text for issues: objects keep their last good state.
pub(super) fn keep(objects: usize, of: &str) -> String {
    match objects {
        1 => format!("1 object{of} keeps its last good state"),
        n => format!("{n} objects{of} keep their last good state"),
    }
}

/// Returns a reference to something that is not an object.
fn spoken_of(what: &str) -> ObjectRef {
    ObjectRef::new(what, "", "")
}

fn line_of(bytes: &[u8], offset: usize) -> usize {
    1 + bytes.iter().take(offset).filter(|b| **b == b'\n').count()
}

// === impl Update ===

impl Update {
    /// Refuses the whole file.
    fn refuse_file(&mut self, reason: String) {
        self.keep_all(Severity::Error, reason);
    }

    fn keep_all(&mut self, severity: Severity, reason: String) {
        self.keeps_all = true;
        let problem = Problem {
            severity,
            object: spoken_of("file"),
            reason,
            keeps: Keeps::All,
        };
        self.problems.push((None, problem));
    }

    /// Returns the reason why objects of the file may be missing, if it was never parsed completely
    /// before.
    fn doubt(&self) -> Option<String> {
        let keeps = |problem: &Problem| problem.keeps != Keeps::Nothing;
        let mut refused = self.problems.iter().filter(|(_, problem)| keeps(problem));
        let Some((place, first)) = refused.next() else {
            return self.cut.map(str::to_owned);
        };
        Some(match (place, refused.count()) {
            (None, _) => first.reason.clone(),
            (Some(place), 0) => format!("is refused in {place}: {}", first.reason),
            (Some(place), more) => format!(
                "is refused in {place}: {}, and in {more} other places",
                first.reason
            ),
        })
    }

    fn refuse(&mut self, place: FilePosition, problem: Problem) {
        match &problem.keeps {
            Keeps::Nothing => {}
            Keeps::All => self.keeps_all = true,
            Keeps::Object(id) => {
                self.keeps.insert(id.clone());
            }
        }
        self.problems.push((Some(place), problem));
    }
}
