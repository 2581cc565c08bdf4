//! `cargo xtask vm`: the tests' virtual machine, whose kernel has IPVS, for manual use.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_rig::vm::{Run, Vm};

/// Options of `cargo xtask vm`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Needs qemu-system-x86, busybox-static and kmod, but no root; the kernel is fetched once. The machine
sees this machine's files; what it writes is lost, except in the folders given with --write.

Examples:
  cargo xtask vm run -- sh -c 'modprobe ip_vs && ipvsadm -Ln'
  cargo xtask vm run -- target/debug/kp-nodeagent --version
  cargo xtask vm shell")]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Run a command in a fresh machine; its exit code is this command's
    Run {
        /// Seconds after which the machine is killed
        #[arg(long, default_value_t = 600)]
        deadline: u64,
        #[command(flatten)]
        options: Options,
        /// The command and its arguments
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// A shell in a fresh machine
    Shell {
        #[command(flatten)]
        options: Options,
    },
}

#[derive(Debug, clap::Args)]
struct Options {
    /// Folder in which changes stay
    #[arg(long, value_name = "FOLDER")]
    write: Option<PathBuf>,
    /// Memory in MiB
    #[arg(long, default_value_t = 2048)]
    memory: u16,
}

/// Runs the requested command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let mut vm = Vm::ensure()?;
    match &args.action {
        Action::Shell { options } => {
            vm.memory = options.memory;
            vm.shell(options.write.as_deref())?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Run {
            deadline,
            options,
            command,
        } => {
            vm.memory = options.memory;
            let (program, arguments) = command.split_first().context("clap requires one")?;
            let mut inside = Command::new(program);
            inside.args(arguments);
            let mut run = Run::new(&inside, Duration::from_secs(*deadline));
            if let Some(folder) = &options.write {
                run = run.writable(folder);
            }
            Ok(vm.run(&run)?.into())
        }
    }
}
