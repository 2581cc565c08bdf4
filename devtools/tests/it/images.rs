//! `cargo xtask images`, from built programs to archives.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_kplane-dev");
/// A small program in place of kplane's: what is in the image does not matter here.
const SMALL: &str = "/usr/bin/true";

/// Writes all images, and returns the files.
fn images(bin: &Path, out: &Path) -> BTreeMap<String, Vec<u8>> {
    written("images", bin, out)
}

/// Has a subcommand write its files, and returns them.
fn written(task: &str, bin: &Path, out: &Path) -> BTreeMap<String, Vec<u8>> {
    let output = Command::new(PROGRAM)
        .args([task, "--quick", "--bin-dir"])
        .arg(bin)
        .arg("--out")
        .arg(out)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    fs::read_dir(out)
        .unwrap()
        .map(|file| {
            let file = file.unwrap();
            let name = file.file_name().to_string_lossy().into_owned();
            (name, fs::read(file.path()).unwrap())
        })
        .collect()
}

/// Needs Debian's iptables, ipset and kmod, which `cargo xtask test tools` installs.
#[test]
fn images_written_twice_have_the_same_bytes() {
    let bin = tempfile::tempdir().unwrap();
    for name in ["kp-controlplane", "kp-nodeagent"] {
        fs::copy(SMALL, bin.path().join(name)).unwrap();
    }
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [one, other] = folders.each_ref().map(|out| images(bin.path(), out.path()));
    let names: Vec<&str> = one.keys().map(String::as_str).collect();
    let expected = ["kp-controlplane", "kp-nodeagent", "kp-nodeagent-iptables"];
    assert_eq!(names.len(), 2 * expected.len(), "{names:?}");
    for (name, program) in names.iter().step_by(2).zip(expected) {
        assert!(name.starts_with(program), "{names:?}");
    }
    for (name, content) in &one {
        assert!(other[name] == *content, "{name} differs");
    }
}

#[test]
fn the_archive_of_programs_has_the_same_bytes_twice_and_the_sum_beside_it() {
    let bin = tempfile::tempdir().unwrap();
    for name in ["kp-controlplane", "kp-nodeagent", "kpctl"] {
        fs::copy(SMALL, bin.path().join(name)).unwrap();
    }
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [one, other] = folders.each_ref().map(|out| written("dist", bin.path(), out.path()));
    assert_eq!(one.len(), 2);
    assert!(one == other, "the files differ");
    let checked = Command::new("sha256sum")
        .args(["--check", "--strict", "SHA256SUMS"])
        .current_dir(folders[0].path())
        .output();
    assert!(checked.unwrap().status.success());
}

#[test]
fn a_missing_program_is_named() {
    let bin = tempfile::tempdir().unwrap();
    let output = Command::new(PROGRAM)
        .args(["images", "--out"])
        .arg(bin.path().join("out"))
        .arg("--bin-dir")
        .arg(bin.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    let expected = "kp-controlplane: `cargo xtask images` builds it\n";
    assert!(errors.ends_with(expected), "{errors}");
}
