//! Checks that every link between the documents leads to a file, and to a heading of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Result, ensure};

use crate::cargo::files;

/// The folder of the book, and the page that lists its pages.
const BOOK: &str = "docs";
const SUMMARY: &str = "docs/SUMMARY.md";

/// Where readers of the book find the rest of the tree.
const TREE: &str = "https://github.com/kplane/kplane/blob/main/";

/// A document: its links with their lines, and the anchors of its headings.
#[derive(Default)]
struct Document {
    links: Vec<(usize, String)>,
    anchors: BTreeSet<String>,
}

/// Checks all Markdown files under version control, and that the book's list of pages is complete.
pub(super) fn check(root: &Path) -> Result<()> {
    let listing = files(root, "*.md")?;
    let mut documents = BTreeMap::new();
    for file in listing.lines().filter(|file| root.join(file).exists()) {
        let text = fs::read_to_string(root.join(file))?;
        documents.insert(PathBuf::from(file), document(&text));
    }
    let mut problems = Vec::new();
    for (file, document) in &documents {
        for (line, link) in &document.links {
            if let Err(problem) = leads(root, &documents, file, link) {
                problems.push(format!("{}:{line}: {link}: {problem}", file.display()));
            }
        }
    }
    problems.extend(missing_pages(&documents));
    for problem in &problems {
        println!("{problem}");
    }
    ensure!(problems.is_empty(), "{} problems", problems.len());
    Ok(())
}

/// Returns the pages of the book's folder that its list lacks.
fn missing_pages(documents: &BTreeMap<PathBuf, Document>) -> Vec<String> {
    let listed: BTreeSet<PathBuf> = documents
        .get(Path::new(SUMMARY))
        .into_iter()
        .flat_map(|summary| &summary.links)
        .map(|(_, link)| Path::new(BOOK).join(link))
        .collect();
    documents
        .keys()
        .filter(|file| {
            let in_book = file.parent() == Some(Path::new(BOOK));
            in_book && *file != Path::new(SUMMARY)
        })
        .filter(|page| !listed.contains(*page))
        .map(|page| format!("{SUMMARY}: {} is not in the book", page.display()))
        .collect()
}

/// Checks one link of a file.
fn leads(
    root: &Path,
    documents: &BTreeMap<PathBuf, Document>,
    from: &Path,
    link: &str,
) -> Result<(), String> {
    if let Some(path) = link.strip_prefix(TREE) {
        return leads(root, documents, Path::new(""), path);
    }
    if link.contains("://") || link.starts_with("mailto:") {
        return Ok(());
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = match path {
        "" => from.to_owned(),
        path => plain(&from.parent().unwrap_or(Path::new("")).join(path)),
    };
    if !documents.contains_key(&target) && !root.join(&target).exists() {
        return Err(format!("there is no {}", target.display()));
    }
    match documents.get(&target) {
        Some(document) if !anchor.is_empty() && !document.anchors.contains(anchor) => {
            Err(format!("{} has no heading #{anchor}", target.display()))
        }
        _ => Ok(()),
    }
}

/// Resolves `..` without asking the file system.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

fn document(text: &str) -> Document {
    let mut document = Document::default();
    let mut fenced = false;
    for (number, line) in text.lines().enumerate() {
        if line.starts_with("```") {
            fenced = !fenced;
        }
        if fenced || line.starts_with("    ") {
            continue;
        }
        if line.starts_with('#') {
            document.anchors.insert(anchor(line.trim_start_matches('#')));
        }
        let links = links(line).map(|link| (number + 1, link));
        document.links.extend(links);
    }
    document
}

/// Returns the targets of the links `[..](target)` in a line.
fn links(line: &str) -> impl Iterator<Item = String> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()))
}

/// Returns the anchor that hosts of Markdown and mdBook give a heading.
fn anchor(heading: &str) -> String {
    heading
        .trim()
        .chars()
        .filter_map(|letter| match letter {
            ' ' => Some('-'),
            '-' | '_' => Some(letter),
            letter if letter.is_alphanumeric() => Some(letter.to_ascii_lowercase()),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents() -> BTreeMap<PathBuf, Document> {
        let page = "# A page's `heading`, twice\nsee [b](b.md#c) and [d](d.md)\n    [no](x)\n";
        [
            ("docs/a.md", page),
            ("docs/b.md", "## C\n"),
            (SUMMARY, "[A](a.md)"),
        ]
        .map(|(file, text)| (PathBuf::from(file), document(text)))
        .into_iter()
        .collect()
    }

    #[test]
    fn links_and_anchors_of_a_page() {
        let documents = documents();
        let page = &documents[Path::new("docs/a.md")];
        assert_eq!(
            page.links,
            [(2, "b.md#c".to_owned()), (2, "d.md".to_owned())]
        );
        assert!(page.anchors.contains("a-pages-heading-twice"));
        assert_eq!(
            missing_pages(&documents),
            ["docs/SUMMARY.md: docs/b.md is not in the book"]
        );
    }

    #[test]
    fn a_link_needs_its_file_and_heading() {
        let root = crate::cargo::root().unwrap();
        let documents = documents();
        let check = |link| leads(root, &documents, Path::new("docs/a.md"), link);
        assert_eq!(check("https://example.com/"), Ok(()));
        assert_eq!(check("../README.md"), Ok(()));
        assert_eq!(check("reasons.md"), Ok(()));
        assert!(check("nowhere.md").is_err());
        assert_eq!(check("#a-pages-heading-twice"), Ok(()));
        assert!(check("#c").is_err());
    }
}
