//! Plain English in comments and messages: rules 1 and 4 of "How we write" in CONTRIBUTING.md, as far as a program can
//! check them.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, ensure};

use super::literals::literals;
use crate::cargo::files;

/// Words with which no doc comment opens: what follows is a fragment that a reader has to decode.
const OPENINGS: [&str; 23] = [
    "Also", "And", "As", "But", "By", "For", "How", "Nobody", "Not", "Of", "So", "Somebody",
    "Those", "What", "Whatever", "When", "Where", "Who", "Whoever", "Whose", "Why", "With",
    "Without",
];

/// Doc comments in percent that may open so.
const MOST_PERCENT: usize = 3;

/// Words of a private dialect; CONTRIBUTING.md names the words to use instead.
const DIALECT: [&str; 18] = [
    "put right",
    "puts right",
    "mend",
    "mends",
    "mended",
    "mending",
    "told",
    "tells",
    "of ours",
    "makes no sense",
    "nobody's",
    "for people",
    "look at",
    "looks at",
    "looked at",
    "looking at",
    "somebody",
    "whoever",
];

/// Further words that no message has. Comments may have them, where they name an actor of the sentence.
const MESSAGE_DIALECT: [&str; 4] = ["nobody", "others", "our", "ours"];

/// Words of the dialect that no identifier has, as a part of it; CONTRIBUTING.md names better ones.
const DIALECT_NAMES: [&str; 16] = [
    "told",
    "mend",
    "mended",
    "meddled",
    "meddling",
    "sentry",
    "belief",
    "inquiry",
    "shelf",
    "glance",
    "papers",
    "occupancy",
    "departing",
    "recall",
    "rival",
    "succession",
];

/// Words that say nothing in a comment, and words in front of an item's name.
const EMPTY: &str = "a an the of for in its is returns pub crate super async unsafe fn const static struct enum trait";

/// Files and folders whose messages are not checked.
const UNCHECKED_MESSAGES: [&str; 1] = [
    // Comments of rules are part of the table: other words would make agents replace it.
    "nodeagent/dataplane/src/backend/nftables/layout.rs",
];

/// Checks the comments and messages of all Rust files but tests and benchmarks.
pub(super) fn check(root: &Path) -> Result<()> {
    let listing = files(root, "*.rs")?;
    let is_code = |file: &&str| !file.contains("tests") && !file.starts_with("bench/");
    let (mut all, mut fragments, mut dialect) = (0, Vec::new(), Vec::new());
    for file in listing.lines().filter(is_code).filter(|file| *file != file!()) {
        // Deleted, and not committed yet.
        let Ok(text) = std::fs::read_to_string(root.join(file)) else {
            continue;
        };
        let places = openings(&text);
        all += places.len();
        let bad = places.into_iter().filter(|(_, word)| OPENINGS.contains(&&**word));
        fragments.extend(bad.map(|(line, word)| format!("{file}:{line}: opens with {word:?}")));
        let mut words = dialect_in(&text);
        words.extend(dialect_in_names(&text));
        if !UNCHECKED_MESSAGES.iter().any(|folder| file.starts_with(folder)) {
            words.extend(dialect_in_messages(&text));
        }
        let repeated = repeats(&text).into_iter();
        dialect.extend(repeated.map(|line| format!("{file}:{line}: only repeats a name")));
        let words = words.into_iter();
        dialect.extend(words.map(|(line, words)| format!("{file}:{line}: {words:?}")));
    }
    let too_many = fragments.len() * 100 > all * MOST_PERCENT;
    for problem in fragments.iter().filter(|_| too_many).chain(&dialect) {
        println!("{problem}");
    }
    ensure!(
        !too_many && dialect.is_empty(),
        "{} of {all} doc comments open with a fragment ({MOST_PERCENT} % may), and {} comments and messages \
         have words of dialect or only repeat a name; CONTRIBUTING.md, \"How we write\", has better ones",
        fragments.len(),
        dialect.len()
    );
    println!(
        "{} of {all} doc comments open with a fragment",
        fragments.len()
    );
    Ok(())
}

/// Returns the first word of each doc comment, with its line.
fn openings(text: &str) -> Vec<(usize, String)> {
    let mut openings = Vec::new();
    let mut inside = false;
    for (index, line) in text.lines().enumerate() {
        let doc = line.trim_start().strip_prefix("///");
        if let (Some(words), false) = (doc, inside) {
            let word = words.trim_start().chars().take_while(char::is_ascii_alphanumeric);
            openings.push((index + 1, word.collect()));
        }
        inside = doc.is_some();
    }
    openings
}

/// Returns the lines where the doc comment of a private item, in one sentence, only repeats the item's name.
fn repeats(text: &str) -> Vec<usize> {
    let lines: Vec<_> = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim_start().starts_with("#["))
        .collect();
    let says = |word: &&str| !word.is_empty() && EMPTY.split(' ').all(|empty| empty != *word);
    let is_doc = |line: &str| line.trim_start().starts_with("///");
    let (mut found, mut is_public) = (Vec::new(), false);
    for window in lines.windows(3) {
        let [(_, above), (index, doc), (_, item)] = window[..] else {
            continue;
        };
        let opens = above.starts_with("pub enum") || above.starts_with("pub trait");
        is_public = opens || is_public && !above.starts_with('}');
        let words = doc.trim_start().strip_prefix("/// ");
        // Help texts of flags have no full stop.
        let words = words.and_then(|words| words.strip_suffix('.')).map(str::to_lowercase);
        let is_private = !is_public && !item.trim_start().starts_with("pub ");
        let (Some(words), true) = (words, is_private && !is_doc(above) && !is_doc(item)) else {
            continue;
        };
        let name = item
            .split(|c: char| c != '_' && !c.is_alphanumeric())
            .find(says)
            .unwrap_or_default()
            .replace('_', "")
            .to_lowercase();
        let mut words = words.split(' ').filter(says);
        if words.all(|word| name.contains(word.trim_end_matches('s'))) {
            found.push(index + 1);
        }
    }
    found
}

/// Returns the words of dialect in comments, with their lines. Code in backquotes is not English.
fn dialect_in(text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some((_, comment)) = line.split_once("//") else {
            continue;
        };
        let english = english(comment);
        let said = DIALECT.into_iter().filter(|words| has_words(&english, words));
        found.extend(said.map(|words| (index + 1, words)));
    }
    found
}

/// Returns the words of dialect in identifiers of code, with their lines, up to the tests of the file.
fn dialect_in_names(text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for (index, line) in code_of(text).lines().enumerate() {
        let code: Vec<&str> =
            line.split("//").next().unwrap_or_default().split('"').step_by(2).collect();
        let parts = parts_of_names(&code.join(" "));
        let said = DIALECT_NAMES.into_iter().filter(|word| parts.contains(*word));
        found.extend(said.map(|word| (index + 1, word)));
    }
    found
}

/// Returns the words of all identifiers in small letters: those of `NodeName` and `node_name` are `node` and `name`.
fn parts_of_names(code: &str) -> BTreeSet<String> {
    let (mut parts, mut part) = (BTreeSet::new(), String::new());
    let mut was_small = false;
    for c in code.chars().chain([' ']) {
        if !c.is_ascii_alphanumeric() || c.is_ascii_uppercase() && was_small {
            parts.insert(std::mem::take(&mut part));
        }
        was_small = c.is_ascii_lowercase();
        part.extend(c.is_ascii_alphanumeric().then_some(c.to_ascii_lowercase()));
    }
    parts
}

/// Returns the words of dialect in string literals, with their lines, up to the tests of the file.
fn dialect_in_messages(text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for (line, message) in literals(code_of(text)) {
        let english = english(&message);
        let all = DIALECT.into_iter().chain(MESSAGE_DIALECT);
        let said = all.filter(|words| has_words(&english, words));
        found.extend(said.map(|words| (line, words)));
    }
    found
}

/// Returns a file without its tests.
fn code_of(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or_default()
}

/// Returns a text in small letters, without the code in backquotes.
fn english(text: &str) -> String {
    let parts: Vec<&str> = text.split('`').step_by(2).collect();
    parts.join(" ").to_lowercase()
}

/// Whether a text has these words, and not as parts of others.
fn has_words(text: &str, words: &str) -> bool {
    let joins = |c: char| c.is_alphanumeric() || "-_".contains(c);
    let is_apart = |c: Option<char>| c.is_none_or(|c| !joins(c));
    text.match_indices(words).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + words.len()..]);
        is_apart(before.chars().next_back()) && is_apart(after.chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doc_comments_are_found_with_their_first_word() {
        let text = "/// Of a node.\n/// By day.\nfn a() {}\n    /// Returns it.\n    fn b() {}\n// For us.\n";
        let found = openings(text);
        assert_eq!(found, [(1, "Of".to_owned()), (4, "Returns".to_owned())]);
    }

    #[test]
    fn comments_of_private_items_that_repeat_a_name_are_found() {
        let text = "\n/// The long names.\nfn long_name() {}\n/// A name of a node.\nconst NODE: u8 = 1;\n\
                    pub enum A {\n    /// A node.\n    Node,\n}\nstruct B {\n    /// Its node.\n    #[x]\n    node: u8,\n}\n";
        assert_eq!(repeats(text), [2, 11]);
    }

    #[test]
    fn dialect_counts_in_comments_as_whole_words_and_not_in_code() {
        let text =
            "let told = 1; // whoever asks\n/// `told` is amended.\n//! Is told.\nlet mend = 2;\n";
        assert_eq!(dialect_in(text), [(1, "whoever"), (3, "told")]);
    }

    #[test]
    fn dialect_counts_as_a_part_of_names() {
        let text = "let untold = \"told\"; // told\nfn is_told() {}\nstruct PodTold;\nconst TOLD: u8 = 1;\n#[cfg(test)]\nmod tests {\nlet told = 1;\n";
        let lines: Vec<usize> = dialect_in_names(text).into_iter().map(|(line, _)| line).collect();
        assert_eq!(lines, [2, 3, 4]);
    }

    #[test]
    fn dialect_counts_in_messages_and_not_in_tests() {
        let code = "fn ours() {\n    info!(\"it is put \\\n        right, {ours}\");\n    run(\"--others\");\n}\n";
        let tests = "\n#[cfg(test)]\nmod tests {\n    const TOLD: &str = \"told\";\n}\n";
        let found = dialect_in_messages(&format!("{code}{tests}"));
        assert_eq!(found, [(2, "put right")]);
        assert_eq!(dialect_in_messages("// \"told\"\n"), []);
    }
}
