//! Builds and starts the programs that do the work of `demo`, `cluster` and `vm`.

use std::process::{Command, ExitCode, ExitStatus};
use std::time::Instant;

use anyhow::{Context as _, Result};

use crate::cargo::{build_as_tests, programs, run};

/// The packages that the demo plays with, and the demo itself.
const DEMO: [&str; 4] = ["kp-controlplane", "kp-nodeagent", "kpctl", "kplane-dev"];

/// The text of `cargo xtask demo --help`; the test `the_help_of_the_demo_names_its_flags` compares it with the
/// program.
const DEMO_HELP: &str = include_str!("demo.txt");

/// Builds everything that the demo needs, once, and plays it.
pub(crate) fn demo(mut args: Vec<String>) -> Result<ExitCode> {
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        print!("{DEMO_HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let quick = args.iter().position(|arg| arg == "--quick");
    let profile = match quick {
        Some(place) => {
            args.remove(place);
            "dev"
        }
        None => "demo",
    };
    let folder = programs(profile)?;
    if args.iter().any(|arg| arg.starts_with("--bin-dir")) {
        build(profile, &["kplane-dev"])?;
    } else {
        build(profile, &DEMO)?;
        args.extend(["--bin-dir".to_owned(), folder.display().to_string()]);
    }
    play(Command::new(folder.join("kplane-dev")).arg("demo").args(args))
}

/// Builds the programs and the demo beside them.
fn build(profile: &str, packages: &[&str]) -> Result<()> {
    let built = programs(profile)?.join("kplane-dev").exists();
    match (built, profile) {
        (true, _) => println!("Building what changed in kplane's programs (profile {profile})."),
        (false, "dev") => println!(
            "Building kplane's programs and the demo without optimisation, as `cargo xtask test` does. The first \
             build takes five minutes on two cores, later ones take seconds."
        ),
        (false, _) => println!(
            "Building kplane's programs and the demo. The first build takes four minutes on two cores, later ones \
             take seconds. --quick builds faster, without optimisation."
        ),
    }
    let started = Instant::now();
    if profile == "dev" {
        build_as_tests(&[])?;
    } else {
        let packages = packages.iter().flat_map(|name| ["--package", name]);
        let mut args = vec!["build", "--profile", profile];
        args.extend(packages);
        run(&args)?;
    }
    println!("Built in {:.0} s.", started.elapsed().as_secs_f64());
    Ok(())
}

/// Builds and starts a subcommand of the developers' program, as tests are built.
pub(crate) fn dev(task: &str, args: &[String]) -> Result<ExitCode> {
    build_as_tests(&["--quiet"])?;
    play(Command::new(programs("dev")?.join("kplane-dev")).arg(task).args(args))
}

/// Runs a program whose exit code is this program's.
fn play(command: &mut Command) -> Result<ExitCode> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot start {program}"))?;
    Ok(exit_code(status))
}

fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.map_or(ExitCode::FAILURE, ExitCode::from)
}
