//! `kpctl whatif`: what would change if these objects were applied?

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use kplane_proto::v1 as pb;

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::args::whatif::WhatIfArgs;
use crate::failure::Failure;
use kplane_view::whatif::WhatIfView;

/// Most bytes of all manifests: the control plane takes no more.
const MOST: usize = 1 << 20;
/// Ends of the names of manifests in a folder.
const ENDS: [&str; 3] = ["yaml", "yml", "json"];

/// Runs the command.
pub(super) async fn run(cli: &Cli, args: &WhatIfArgs) -> Result<Verdict, Failure> {
    let mut manifests = Vec::new();
    for path in &args.files {
        read(path, &mut manifests)?;
    }
    let (client, _) = connect(cli).await?;
    let view = WhatIfView::new(client.what_if(pb::WhatIfRequest { manifests }).await?);
    show(cli, &view)?;
    Ok(match view.has_errors() {
        false => Verdict::Done,
        true => Verdict::NotReached,
    })
}

fn refused(path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::Refused(format!("cannot read {}: {why}", path.display()))
}

/// Appends a file, or all manifests of a folder.
fn read(path: &Path, manifests: &mut Vec<u8>) -> Result<(), Failure> {
    if path == Path::new("-") {
        return append(path, io::stdin().lock(), manifests);
    }
    let is_folder = fs::metadata(path).map_err(|error| refused(path, error))?;
    if !is_folder.is_dir() {
        let file = File::open(path).map_err(|error| refused(path, error))?;
        return append(path, file, manifests);
    }
    let entries = fs::read_dir(path).map_err(|error| refused(path, error))?;
    let mut files: Vec<PathBuf> = entries
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| refused(path, error))?
        .into_iter()
        .map(|entry| entry.path())
        .filter(|file| {
            let end = file.extension().and_then(|end| end.to_str());
            end.is_some_and(|end| ENDS.contains(&end)) && file.is_file()
        })
        .collect();
    if files.is_empty() {
        return Err(refused(
            path,
            "the folder has no files *.yaml, *.yml or *.json",
        ));
    }
    files.sort();
    for file in files {
        let open = File::open(&file).map_err(|error| refused(&file, error))?;
        append(&file, open, manifests)?;
    }
    Ok(())
}

fn append(path: &Path, from: impl Read, manifests: &mut Vec<u8>) -> Result<(), Failure> {
    if !manifests.is_empty() {
        manifests.extend_from_slice(b"\n---\n");
    }
    let room = (MOST + 1).saturating_sub(manifests.len());
    let mut from = from.take(room as u64);
    from.read_to_end(manifests)
        .map_err(|error| refused(path, error))?;
    match manifests.len() {
        ..=MOST => Ok(()),
        _ => Err(refused(
            path,
            "all manifests together have more than 1 MiB: ask for a part of them",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_folders_are_joined_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        file("b.yaml", "kind: B");
        file("a.json", "{}");
        file("notes.txt", "no manifest");
        let mut manifests = Vec::new();
        read(folder.path(), &mut manifests).unwrap();
        assert_eq!(manifests, b"{}\n---\nkind: B");
        file("c.yaml", &"#".repeat(MOST));
        let error = read(folder.path(), &mut manifests).unwrap_err().to_string();
        assert!(error.contains("1 MiB"), "{error}");
        assert!(manifests.len() <= 2 * MOST);
        let none = read(&folder.path().join("none"), &mut Vec::new());
        assert!(none.unwrap_err().to_string().contains("cannot read"));
    }
}
