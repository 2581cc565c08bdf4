//! The one build of a test run: cargo compiles everything once, clippy checks it on the way, and all suites execute
//! what this build made.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::cargo::{as_tests, has_clippy};

const JSON: &str = "--message-format=json";
/// The beginning of a message of cargo.
pub(crate) const MESSAGE: &str = "{\"reason\":";

#[derive(Clone, Debug)]
pub(crate) struct TestProgram {
    pub(crate) package: String,
    /// The name of the library, program or test that it tests.
    pub(crate) target: String,
    pub(crate) executable: PathBuf,
    /// The folder of the package, in which cargo runs its tests.
    pub(crate) folder: PathBuf,
}

/// What the messages of cargo say about its units.
#[derive(Debug, Default)]
pub(crate) struct Built {
    pub(crate) tests: Vec<TestProgram>,
    /// Units of earlier cargo commands, and of the present one. One command may have a unit twice: for the machine that
    /// builds, with the features that build scripts need, and for the product.
    earlier: BTreeSet<String>,
    present: BTreeSet<String>,
    /// Lines of the workspace's own crates that went through the compiler.
    pub(crate) lines: usize,
    /// Units of the workspace's own crates that this run has compiled.
    pub(crate) units: usize,
    /// Warnings of the compiler and of clippy.
    pub(crate) warnings: usize,
    repeated: BTreeSet<String>,
}

/// Builds all programs and tests. Cargo's progress and the compiler's messages go to standard error.
///
/// # Errors
/// Clippy is not installed, or something does not compile.
pub(crate) fn build() -> Result<Built> {
    ensure!(
        has_clippy(),
        "clippy is not installed: rustup component add clippy"
    );
    compile(as_tests()?.args(["test", "--workspace", "--tests"]))
}

/// Builds tests with a command of cargo.
///
/// # Errors
/// Something does not compile.
pub(crate) fn compile(command: &mut Command) -> Result<Built> {
    let mut child = command
        .args(["--no-run", JSON])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    let messages = child.stdout.take().context("cargo has no output")?;
    let mut built = Built::default();
    for line in BufReader::new(messages).lines() {
        built.read(&line?)?;
    }
    let status = child.wait()?;
    ensure!(status.success(), "cargo test --no-run: {status}");
    Ok(built)
}

impl Built {
    /// Takes in the messages that a later cargo command wrote, and fails if that command compiled a unit again.
    ///
    /// # Errors
    /// A unit was compiled twice, or a source file cannot be read.
    pub(crate) fn further(&mut self, log: &Path) -> Result<()> {
        let text = fs::read(log).with_context(|| log.display().to_string())?;
        let text = String::from_utf8_lossy(&text);
        self.earlier.append(&mut self.present);
        for line in text.lines().filter(|line| line.starts_with(MESSAGE)) {
            self.read(line)?;
        }
        let repeated: Vec<&str> = self.repeated.iter().map(String::as_str).collect();
        ensure!(
            repeated.is_empty(),
            "compiled a second time, with other features or flags: {}",
            repeated.join(", ")
        );
        Ok(())
    }

    /// Reads one message of cargo.
    fn read(&mut self, line: &str) -> Result<()> {
        let Ok(message) = serde_json::from_str::<Value>(line) else {
            return Ok(());
        };
        match message["reason"].as_str() {
            Some("compiler-message") => {
                let text = message["message"]["rendered"].as_str();
                eprint!("{}", text.unwrap_or_default());
                // The last line of a crate counts its warnings, and is one itself.
                let is_own = message["message"]["spans"][0].is_object();
                let is_warning = message["message"]["level"] == "warning";
                self.warnings += usize::from(is_warning && is_own);
            }
            Some("compiler-artifact") => self.artifact(&message)?,
            _ => {}
        }
        Ok(())
    }

    fn artifact(&mut self, message: &Value) -> Result<()> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let target = &message["target"];
        let source = PathBuf::from(text(&target["src_path"]));
        let folder = PathBuf::from(text(&message["manifest_path"]));
        let folder = folder.parent().unwrap_or(&folder).to_owned();
        let package = package(&text(&message["package_id"]));
        let is_test = message["profile"]["test"] == true;
        if let (true, Some(executable)) = (is_test, message["executable"].as_str()) {
            self.tests.push(TestProgram {
                package: package.clone(),
                target: text(&target["name"]),
                executable: executable.into(),
                folder: folder.clone(),
            });
        }
        // A page, and a unit without code, which `cargo doc` makes of dependencies, are others.
        let files = message["filenames"].to_string();
        let has = |ending: &str| files.contains(&format!("{ending}\""));
        let what = match () {
            () if has(".html") => " (pages)",
            () if has(".rmeta") && !has(".rlib") => " (metadata)",
            () => "",
        };
        let unit = format!("{package} {} {}{what}", target["name"], target["kind"]);
        let key = format!("{unit} {} {is_test}", message["package_id"]);
        let is_fresh = message["fresh"] == true;
        if !is_fresh && self.earlier.contains(&key) {
            self.repeated.insert(unit);
        }
        self.present.insert(key);
        if is_fresh {
            return Ok(());
        }
        if text(&message["package_id"]).starts_with("path+") {
            self.units += 1;
            self.lines += lines_of(&source)?;
        }
        Ok(())
    }
}

/// Returns the name in a package's id: `path+file:///folder#name@version`, or `...folder#version` if the folder has the
/// name.
fn package(id: &str) -> String {
    let (place, name) = id.rsplit_once('#').unwrap_or(("", id));
    match name.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => place.rsplit('/').next().unwrap_or(name).to_owned(),
    }
}

/// Returns the number of lines that a crate has: those of its file, and of its folder if the file is the crate's root
/// there.
fn lines_of(root: &Path) -> Result<usize> {
    let name = root.file_name().unwrap_or_default();
    let is_alone =
        name == "build.rs" || name == "main.rs" && root.with_file_name("lib.rs").exists();
    let folder = root.parent().unwrap_or(root);
    if is_alone || !(name == "lib.rs" || name == "main.rs") {
        return lines(root);
    }
    let mut sum = 0;
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                sum += lines(&path)?;
            }
        }
    }
    Ok(sum)
}

fn lines(file: &Path) -> Result<usize> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    Ok(text.lines().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = "path+file:///x/model#kplane-model@0.1.0";

    fn artifact(fresh: bool, file: &str, test: bool) -> String {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/src/main.rs");
        let rest = serde_json::json!({
            "package_id": MODEL, "manifest_path": "/x/model/Cargo.toml",
            "target": {"kind": ["lib"], "name": "kplane_model", "src_path": root},
            "profile": {"test": test}, "filenames": [file], "fresh": fresh,
            "executable": test.then_some(file),
        })
        .to_string();
        format!("{MESSAGE}\"compiler-artifact\",{}", &rest[1..])
    }

    #[test]
    fn a_unit_that_a_later_command_compiles_again_is_named() {
        let mut built = Built::default();
        // One command may have it twice, for two machines.
        for file in ["a.rlib", "b.rlib"] {
            built.read(&artifact(false, file, false)).unwrap();
        }
        let log = tempfile();
        let mut later = |fresh, file| {
            fs::write(&log, artifact(fresh, file, false)).unwrap();
            built.further(&log).map_err(|error| error.to_string())
        };
        later(true, "a.rlib").unwrap();
        later(false, "a.rmeta").unwrap();
        later(false, "a.html").unwrap();
        let named = later(false, "c.rlib").unwrap_err();
        assert!(named.contains("kplane-model "), "{named}");
        fs::remove_file(&log).unwrap();
        assert_eq!(built.units, 5);
        assert!(built.lines > 1_000, "{}", built.lines);
    }

    fn tempfile() -> PathBuf {
        let name = format!("kplane-xtask-{}.log", std::process::id());
        std::env::temp_dir().join(name)
    }

    #[test]
    fn test_programs_are_found() {
        let mut built = Built::default();
        built.read(&artifact(true, "/t/deps/kplane_model-1", true)).unwrap();
        let [test] = &built.tests[..] else {
            panic!("{:?}", built.tests)
        };
        assert_eq!(
            (&*test.package, &*test.target),
            ("kplane-model", "kplane_model")
        );
        assert_eq!(test.folder, Path::new("/x/model"));
        assert_eq!(built.units, 0);
    }

    #[test]
    fn names_of_packages() {
        assert_eq!(package(MODEL), "kplane-model");
        assert_eq!(package("path+file:///x/xtask#0.1.0"), "xtask");
        assert_eq!(package("registry+https://x/y#serde@1.0.1"), "serde");
    }
}
