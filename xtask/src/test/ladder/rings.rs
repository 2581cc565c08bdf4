//! Rings of modules that use each other. Every folder of a crate is a level: a file, with the folder of the same name, is
//! one module of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};

use super::read;

/// Which modules of a level use which others of it.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Finds the shortest ring of each level below a folder `src`, as text.
pub(super) fn find(src: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    list(src, &mut names)?;
    let files = names.into_iter().map(|name| {
        let text = read(&src.join(&name))?;
        Ok((name, text))
    });
    let levels = levels(&files.collect::<Result<Vec<_>>>()?);
    Ok(levels
        .iter()
        .filter_map(|(level, uses)| {
            let ring = ring(uses)?.join(" -> ");
            Some(format!("crate{level}: {ring}"))
        })
        .collect())
}

/// Lists Rust files below a folder by their paths from `src`.
pub(super) fn list(src: &Path, files: &mut Vec<String>) -> Result<()> {
    fn below(src: &Path, folder: &Path, files: &mut Vec<String>) -> Result<()> {
        let entries = std::fs::read_dir(folder)
            .with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                below(src, &path, files)?;
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let short = path.strip_prefix(src)?;
                files.push(short.to_string_lossy().into_owned());
            }
        }
        Ok(())
    }
    below(src, src, files)
}

/// Returns the uses of each level that has some, by its path from the root. The root of the crate, programs and tests may
/// use everything; a module and those in its folder may use each other.
fn levels(files: &[(String, String)]) -> BTreeMap<String, Uses> {
    let module = |file| -> Vec<&str> { str::trim_end_matches(file, ".rs").split('/').collect() };
    let modules: BTreeSet<Vec<&str>> = files.iter().map(|(file, _)| module(file)).collect();
    let mut levels: BTreeMap<String, Uses> = BTreeMap::new();
    for (file, text) in files {
        if ["lib.rs", "main.rs"].contains(&&**file) || file.contains("tests") {
            continue;
        }
        let (from, code) = (module(file), code(text));
        for path in named(&from, &code) {
            let mut beginnings = (1..=path.len()).rev().map(|len| &path[..len]);
            let Some(to) = beginnings.find(|path| modules.contains(*path)) else {
                continue;
            };
            let common = from.iter().zip(to).take_while(|(a, b)| a == b).count();
            if let (Some(user), Some(used)) = (from.get(common), to.get(common)) {
                let level = from[..common].iter().map(|name| format!("::{name}"));
                let uses = levels.entry(level.collect()).or_default();
                let used_modules = uses.entry((*user).to_owned()).or_default();
                used_modules.insert((*used).to_owned());
            }
        }
    }
    levels
}

/// Returns a file's lines up to its tests, without comments.
pub(super) fn code(text: &str) -> String {
    let code = text.split("\n#[cfg(test)]\nmod tests {").next();
    code.unwrap_or_default()
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// Returns the paths from the root of the crate that the code of a module names by `crate::` or `super::`.
fn named<'a>(module: &[&'a str], code: &'a str) -> Vec<Vec<&'a str>> {
    let (mut paths, mut rest) = (Vec::new(), code);
    let next = |rest: &str| ["crate::", "super::"].map(|word| rest.find(word));
    while let Some(start) = next(rest).into_iter().flatten().min() {
        rest = read_paths(&rest[start..], module, &mut paths);
    }
    paths
}

/// Reads a path, or a list of paths in braces, that continues another path. Returns the text behind it.
fn read_paths<'a>(text: &'a str, from: &[&'a str], paths: &mut Vec<Vec<&'a str>>) -> &'a str {
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = rest.trim_start_matches(|c: char| c == ',' || c.is_whitespace());
            match rest.strip_prefix('}') {
                Some(rest) => return rest,
                None if rest.is_empty() => return rest,
                None => rest = read_paths(rest, from, paths),
            }
            // An item may end with `as name`.
            rest = &rest[rest.find([',', '}']).unwrap_or(rest.len())..];
        }
    }
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let (word, rest) = text.split_at(text.find(|c| !is_word(c)).unwrap_or(text.len()));
    let mut path = from.to_vec();
    match word {
        "crate" => path.clear(),
        "super" => drop(path.pop()),
        "self" | "" => {}
        name => path.push(name),
    }
    match rest.strip_prefix("::") {
        Some(rest) => read_paths(rest, &path, paths),
        None => {
            paths.push(path);
            rest
        }
    }
}

/// A ring of modules, the first one again at the end.
fn ring(uses: &Uses) -> Option<Vec<String>> {
    uses.keys().filter_map(|start| way(uses, start, start)).min_by_key(Vec::len)
}

/// The shortest way along uses from one module to another, at least one step long.
fn way(uses: &Uses, from: &str, to: &str) -> Option<Vec<String>> {
    let mut ways = vec![vec![from.to_owned()]];
    let mut seen = BTreeSet::new();
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            let next = way.last().and_then(|last| uses.get(last));
            for name in next.into_iter().flatten() {
                let mut longer_way = way.clone();
                longer_way.push(name.clone());
                if name == to {
                    return Some(longer_way);
                }
                if seen.insert(name.clone()) {
                    longer.push(longer_way);
                }
            }
        }
        ways = longer;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(edges: &[(&str, &str)]) -> Uses {
        let mut uses = Uses::new();
        for (from, to) in edges {
            let others = uses.entry((*from).to_owned()).or_default();
            others.insert((*to).to_owned());
        }
        uses
    }

    #[test]
    fn a_ring_is_named_with_all_its_modules() {
        assert_eq!(ring(&uses(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
        let found = ring(&uses(&[("a", "b"), ("b", "c"), ("c", "b")]));
        assert_eq!(found.unwrap(), ["b", "c", "b"]);
    }

    fn levels_of(files: &[(&str, &str)]) -> BTreeMap<String, Uses> {
        let files = files.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned()));
        levels(&files.collect::<Vec<_>>())
    }

    #[test]
    fn a_ring_is_found_at_an_inner_level_and_only_there() {
        let levels = levels_of(&[
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "use crate::b::B;\n"),
            ("a/one.rs", "use super::two::Two;\nuse super::A;\n"),
            ("a/two.rs", "use crate::a::three::Three;\n"),
            ("a/three/deep.rs", "use super::super::one;\n"),
            ("a/three.rs", "use self::deep::Deep;\n"),
            ("a/tests.rs", "use crate::a::one;\n"),
            ("b.rs", ""),
        ]);
        assert_eq!(levels[""], uses(&[("a", "b")]));
        let found = ring(&levels["::a"]);
        assert_eq!(found.unwrap(), ["one", "two", "three", "one"]);
        assert_eq!(levels.len(), 2);
    }

    #[test]
    fn lists_may_be_nested() {
        let code = "use crate::{one::{self, Two as T, three::{A, B}}, four::Five};\n\
                    f(a, super::six::<u8>(b, c));\n";
        let paths: Vec<String> =
            named(&["a", "b"], code).iter().map(|path| path.join(" ")).collect();
        let inner = ["one", "one Two", "one three A", "one three B"];
        assert_eq!(paths[..4], inner);
        assert_eq!(paths[4..], ["four Five", "a six"]);
    }

    #[test]
    fn code_ends_at_tests_within_the_file_and_has_no_comments() {
        let text = "#[cfg(test)]\nmod tests;\nuse crate::one;\n// crate::two\n\n\
                    #[cfg(test)]\nmod tests {\n    use crate::three;\n}\n";
        assert_eq!(named(&["a"], &code(text)), [["one"]]);
    }
}
