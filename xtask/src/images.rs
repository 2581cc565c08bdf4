//! `cargo xtask images` and `cargo xtask dist`: build static programs, and start what packs them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};

use crate::cargo::{build_as_tests, cargo, programs, root};
use crate::progress::watched;
use crate::start::dev;

/// A kind of package.
struct Kind {
    /// The subcommand of the developers' program.
    task: &'static str,
    programs: &'static [&'static str],
    features: &'static [&'static str],
}

/// Images. `devtools/src/images/packages.rs` has the same features and lists what is in the programs.
const IMAGES: Kind = Kind {
    task: "images",
    programs: &["kp-controlplane", "kp-nodeagent"],
    features: &[
        "--no-default-features",
        "--features",
        "kp-nodeagent/userspace",
    ],
};
/// The archive of programs. The agent has a control plane inside.
const DIST: Kind = Kind {
    task: "dist",
    programs: &["kp-controlplane", "kp-nodeagent", "kpctl"],
    features: &[],
};
/// The target unless `--target` names another.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// The profile of programs as shipped, unless `--profile` names another.
const PROFILE: &str = "dist";

/// Builds the programs and writes their images.
pub(crate) fn run(args: Vec<String>) -> Result<ExitCode> {
    pack(&IMAGES, args)
}

/// Builds the programs and writes them into an archive.
pub(crate) fn dist(args: Vec<String>) -> Result<ExitCode> {
    pack(&DIST, args)
}

fn pack(kind: &Kind, mut args: Vec<String>) -> Result<ExitCode> {
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        return dev(kind.task, &args);
    }
    let folder = if args.iter().any(|arg| arg == "--quick") {
        build_as_tests(&[])?;
        programs("dev")?
    } else {
        build(
            kind,
            &option(&args, "--target", TARGET),
            &option(&args, "--profile", PROFILE),
        )?
    };
    args.extend(["--bin-dir".to_owned(), folder.display().to_string()]);
    dev(kind.task, &args)
}

/// Returns the value of an option, or else a default.
fn option(args: &[String], name: &str, default: &str) -> String {
    let mut words = args.iter();
    let named = words.find_map(|word| match word.strip_prefix(name) {
        Some("") => Some(None),
        Some(rest) => rest.strip_prefix('=').map(Some),
        None => None,
    });
    let named = named.and_then(|named| named.or_else(|| words.next().map(String::as_str)));
    named.unwrap_or(default).to_owned()
}

/// Builds static programs, and returns their folder. No path of this machine gets into them.
fn build(kind: &Kind, target: &str, profile: &str) -> Result<PathBuf> {
    let time = match profile {
        PROFILE => {
            "some 12 minutes on two free cores the first time, most of them for link-time optimisation, which --profile \
             release leaves out"
        }
        _ => "some minutes on two free cores the first time",
    };
    println!(
        "Building static programs (profile {profile}): {time}; seconds when nothing has changed."
    );
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(Path::new(&env::var_os("HOME")?).join(".cargo")))
        .context("neither CARGO_HOME nor HOME is set")?;
    let flags = format!(
        "-C target-feature=+crt-static --remap-path-prefix={}=/kplane --remap-path-prefix={}=/cargo",
        root()?.display(),
        home.display()
    );
    let upper = target.to_uppercase().replace('-', "_");
    let mut command = cargo()?;
    command
        .args(["build", "--locked", "--bins", "--profile", profile])
        .args(["--target", target])
        .args(kind.programs.iter().flat_map(|name| ["--package", name]))
        .args(kind.features)
        // These would take the place of the flags below.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env(format!("CARGO_TARGET_{upper}_RUSTFLAGS"), flags);
    if target.starts_with("aarch64") {
        // Kernels for arm64 have pages of 4 to 64 KiB; the allocator works with pages up to this size, 2 to the power of 16.
        command.env("JEMALLOC_SYS_WITH_LG_PAGE", "16");
        if env::consts::ARCH != "aarch64" {
            let linker = "aarch64-linux-gnu-gcc";
            command.env(format!("CARGO_TARGET_{upper}_LINKER"), linker);
        }
    }
    watched(&mut command, kind.programs.len())?;
    programs(&format!("{target}/{profile}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_the_one_that_the_options_name() {
        let named = |line: &str| {
            let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
            option(&words, "--target", TARGET)
        };
        assert_eq!(named("--out there"), TARGET);
        assert_eq!(
            named("--target aarch64-unknown-linux-gnu --out x"),
            "aarch64-unknown-linux-gnu"
        );
        assert_eq!(named("--quick --target=other"), "other");
        let args = ["--profile", "release"].map(str::to_owned);
        assert_eq!(option(&args, "--profile", PROFILE), "release");
    }
}
