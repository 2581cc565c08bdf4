//! A copy of the manifests that may be edited while the control plane watches it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

/// Name endings of manifests.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// A folder with copies of manifests, and the objects in them.
#[derive(Debug)]
pub(crate) struct Manifests {
    folder: PathBuf,
    files: Vec<File>,
}

#[derive(Debug)]
struct File {
    path: PathBuf,
    /// The objects in order; the items of lists count one by one.
    objects: Vec<Value>,
}

impl Manifests {
    /// Copies a file, or the manifests of a folder (not those of its subfolders), as they are.
    pub(crate) fn copy(from: &Path, folder: PathBuf) -> Result<Self> {
        fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        let mut files = Vec::new();
        for source in sources(from)? {
            let shown = source.display();
            let name = source
                .file_name()
                .with_context(|| format!("{shown} has no name"))?;
            let path = folder.join(name);
            let text = fs::read_to_string(&source).with_context(|| format!("read {shown}"))?;
            let objects = parse(&text).with_context(|| shown.to_string())?;
            fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
            files.push(File { path, objects });
        }
        ensure!(
            !files.is_empty(),
            "there are no *.yaml or *.json files in {}",
            from.display()
        );
        Ok(Self { folder, files })
    }

    /// Returns the folder of the copies.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns all objects.
    pub(crate) fn objects(&self) -> impl Iterator<Item = &Value> + Clone {
        self.files.iter().flat_map(|file| &file.objects)
    }

    /// Changes objects; `change` returns whether it changed the object. Files with changed objects
    /// are written beside the folder and renamed into it. Returns the moment before the first
    /// rename.
    pub(crate) fn edit(&mut self, change: impl Fn(&mut Value) -> bool) -> Result<SystemTime> {
        let mut ready = Vec::new();
        for file in &mut self.files {
            let changed = file
                .objects
                .iter_mut()
                .filter_map(|o| change(o).then_some(()))
                .count();
            if changed > 0 {
                let name = file.path.file_name().unwrap_or_default();
                let aside = self.folder.with_extension("edited").join(name);
                fs::create_dir_all(self.folder.with_extension("edited"))?;
                fs::write(&aside, text(&file.objects)?)?;
                ready.push((aside, &file.path));
            }
        }
        ensure!(!ready.is_empty(), "no manifest was changed");
        let before = SystemTime::now();
        for (aside, path) in ready {
            fs::rename(&aside, path).with_context(|| format!("replace {}", path.display()))?;
        }
        Ok(before)
    }
}

fn sources(from: &Path) -> Result<Vec<PathBuf>> {
    let read = || format!("read {}", from.display());
    if !fs::metadata(from).with_context(read)?.is_dir() {
        return Ok(vec![from.to_owned()]);
    }
    let mut paths = Vec::new();
    for entry in fs::read_dir(from).with_context(read)? {
        let path = entry.with_context(read)?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Returns all objects of a text, with the items of lists one by one.
fn parse(text: &str) -> Result<Vec<Value>> {
    let options = serde_saphyr::options! { budget: None };
    let documents: Vec<Value> = serde_saphyr::from_multiple_with_options(text, options)?;
    let mut objects = Vec::new();
    for document in documents {
        flatten(document, &mut objects)?;
    }
    Ok(objects)
}

fn flatten(value: Value, objects: &mut Vec<Value>) -> Result<()> {
    match value {
        Value::Null => {}
        Value::Object(mut fields) if kind_of(&fields).ends_with("List") => {
            let Some(Value::Array(items)) = fields.remove("items") else {
                return Ok(());
            };
            items
                .into_iter()
                .try_for_each(|item| flatten(item, objects))?;
        }
        Value::Object(_) => objects.push(value),
        _ => bail!("a document is not an object"),
    }
    Ok(())
}

fn kind_of(fields: &serde_json::Map<String, Value>) -> &str {
    fields
        .get("kind")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn text(objects: &[Value]) -> Result<String> {
    Ok(serde_saphyr::to_string_multiple(objects)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
kind: List
items:
- kind: Node
  metadata: {name: a, labels: {port: "80", "yes": "no", when: "2026-11-21T03:47:11Z"}}
- kind: Service
  metadata: {name: b, annotations: {text: "two\nlines: {}\n"}}
---
# nothing
---
kind: Service
metadata: {name: "010"}
"#;

    #[test]
    fn lists_are_taken_apart_and_what_is_written_reads_the_same() {
        let objects = parse(TEXT).unwrap();
        let names: Vec<_> = objects
            .iter()
            .map(|o| o["metadata"]["name"].as_str())
            .collect();
        assert_eq!(names, [Some("a"), Some("b"), Some("010")]);
        let again = parse(&text(&objects).unwrap()).unwrap();
        assert_eq!(again, objects);
    }

    #[test]
    fn real_input_survives() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/cluster-dump.yaml");
        let objects = parse(&fs::read_to_string(path).unwrap()).unwrap();
        assert_eq!(objects.len(), 52);
        assert_eq!(parse(&text(&objects).unwrap()).unwrap(), objects);
    }

    #[test]
    fn edits_replace_files() {
        let temp = tempfile::tempdir().unwrap();
        let source = temp.path().join("a.yaml");
        fs::write(&source, TEXT).unwrap();
        let mut manifests = Manifests::copy(&source, temp.path().join("copy")).unwrap();
        assert_eq!(
            fs::read_to_string(manifests.folder().join("a.yaml")).unwrap(),
            TEXT
        );
        let rename = |object: &mut Value| {
            let found = object["metadata"]["name"] == "b";
            if found {
                object["metadata"]["name"] = "c".into();
            }
            found
        };
        manifests.edit(rename).unwrap();
        assert!(manifests.edit(rename).is_err());
        let written = parse(&fs::read_to_string(manifests.folder().join("a.yaml")).unwrap());
        assert_eq!(written.unwrap()[1]["metadata"]["name"], "c");
        assert_eq!(fs::read_to_string(&source).unwrap(), TEXT);
    }
}
