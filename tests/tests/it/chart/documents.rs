//! The commands in the documents about installation and operation: each is run by a test on a real cluster.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::chart::root;

/// The documents, and the least number of commands that each has.
const DOCUMENTS: [(&str, usize); 3] = [
    ("install.md", 6),
    ("operations.md", 9),
    ("migrate-from-kube-proxy.md", 13),
];

/// The beginning of a comment before a block that no test runs, with the reason.
const MARK: &str = "<!-- not run by a test: ";

/// What a test runs with the name of another node.
const OTHER_NODES: [(&str, &str); 1] = [("--node node-3", "--node node-1")];

pub(in crate::chart) fn each_documented_command_is_run_on_a_real_cluster() -> Result<()> {
    let tests = tests()?;
    for (document, least) in DOCUMENTS {
        let path = root().join("docs").join(document);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let commands = commands(&text);
        ensure!(commands.len() >= least, "{document}: {commands:?}");
        for mut command in commands {
            for (written, run) in OTHER_NODES {
                command = command.replace(written, run);
            }
            ensure!(
                tests.contains(&format!("\"{command}\"")),
                "{document}: no test in tests/tests/it/installed runs `{command}`; if none can, say why in a line before \
                 its block: {MARK}REASON -->"
            );
        }
    }
    Ok(())
}

/// Returns the commands in the blocks of a document that have no mark, without comments and with lines joined.
fn commands(text: &str) -> Vec<String> {
    let text = text.replace("\\\n", " ");
    let (mut marked, mut commands) = (false, Vec::new());
    for line in text.lines() {
        let is_code = line.starts_with("    ");
        if is_code && !marked {
            let command = line.split(" #").next().unwrap_or_default();
            commands.push(joined(command));
        } else if !is_code && !line.trim().is_empty() {
            marked = line.trim_start().starts_with(MARK);
        }
    }
    commands
}

/// Returns the source of the tests, with the lines of long texts joined.
fn tests() -> Result<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/installed");
    let mut all = String::new();
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        all += &fs::read_to_string(entry?.path())?.replace("\\\n", " ");
    }
    Ok(joined(&all))
}

/// Returns a text with one space between two words.
fn joined(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

pub(in crate::chart) fn blocks_without_a_mark_have_commands() -> Result<()> {
    let text = "Type:\n\n    helm install \\\n      one    # soon\n\n    kpctl check\n\n\
        1. First:\n\n       kpctl why\n\n<!-- not run by a test: no cloud here -->\n\n    cloud delete\n\nThen:\n\n    kpctl status\n";
    let expected = [
        "helm install one",
        "kpctl check",
        "kpctl why",
        "kpctl status",
    ];
    assert_eq!(commands(text), expected);
    Ok(())
}
