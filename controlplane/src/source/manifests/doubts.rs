//! What may be missing from the files as this process knows them, by name. Pure.
//!
//! A file that was understood once keeps its last good state, whatever becomes of it. A file that never
//! was may hold objects that nobody here knows of: then a start must not be taken for a deletion. So may a
//! folder without Services.
//!
//! An object that is understood and refused by what it means (an address that is none) is no doubt: its
//! name is known, and it is as little served at a start as after a change. A document that cannot be
//! decoded is one, although its name may be readable: what it says is not known.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Longest doubt, in bytes: a part of it is from the file.
const MAX_DOUBT: usize = 300;
/// Doubts that are told at a time; the rest is counted.
const MAX_DOUBTS: usize = 100;

/// Reasons why objects may be missing.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    files: BTreeMap<Arc<str>, String>,
    /// Folders that cannot be listed, and files that nobody could read so far.
    pub(super) folder: BTreeSet<String>,
}

impl Doubts {
    /// Why a file was never understood completely; `None` if it was once, or is gone.
    pub(super) fn set(&mut self, file: &Arc<str>, doubt: Option<String>) {
        match doubt {
            Some(doubt) => drop(self.files.insert(file.clone(), doubt)),
            None => drop(self.files.remove(file)),
        }
    }

    /// All of them, in the order of files, for what is served: so many Services, and endpoints or not.
    pub(super) fn all(&self, has_services: bool, has_slices: bool) -> Vec<String> {
        let nothing = match (has_services, has_slices) {
            (false, _) => Some("there is no Service"),
            (true, false) => Some("there are Services and no EndpointSlice"),
            (true, true) => None,
        };
        let files = self
            .files
            .iter()
            .map(|(file, doubt)| format!("{file} {doubt}"));
        let mut all: Vec<String> = self.folder.iter().cloned().collect();
        all.extend(files);
        all.extend(nothing.map(str::to_owned));
        for doubt in &mut all {
            if doubt.len() > MAX_DOUBT {
                doubt.truncate(doubt.floor_char_boundary(MAX_DOUBT));
                doubt.push_str("..");
            }
        }
        if all.len() > MAX_DOUBTS {
            let more = all.len() - MAX_DOUBTS;
            all.truncate(MAX_DOUBTS);
            all.push(format!("{more} further files are not whole"));
        }
        all
    }
}

/// Whether a text may be the beginning of a longer one. JSON need not be asked: half of it is none.
pub(super) fn is_cut(text: &str) -> Option<&'static str> {
    if text.trim().is_empty() {
        return Some("is empty; if that is meant, delete it");
    }
    let ends = text.ends_with('\n') || text.trim_end().ends_with(['}', ']']);
    (!ends).then_some("ends in the middle of a line and may be cut off; end it with a line break")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_may_be_cut_off() {
        let cut = |text| is_cut(text).is_some();
        assert!(cut("") && cut(" \n\n"));
        assert!(cut("kind: Service\nmeta") && cut("---\nkind: Serv"));
        assert!(!cut("kind: Service\n") && !cut("# nothing yet\n"));
        // As other programs write it.
        assert!(!cut("{\"kind\": \"List\"}") && !cut("items: []"));
    }

    #[test]
    fn doubts_are_bounded() {
        let mut doubts = Doubts::default();
        for n in 0..MAX_DOUBTS + 5 {
            doubts.set(&format!("{n:04}.yaml").into(), Some("ä".repeat(1_000)));
        }
        let all = doubts.all(true, true);
        assert_eq!(all.len(), MAX_DOUBTS + 1);
        assert_eq!(all[MAX_DOUBTS], "5 further files are not whole");
        assert!(all.iter().all(|doubt| doubt.len() <= MAX_DOUBT + 2));
        doubts.set(&"0000.yaml".into(), None);
        assert!(doubts.all(true, true)[0].starts_with("0001.yaml"));
    }
}
