//! Kubernetes' own end-to-end tests, on demand: `cargo xtask test e2e`.

use std::process::ExitCode;

use anyhow::Result;

use crate::cargo::root;
use crate::images;
use crate::start::dev;

/// The folder of kplane's images, which other tests use, too.
const IMAGES: &str = "target/images-of-tests";
/// What needs no images of kplane.
const WITHOUT: [&str; 3] = ["--help", "-h", "--page"];

/// Builds kplane's images, and starts what runs the tests.
pub(super) fn run(args: &[String]) -> Result<ExitCode> {
    with_images("test-e2e", args)
}

/// Builds kplane's images as tests need them, and starts a subcommand of the developers' program.
pub(crate) fn with_images(task: &str, args: &[String]) -> Result<ExitCode> {
    if !args.iter().any(|arg| WITHOUT.contains(&&**arg)) {
        let folder = root()?.join(IMAGES).display().to_string();
        let words = ["--quick", "--out", &folder].map(str::to_owned);
        let made = images::run(words.to_vec())?;
        if made != ExitCode::SUCCESS {
            return Ok(made);
        }
    }
    dev(task, args)
}
