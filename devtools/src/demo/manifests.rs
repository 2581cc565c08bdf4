//! A copy of the manifests that may be edited while the control plane watches it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Name endings of manifests.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// A folder with copies of manifests, and the objects in them.
#[derive(Debug)]
pub(crate) struct Manifests {
    /// The folder of the copies.
    pub(crate) folder: PathBuf,
    /// The objects of each file in order; the items of lists count one by one.
    files: Vec<(PathBuf, Vec<Value>)>,
}

impl Manifests {
    /// Copies a file, or the manifests of a folder (not those of its subfolders), as they are.
    pub(crate) fn copy(from: &Path, folder: PathBuf) -> Result<Self> {
        fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        let read = || format!("read {}", from.display());
        let mut sources = vec![from.to_owned()];
        if fs::metadata(from).with_context(read)?.is_dir() {
            let entries = fs::read_dir(from).with_context(read)?;
            let paths = entries.map(|entry| Ok(entry?.path()));
            sources = paths.collect::<Result<_>>().with_context(read)?;
            let ends = |path: &PathBuf, end: &str| path.extension() == Some(end.as_ref());
            sources.retain(|path| EXTENSIONS.iter().any(|end| ends(path, end)));
            sources.sort();
        }
        let mut files = Vec::new();
        for source in sources {
            let shown = source.display();
            let path = folder.join(source.file_name().context("a manifest has no name")?);
            let text = fs::read_to_string(&source).with_context(|| format!("read {shown}"))?;
            let objects = parse(&text).with_context(|| shown.to_string())?;
            fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
            files.push((path, objects));
        }
        let none = || format!("there are no *.yaml or *.json files in {}", from.display());
        ensure!(!files.is_empty(), none());
        Ok(Self { folder, files })
    }

    /// Returns all objects.
    pub(crate) fn objects(&self) -> impl Iterator<Item = &Value> {
        self.files.iter().flat_map(|(_, objects)| objects)
    }

    /// Changes objects; `change` returns whether it changed the object. Files with changed objects
    /// are written beside the folder and renamed into it. Returns the moment before the first
    /// rename.
    pub(crate) fn edit(&mut self, change: impl Fn(&mut Value) -> bool) -> Result<SystemTime> {
        let beside = self.folder.with_extension("edited");
        fs::create_dir_all(&beside)?;
        let mut ready = Vec::new();
        for (path, objects) in &mut self.files {
            let changed = objects.iter_mut().filter_map(|o| change(o).then_some(()));
            if changed.count() > 0 {
                let file = beside.join(path.file_name().unwrap_or_default());
                fs::write(&file, serde_saphyr::to_string_multiple(objects)?)?;
                ready.push((file, path));
            }
        }
        ensure!(!ready.is_empty(), "no manifest was changed");
        let before = SystemTime::now();
        for (file, path) in ready {
            fs::rename(&file, &path).with_context(|| format!("replace {}", path.display()))?;
        }
        Ok(before)
    }
}

impl Manifests {
    /// Writes a file of its own, which [`Manifests::edit`] does not know, or removes it.
    pub(crate) fn put(&self, name: &str, objects: Option<&[Value]>) -> Result<()> {
        let (beside, path) = (self.folder.with_extension("edited"), self.folder.join(name));
        let Some(objects) = objects else {
            return fs::remove_file(&path).with_context(|| format!("remove {}", path.display()));
        };
        fs::create_dir_all(&beside)?;
        let file = beside.join(name);
        fs::write(&file, serde_saphyr::to_string_multiple(objects)?)?;
        fs::rename(&file, &path).with_context(|| format!("write {}", path.display()))
    }
}

/// Returns all objects of a text, with the items of lists one by one.
fn parse(text: &str) -> Result<Vec<Value>> {
    let options = serde_saphyr::options! { budget: None };
    let documents: Vec<Value> = serde_saphyr::from_multiple_with_options(text, options)?;
    Ok(documents
        .into_iter()
        .flat_map(flatten)
        .filter(|object| !object.is_null())
        .collect())
}

fn flatten(mut value: Value) -> Vec<Value> {
    match value.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) => items.into_iter().flat_map(flatten).collect(),
        _ => vec![value],
    }
}
