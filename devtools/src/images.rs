//! `cargo xtask images`: images of kplane's programs, written without a daemon and without a registry.
//!
//! An image consists of the files that every image has, Debian's programs in the image with iptables, and the
//! program with its bill of materials. The commit, the compiler and Debian's packages decide on every byte.

mod debian;
mod manual;
mod packages;
mod program;
mod recipe;
mod sbom;
pub(crate) mod tarball;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use flate2::Compression;
use kplane_rig::oci::Image;

use self::debian::Collection;
use self::packages::Crates;
use self::program::Program;
use self::recipe::{Commit, Content, RECIPES, architecture, unpack};

/// Bytes in a MiB.
const MIB: f64 = 1_048_576.0;

/// Options of `cargo xtask images`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Writes an archive for each image, and its bill of materials (CycloneDX) beside it. Needs no daemon, and no network
once the crates are there. The same commit, compiler and Debian packages give the same bytes.

Examples:
  cargo xtask images
  ctr --namespace k8s.io images import target/images/kp-nodeagent-amd64.tar
  podman load --input target/images/kp-controlplane-amd64.tar
  skopeo copy oci-archive:target/images/kp-nodeagent-amd64.tar docker://registry.example/kp-nodeagent:0.1.0")]
pub(crate) struct Args {
    /// Folder of the images
    #[arg(long, value_name = "DIR", default_value = "target/images")]
    out: PathBuf,
    /// Also write the files of each image into a folder below this one, for deploy/Containerfile
    #[arg(long, value_name = "DIR")]
    roots: Option<PathBuf>,
    #[command(flatten)]
    built: Built,
}

/// The programs that are packed.
#[derive(Debug, clap::Args)]
struct Built {
    /// Use the programs of `cargo xtask test`: not optimised, with the shared libraries that they need
    #[arg(long)]
    quick: bool,
    /// Profile of the programs: dist, as shipped, or release, which is built faster, because the linker optimises nothing
    #[arg(long, value_name = "PROFILE", default_value = "dist", value_parser = ["dist", "release"])]
    profile: String,
    /// Target of the programs: x86_64-unknown-linux-gnu or aarch64-unknown-linux-gnu
    #[arg(
        long,
        value_name = "TRIPLE",
        default_value = "x86_64-unknown-linux-gnu"
    )]
    target: String,
    /// Folder of the built programs
    #[arg(long, value_name = "DIR", hide = true)]
    bin_dir: PathBuf,
}

impl Built {
    /// Says that the programs are not as shipped.
    fn tell(&self) {
        if self.profile != "dist" {
            println!(
                "These programs are not as shipped: they are larger and slower than those of profile dist."
            );
        }
    }

    /// Returns how much to compress.
    fn level(&self) -> Compression {
        if self.quick { Compression::fast() } else { Compression::best() }
    }
}

/// Writes the images.
pub(crate) fn run(args: &Args) -> Result<()> {
    let architecture = architecture(&args.built.target)?;
    args.built.tell();
    let metadata = packages::metadata(&args.built.target, args.built.quick)?;
    let commit = Commit::of_checkout();
    let level = args.built.level();
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create {}", args.out.display()))?;
    println!("{:<44} {:>10} {:>10}", "image", "to pull", "on disk");
    for recipe in &RECIPES {
        let crates = Crates::of(recipe.program, &metadata)?;
        let built = args.built.bin_dir.join(recipe.program);
        let program = Program::prepare(&built, &crates, objcopy(&args.built.target))?;
        let content = Content::new((recipe, &program), architecture, &commit, &crates, level)?;
        write(args, recipe.program, &content.image(None)?)?;
        if !recipe.with_iptables {
            continue;
        }
        if is_this_machines(&args.built.target) {
            let tools = Collection::of_netfilter()?;
            let name = format!("{}-iptables", recipe.program);
            write(args, &name, &content.image(Some(&tools))?)?;
        } else {
            println!("no image with iptables: it is made on a machine of the same architecture");
        }
    }
    Ok(())
}

/// Writes an image and its bill of materials.
fn write(args: &Args, name: &str, (image, bill): &(Image, Vec<u8>)) -> Result<()> {
    let name = format!("{name}-{}", image.architecture);
    let place = |extension: &str| args.out.join(format!("{name}.{extension}"));
    let put = |path: PathBuf, bytes: &[u8]| {
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))
    };
    let (bytes, digest) = image.archive()?;
    put(place("tar"), &bytes)?;
    put(place("cdx.json"), bill)?;
    if let Some(roots) = &args.roots {
        unpack(image, &roots.join(&name))?;
    }
    println!(
        "{:<44} {:>6.1} MiB {:>6.1} MiB\n  {} {digest}",
        image.name,
        mib(image.pulled()),
        mib(image.unpacked()),
        place("tar").display()
    );
    Ok(())
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / MIB
}

/// Returns the program that edits the programs of a target.
fn objcopy(target: &str) -> &'static str {
    match (is_this_machines(target), target.starts_with("aarch64")) {
        (true, _) => "objcopy",
        (false, true) => "aarch64-linux-gnu-objcopy",
        (false, false) => "x86_64-linux-gnu-objcopy",
    }
}

/// Returns whether a target's programs run on this machine.
fn is_this_machines(target: &str) -> bool {
    target.split('-').next() == Some(std::env::consts::ARCH)
}
