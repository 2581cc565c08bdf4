//! `cargo xtask dist`: the programs for machines without a registry and without a compiler, as one archive.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use kplane_rig::oci::{Digest, EXECUTABLE, Layer, READABLE};
use kplane_rig::process::output;

use super::manual;
use super::packages::{self, Crates};
use super::program::Program;
use super::recipe::{VERSION, architecture};
use super::{Built, is_this_machines, objcopy, sbom};

/// The programs of the archive. The agent has a control plane inside, for `--standalone`.
const PROGRAMS: [&str; 3] = [DAEMONS[0], DAEMONS[1], KPCTL];
/// Those that run all the time.
const DAEMONS: [&str; 2] = ["kp-controlplane", "kp-nodeagent"];
/// The program that writes its own manual pages.
const KPCTL: &str = "kpctl";
/// The folder of unit files, in the checkout and in the archive.
const UNITS: &str = "deploy/systemd";
/// Shells, and where each of them looks for completions below `share`.
const SHELLS: [(&str, &str); 3] = [
    ("bash", "bash-completion/completions/kpctl"),
    ("zsh", "zsh/site-functions/_kpctl"),
    ("fish", "fish/vendor_completions.d/kpctl.fish"),
];

/// Options of `cargo xtask dist`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Writes kplane-VERSION-linux-ARCH.tar.gz: static programs, unit files for systemd, an example of Services, manual pages,
completions, and bills of materials (CycloneDX). SHA256SUMS lies beside it. The same commit and compiler give the same bytes.

Examples:
  cargo xtask dist
  sudo tar --extract --file target/release-files/kplane-0.1.0-linux-amd64.tar.gz --directory /usr/local --strip-components 1")]
pub(crate) struct Args {
    /// Folder of the archive
    #[arg(long, value_name = "DIR", default_value = "target/release-files")]
    out: PathBuf,
    #[command(flatten)]
    built: Built,
}

/// Writes the archive and its checksum.
pub(crate) fn run(args: &Args) -> Result<()> {
    let root = format!("kplane-{VERSION}");
    let name = format!("{root}-linux-{}.tar.gz", architecture(&args.built.target)?);
    args.built.tell();
    let mut layer = Layer::default();
    // All features, as the tests' programs have them.
    let metadata = packages::metadata(&args.built.target, true)?;
    let mut programs = Vec::new();
    for program in PROGRAMS {
        let crates = Crates::of(program, &metadata)?;
        let built = args.built.bin_dir.join(program);
        let prepared = Program::prepare(&built, &crates, objcopy(&args.built.target))?;
        layer.copy(
            &format!("{root}/bin/{program}"),
            EXECUTABLE,
            prepared.path(),
        );
        let bill = sbom::of_program(&crates, &[])?;
        let place = format!("{root}/share/sbom/{program}.cdx.json");
        layer.file(&place, READABLE, bill);
        programs.push(prepared);
    }
    texts(&mut layer, &root)?;
    if is_this_machines(&args.built.target) {
        pages(&mut layer, &format!("{root}/share"), &args.built.bin_dir)?;
    } else {
        println!("no manual pages and completions: kpctl of another architecture writes them");
    }
    let archive = layer.pack(args.built.level())?.bytes;
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create {}", args.out.display()))?;
    write(&args.out.join(&name), &archive)?;
    let sum = format!("{}  {name}\n", Digest::of(&archive).hex());
    write(&args.out.join("SHA256SUMS"), sum.as_bytes())
}

/// Adds the unit files, the licence and the way to install.
fn texts(layer: &mut Layer, root: &str) -> Result<()> {
    let checkout = crate::workspace();
    layer.copy(
        &format!("{root}/share/doc/kplane/LICENSE"),
        READABLE,
        &checkout.join("LICENSE"),
    );
    let folder = checkout.join(UNITS);
    let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().context("a file has a name")?;
        let place = if path.extension().is_some_and(|end| end == "service") {
            "lib/systemd/system"
        } else {
            "share/doc/kplane"
        };
        let place = format!("{root}/{place}/{}", name.to_string_lossy());
        layer.copy(&place, READABLE, &path);
    }
    Ok(())
}

/// Adds the manual pages of the programs in a folder, and kpctl's completions. kpctl writes its own.
fn pages(layer: &mut Layer, share: &str, programs: &Path) -> Result<()> {
    for daemon in DAEMONS {
        let help = output(Command::new(programs.join(daemon)).arg("--help"))?;
        let place = format!("{share}/man/man8/{daemon}.8");
        layer.file(&place, READABLE, manual::page(daemon, &help).into_bytes());
    }
    let kpctl = &programs.join(KPCTL);
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    output(Command::new(kpctl).arg("man").arg(folder.path()))?;
    for entry in fs::read_dir(folder.path())? {
        let path = entry?.path();
        let name = path.file_name().context("a file has a name")?;
        let place = format!("{share}/man/man1/{}", name.to_string_lossy());
        layer.file(&place, READABLE, fs::read(&path)?);
    }
    for (shell, place) in SHELLS {
        let script = output(Command::new(kpctl).args(["completion", shell]))?;
        layer.file(&format!("{share}/{place}"), READABLE, script);
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// What modes iptables and ipvs add to an agent's unit.
    const MORE_RIGHTS: &str = "iptables-ipvs.conf";

    /// Modes iptables and ipvs need more, and have a file of their own for that.
    #[test]
    fn units_give_an_agent_the_rights_of_mode_nftables() {
        let read =
            |name: &str| fs::read_to_string(crate::workspace().join(UNITS).join(name)).unwrap();
        let rights = |name: &str| {
            let text = read(name);
            text.lines()
                .filter_map(|line| line.strip_prefix("CapabilityBoundingSet="))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        for unit in ["kp-nodeagent.service", "kp-nodeagent-standalone.service"] {
            assert_eq!(rights(unit), ["CAP_NET_ADMIN"], "{unit}");
            assert!(read(unit).contains(MORE_RIGHTS), "{unit}");
        }
        assert_eq!(rights(MORE_RIGHTS), ["CAP_NET_RAW"]);
        let mut layer = Layer::default();
        texts(&mut layer, "kplane").unwrap();
        let place = format!("kplane/share/doc/kplane/{MORE_RIGHTS}");
        assert!(layer.paths().any(|path| *path == *place));
        assert!(read("INSTALL.md").contains(MORE_RIGHTS));
    }

    /// Programs that say what they are asked.
    #[test]
    fn each_program_has_a_manual_page() {
        let folder = tempfile::tempdir().unwrap();
        for program in PROGRAMS {
            let path = folder.path().join(program);
            let script = "#!/bin/sh\ncase $1 in\nman) touch $2/kpctl.1;;\n*) echo about; echo; echo Usage: $1;;\nesac\n";
            fs::write(&path, script).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut layer = Layer::default();
        pages(&mut layer, "share", folder.path()).unwrap();
        let paths: Vec<&str> = layer.paths().collect();
        for page in [
            "man1/kpctl.1",
            "man8/kp-controlplane.8",
            "man8/kp-nodeagent.8",
        ] {
            let place = format!("share/man/{page}");
            assert!(paths.contains(&&*place), "{paths:?}");
        }
    }

    #[test]
    fn the_archive_has_what_the_unit_files_start() {
        let mut layer = Layer::default();
        texts(&mut layer, "kplane").unwrap();
        let paths: Vec<&str> = layer.paths().collect();
        for unit in ["kp-controlplane", "kp-nodeagent", "kp-nodeagent-standalone"] {
            let place = format!("kplane/lib/systemd/system/{unit}.service");
            assert!(paths.contains(&&*place), "{paths:?}");
            let text =
                fs::read_to_string(crate::workspace().join(UNITS).join(format!("{unit}.service")))
                    .unwrap();
            let start =
                text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/"));
            let program = start.unwrap().split(' ').next().unwrap();
            assert!(PROGRAMS.contains(&program), "{unit} starts {program}");
        }
        for text in ["INSTALL.md", "services.yaml"] {
            let place = format!("kplane/share/doc/kplane/{text}");
            assert!(paths.contains(&&*place), "{paths:?}");
        }
    }
}
