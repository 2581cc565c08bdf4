//! A built program, with the list of its crates that `cargo audit bin` and other scanners read.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use kplane_rig::process::output;
use tempfile::TempDir;

use super::packages::Crates;

/// The section in which scanners look for the list, compressed by zlib.
const SECTION: &str = ".dep-v0";

/// A program as an image has it: stripped, and with the list of its crates.
#[derive(Debug)]
pub(super) struct Program {
    path: PathBuf,
    /// The folder in which it is.
    _folder: TempDir,
}

impl Program {
    /// Copies a built program, strips the copy, and adds the list.
    ///
    /// # Errors
    /// The program is not there, or objcopy fails.
    pub(super) fn prepare(built: &Path, crates: &Crates, objcopy: &str) -> Result<Self> {
        ensure!(
            built.is_file(),
            "there is no {}: `cargo xtask images` builds it",
            built.display()
        );
        let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
        let list = folder.path().join("list");
        fs::write(&list, compressed(crates)?).context("cannot write the list of crates")?;
        let name = built.file_name().context("a program has a name")?;
        let path = folder.path().join(name);
        let section = format!("{SECTION}={}", list.display());
        let flags = format!("{SECTION}=noload,readonly");
        output(
            Command::new(objcopy)
                .args(["--strip-all", "--add-section", &section])
                .args(["--set-section-flags", &flags])
                .args([built, &path]),
        )
        .with_context(|| {
            format!(
                "cannot prepare {}; {objcopy} is in Debian's binutils",
                built.display()
            )
        })?;
        Ok(Self {
            path,
            _folder: folder,
        })
    }

    /// Returns where the program is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

fn compressed(crates: &Crates) -> Result<Vec<u8>> {
    let mut zlib = ZlibEncoder::new(Vec::new(), Compression::best());
    zlib.write_all(&serde_json::to_vec(&crates.auditable())?)?;
    Ok(zlib.finish()?)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::ZlibDecoder;
    use serde_json::Value;

    use super::super::packages::metadata;
    use super::*;

    /// Takes this test's own program as the built one.
    #[test]
    fn a_prepared_program_starts_and_has_the_list_of_its_crates() {
        let metadata = metadata("x86_64-unknown-linux-gnu", true).unwrap();
        let crates = Crates::of("kp-controlplane", &metadata).unwrap();
        let own = std::env::current_exe().unwrap();
        let program = Program::prepare(&own, &crates, "objcopy").unwrap();
        output(Command::new(program.path()).arg("--list")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let dumped = folder.path().join("dumped");
        let section = format!("{SECTION}={}", dumped.display());
        output(
            Command::new("objcopy")
                .args(["--dump-section", &section])
                .arg(program.path())
                .arg("/dev/null"),
        )
        .unwrap();
        let mut text = String::new();
        let bytes = fs::read(dumped).unwrap();
        ZlibDecoder::new(&*bytes).read_to_string(&mut text).unwrap();
        let list: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(list, crates.auditable());
    }
}
