//! Names of types: no two types of a crate have the same one, so that a reader knows a type without its path.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::cargo::files;

/// Parts of paths whose types do not ship, and the file that is built instead of another one without a feature.
const ASIDE: [&str; 6] = [
    "tests",
    "tests.rs",
    "bench",
    "fuzz",
    "devtools",
    "absent.rs",
];

/// The files of each type, by crate and name.
type Types = BTreeMap<(String, String), Vec<String>>;

/// Checks the types at the top of all files, crate by crate.
pub(super) fn check(root: &Path) -> Result<()> {
    let mut types = Types::new();
    for file in files(root, "*.rs")?.lines() {
        let mut folders = Path::new(file).ancestors().skip(1);
        let of = folders.find(|folder| root.join(folder).join("Cargo.toml").exists());
        // The file may be deleted, and that not committed yet.
        if let (Some(of), Ok(text)) = (of, std::fs::read_to_string(root.join(file))) {
            add(&mut types, &of.to_string_lossy(), file, &text);
        }
    }
    types.retain(|_, files| files.len() > 1);
    let pairs = types.iter().map(|((_, name), files)| format!("{name}: {}\n", files.join(", ")));
    ensure!(
        types.is_empty(),
        "{}Two types of a crate need two names: delete one if both are the same, or else call the less central one what it is",
        pairs.collect::<String>()
    );
    Ok(())
}

fn add(types: &mut Types, of: &str, file: &str, text: &str) {
    let code = text.split("\nmod tests {").next().unwrap_or_default();
    let is_aside = file.split('/').any(|part| ASIDE.contains(&part));
    for name in code.lines().filter_map(declared).filter(|_| !is_aside) {
        let files = types.entry((of.to_owned(), name.to_owned())).or_default();
        files.push(file.to_owned());
    }
}

/// Returns the name of the type that a line declares outside of any block.
fn declared(line: &str) -> Option<&str> {
    let line = match line.strip_prefix("pub(") {
        Some(rest) => rest.split_once(") ")?.1,
        None => line.strip_prefix("pub ").unwrap_or(line),
    };
    let (kind, rest) = line.split_once(' ')?;
    let is_type = ["struct", "enum", "trait", "type", "union"].contains(&kind);
    let ends = |c: char| !(c.is_alphanumeric() || c == '_');
    is_type.then(|| rest.split(ends).next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_types_of_one_name_in_one_crate_are_found() {
        let mut types = Types::new();
        let one = "pub(super) struct Place<'a>(&'a str);\nimpl X for Y {\n    type Step = u8;\n}\n";
        add(&mut types, "a", "a/src/one.rs", one);
        let two = "type Step = u8;\n\n#[cfg(test)]\nmod tests {\nstruct Place;\n}\n";
        add(&mut types, "a", "a/src/two.rs", two);
        add(&mut types, "a", "a/src/two/tests.rs", "struct Place;\n");
        add(&mut types, "b", "b/src/lib.rs", "pub trait Place {\n");
        assert!(types.values().all(|files| files.len() == 1), "{types:?}");
        add(&mut types, "a", "a/src/three.rs", "pub enum Place {\n");
        let place = ("a".to_owned(), "Place".to_owned());
        assert_eq!(types[&place], ["a/src/one.rs", "a/src/three.rs"]);
    }
}
