//! What other programs do to the rules of a backend: `tampering.txt`.

use anyhow::{Result, ensure};
use kplane_model::Family;

/// Something that other programs do.
#[derive(Debug)]
pub(crate) struct Tampering {
    /// What is wrong afterwards.
    pub(crate) what: &'static str,
    /// The family in which it is seen.
    pub(crate) family: Family,
    pub(crate) commands: Vec<&'static str>,
}

/// Returns what may be done to a backend.
pub(crate) fn tamperings(backend: &str) -> Result<Vec<Tampering>> {
    let (mut section, mut all) = ("", Vec::new());
    for line in include_str!("tampering.txt").lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']');
        }
        let (family, rest) = line.split_at(line.len().min(2));
        let family = match family {
            "4 " => Family::V4,
            "6 " => Family::V6,
            _ => continue,
        };
        if let (true, Some((what, commands))) = (section == backend, rest.split_once("| ")) {
            all.push(Tampering {
                what: what.trim_end(),
                family,
                commands: commands.split("; ").collect(),
            });
        }
    }
    ensure!(!all.is_empty(), "nothing is done to {backend}");
    Ok(all)
}

/// Returns the lines that only the first of two lists has.
pub(crate) fn only<'a>(these: &'a [String], those: &[String]) -> Vec<&'a String> {
    these.iter().filter(|line| !those.contains(line)).collect()
}
