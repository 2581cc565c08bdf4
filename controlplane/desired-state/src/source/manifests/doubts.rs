//! Reasons why objects may be missing from the known files, by name. Pure.
//!
//! A file that was parsed completely once keeps its last good state, whatever happens to it. A file that never was
//! may hold unknown objects, so a start must not count as their deletion. The same holds for a folder without
//! Services.
//!
//! An object that is parsed but has invalid values (such as a bad address) causes no doubt: its name is known, and
//! it is not served either way. A document that cannot be decoded does cause a doubt, even if its name is
//! readable, because its content is unknown.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Longest doubt, in bytes: a part of it is from the file.
const MAX_DOUBT: usize = 300;
/// Maximum number of doubts that are named at a time; the others are counted.
const MAX_DOUBTS: usize = 100;

/// Reasons why objects may be missing.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    files: BTreeMap<Arc<str>, String>,
    /// Folders that cannot be listed, and files that could never be read.
    pub(super) folder: BTreeSet<String>,
}

impl Doubts {
    /// Sets the reason why a file was never parsed completely; `None` if it was once, or is gone.
    pub(super) fn set(&mut self, file: &Arc<str>, doubt: Option<String>) {
        match doubt {
            Some(doubt) => drop(self.files.insert(file.clone(), doubt)),
            None => drop(self.files.remove(file)),
        }
    }

    /// Returns all doubts, in the order of files. The arguments say whether Services and EndpointSlices are
    /// served.
    pub(super) fn all(&self, has_services: bool, has_slices: bool) -> Vec<String> {
        let nothing = match (has_services, has_slices) {
            (false, _) => Some("there is no Service"),
            (true, false) => Some("there are Services and no EndpointSlice"),
            (true, true) => None,
        };
        let files = self.files.iter().map(|(file, doubt)| format!("{file} {doubt}"));
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
            all.push(format!("{more} further files are incomplete"));
        }
        all
    }
}

/// Returns the reason why a text may be the beginning of a longer one. JSON is not checked, since half of a JSON
/// text is invalid.
pub(super) fn is_cut(text: &str) -> Option<&'static str> {
    if text.trim().is_empty() {
        return Some("is empty; delete it if that is intended");
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
        // Other programs write such files.
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
        assert_eq!(all[MAX_DOUBTS], "5 further files are incomplete");
        assert!(all.iter().all(|doubt| doubt.len() <= MAX_DOUBT + 2));
        doubts.set(&"0000.yaml".into(), None);
        assert!(doubts.all(true, true)[0].starts_with("0001.yaml"));
    }
}
