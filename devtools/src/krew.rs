//! `cargo xtask krew`: archives of `kubectl kplane`, and the manifest with which krew installs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, Result, ensure};
use flate2::Compression;
use kplane_rig::oci::{Digest, EXECUTABLE, Layer, READABLE};

use crate::workspace;

/// Options of `cargo xtask krew`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Writes an archive for each program and the manifest kplane.yaml. The same program gives the same bytes. Try the result with
`kubectl krew install --manifest=target/krew/kplane.yaml --archive=ARCHIVE`.

Examples:
  cargo xtask krew --tag v0.1.0 --program linux/amd64=target/dist/kpctl")]
pub(crate) struct Args {
    /// Tag of the release, such as v0.1.0
    #[arg(long)]
    tag: String,
    /// A built kpctl, and the system for which it is; may be repeated
    #[arg(long = "program", value_name = "OS/ARCH=FILE", required = true)]
    programs: Vec<Program>,
    /// Folder of the archives and the manifest
    #[arg(long, value_name = "DIR", default_value = "target/krew")]
    out: PathBuf,
}

/// A program, and the system for which it is.
#[derive(Clone, Debug)]
struct Program {
    os: String,
    arch: String,
    file: PathBuf,
}

impl FromStr for Program {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('=');
        let parts = parts.and_then(|(system, file)| Some((system.split_once('/')?, file)));
        let ((os, arch), file) = parts.ok_or("write OS/ARCH=FILE, such as linux/amd64=kpctl")?;
        Ok(Self {
            os: os.to_owned(),
            arch: arch.to_owned(),
            file: file.into(),
        })
    }
}

/// Writes archives and manifest.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(
        is_version(&args.tag),
        "{} is no tag that krew takes: write it like v0.1.0",
        args.tag
    );
    let template = fs::read_to_string(workspace().join("deploy/krew/kplane.yaml"))?;
    fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    let mut archives = Vec::new();
    for program in &args.programs {
        let mut layer = Layer::default();
        layer.copy(program.bin(), EXECUTABLE, &program.file);
        layer.copy("LICENSE", READABLE, &workspace().join("LICENSE"));
        let archive = layer.pack(Compression::best())?.bytes;
        write(&args.out.join(program.archive(&args.tag)), &archive)?;
        archives.push((program, Digest::of(&archive)));
    }
    let manifest = filled(&template, &args.tag, &archives)?;
    write(&args.out.join("kplane.yaml"), manifest.as_bytes())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

impl Program {
    /// Returns the name of the program in its archive.
    fn bin(&self) -> &'static str {
        match self.os.as_str() {
            "windows" => "kubectl-kplane.exe",
            _ => "kubectl-kplane",
        }
    }

    /// Returns the name of the archive, as the manifest's address ends.
    fn archive(&self, tag: &str) -> String {
        format!("kubectl-kplane-{tag}-{}-{}.tar.gz", self.os, self.arch)
    }
}

/// Returns whether krew takes a version: semantic, with a `v`.
fn is_version(tag: &str) -> bool {
    let numbers = tag
        .strip_prefix('v')
        .map(|rest| rest.split_once('-').map_or(rest, |(n, _)| n));
    let is_number = |part: &str| {
        part.parse::<u32>()
            .is_ok_and(|number| number.to_string() == part)
    };
    numbers
        .is_some_and(|numbers| numbers.split('.').count() == 3 && numbers.split('.').all(is_number))
}

/// Returns the manifest of a release. Comments of the template are left out.
fn filled(template: &str, tag: &str, archives: &[(&Program, Digest)]) -> Result<String> {
    let lines = template.lines().filter(|line| !line.starts_with('#'));
    let template: String = lines.map(|line| format!("{line}\n")).collect();
    let (head, platform) = template
        .split_once("  platforms:\n")
        .context("deploy/krew/kplane.yaml has no platforms")?;
    let platforms = archives.iter().map(|(program, digest)| {
        platform
            .replace("SHA256", digest.hex())
            .replace("OS", &program.os)
            .replace("ARCH", &program.arch)
            .replace("BIN", program.bin())
    });
    let platforms: String = platforms.collect();
    Ok(format!("{head}  platforms:\n{platforms}").replace("VERSION", tag))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

    use std::collections::BTreeSet;
    use std::io::Read as _;

    use serde_json::Value;

    use super::*;

    /// Checks what krew checks of a manifest.
    fn check(manifest: &Value) {
        assert_eq!(
            manifest["apiVersion"],
            "krew.googlecontainertools.github.com/v1alpha2"
        );
        assert_eq!(manifest["kind"], "Plugin");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let name = text(&manifest["metadata"]["name"]);
        assert!(
            name.bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        );
        let spec = &manifest["spec"];
        assert!(is_version(&text(&spec["version"])));
        let short = text(&spec["shortDescription"]);
        assert!(
            short.len() <= 50 && !short.ends_with('.') && !short.contains('\n'),
            "{short}"
        );
        assert!(text(&spec["homepage"]).starts_with("https://"));
        let known: BTreeSet<&str> = [
            "version",
            "homepage",
            "shortDescription",
            "description",
            "caveats",
            "platforms",
        ]
        .into();
        let fields = spec.as_object().unwrap().keys().map(String::as_str);
        assert_eq!(fields.collect::<BTreeSet<_>>(), known);
        let platforms = spec["platforms"].as_array().unwrap();
        let mut systems = BTreeSet::new();
        for platform in platforms {
            let labels = &platform["selector"]["matchLabels"];
            let (os, arch) = (text(&labels["os"]), text(&labels["arch"]));
            assert!(
                ["linux", "darwin", "windows"].contains(&os.as_str()),
                "{os}"
            );
            assert!(["amd64", "arm64"].contains(&arch.as_str()), "{arch}");
            let sum = text(&platform["sha256"]);
            assert!(
                sum.len() == 64 && sum.bytes().all(|b| b.is_ascii_hexdigit()),
                "{sum}"
            );
            assert!(text(&platform["uri"]).starts_with("https://"));
            // krew installs the plugin under the name of its file.
            let bin = text(&platform["bin"]);
            assert_eq!(bin.ends_with(".exe"), os == "windows");
            assert!(systems.insert((os, arch)), "two archives for one system");
        }
        assert!(!platforms.is_empty());
    }

    #[test]
    fn the_manifest_of_a_release_is_what_krew_takes() {
        let folder = tempfile::tempdir().unwrap();
        let built = folder.path().join("kpctl");
        fs::write(&built, "a program").unwrap();
        let out = folder.path().join("out");
        let systems = [
            "linux/amd64",
            "linux/arm64",
            "darwin/arm64",
            "windows/amd64",
        ];
        let programs = systems.map(|system| format!("{system}={}", built.display()));
        let args = Args {
            tag: "v0.1.0".to_owned(),
            programs: programs.iter().map(|text| text.parse().unwrap()).collect(),
            out: out.clone(),
        };
        run(&args).unwrap();
        let manifest = fs::read_to_string(out.join("kplane.yaml")).unwrap();
        let manifest: Value = serde_saphyr::from_str(&manifest).unwrap();
        check(&manifest);
        assert_eq!(manifest["spec"]["version"], "v0.1.0");
        let platforms = manifest["spec"]["platforms"].as_array().unwrap();
        assert_eq!(platforms.len(), systems.len());
        for platform in platforms {
            let uri = platform["uri"].as_str().unwrap();
            let (_, name) = uri.rsplit_once('/').unwrap();
            assert!(uri.contains("/download/v0.1.0/"), "{uri}");
            let archive = fs::read(out.join(name)).unwrap();
            assert_eq!(platform["sha256"], Digest::of(&archive).hex());
            let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(&*archive));
            let mut found = false;
            for entry in archive.entries().unwrap() {
                let mut entry = entry.unwrap();
                if entry.path().unwrap() == Path::new(platform["bin"].as_str().unwrap()) {
                    assert_eq!(entry.header().mode().unwrap() & 0o111, 0o111);
                    let mut content = String::new();
                    entry.read_to_string(&mut content).unwrap();
                    found = content == "a program";
                }
            }
            assert!(found, "{name} has the program");
        }
    }

    #[test]
    fn tags_that_krew_takes() {
        for (tag, good) in [
            ("v0.1.0", true),
            ("v1.20.3-rc.1", true),
            ("0.1.0", false),
            ("v1.2", false),
            ("v01.2.3", false),
            ("vx.y.z", false),
        ] {
            assert_eq!(is_version(tag), good, "{tag}");
        }
    }
}
