//! The suites of the test command: what each executes, in which lane, and what it needs of the machine.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::tools;
use crate::build::TestProgram;
use crate::cargo::{as_tests, root};
use crate::simulate::SEEDS;

/// Which suites run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// What needs nothing but Rust, a Linux kernel, and root or user namespaces.
    Quick,
    /// Also what needs Go, a virtual machine, Chromium or a whole cluster, and every test on every backend.
    All,
}

/// The load of a suite that only computes, and has no deadlines: it runs at the lowest priority, so that it disturbs no
/// other. One such suite runs at a time.
pub(super) const FILLER: u32 = 0;

/// One suite: a program that runs beside others, and what it needs.
#[derive(Clone, Debug)]
pub(super) struct Suite {
    pub(super) name: String,
    /// Hundredths of a processor that it keeps busy, on average. [`FILLER`] takes what others leave.
    pub(super) load: u32,
    /// Duration on a machine with two processors, roughly: long suites start first.
    pub(super) seconds: u32,
    pub(super) run: Run,
}

/// What a suite executes.
#[derive(Clone, Debug)]
pub(super) enum Run {
    /// A test program with arguments, and with variables that are set to `1`.
    Test(
        TestProgram,
        &'static [&'static str],
        &'static [&'static str],
    ),
    /// kplane's program for developers, on the programs that the build made.
    Dev(&'static [&'static str]),
    /// Cargo, which must find every unit built.
    Cargo(&'static [&'static str]),
    /// Another program.
    Tool(fn(&Path) -> Result<Command>),
}

/// A test program that runs in another way than without arguments, or as several suites.
struct Listed {
    name: &'static str,
    /// The lane, or both.
    lane: Option<Lane>,
    load: u32,
    seconds: u32,
    /// Package and target.
    program: (&'static str, &'static str),
    args: &'static [&'static str],
    vars: &'static [&'static str],
}

const PACKETS: (&str, &str) = ("kplane-tests", "it");
const RIG: (&str, &str) = ("kplane-rig", "it");
const SIMULATION: (&str, &str) = ("kp-nodeagent", "simulation");
/// Has tests run in the virtual machine, as `kplane_tests::vm::IN_VM` says.
const IN_VM: &str = "KPLANE_IN_VM";
/// Has only a chosen part of the packet tests run on backends other than nftables, as the list
/// `chosen` of `tests/src/support/under_test.txt` says.
const CHOSEN: &str = "KPLANE_CHOSEN_TESTS";

#[rustfmt::skip]
const LISTED: [Listed; 16] = [
    Listed { name: "netns", lane: Some(Lane::Quick), load: 100, seconds: 80, program: PACKETS,
        args: &["netns"], vars: &[CHOSEN] },
    Listed { name: "netns", lane: Some(Lane::All), load: 120, seconds: 400, program: PACKETS,
        args: &["netns"], vars: &[] },
    Listed { name: "cluster", lane: Some(Lane::All), load: 60, seconds: 460, program: PACKETS,
        args: &["cluster"], vars: &[] },
    Listed { name: "conformance", lane: Some(Lane::All), load: 80, seconds: 250, program: PACKETS,
        args: &["conformance"], vars: &[] },
    Listed { name: "installed", lane: Some(Lane::All), load: 60, seconds: 320, program: PACKETS,
        args: &["installed"], vars: &[] },
    Listed { name: "chart", lane: Some(Lane::All), load: FILLER, seconds: 60, program: PACKETS,
        args: &["chart"], vars: &[] },
    // A virtual machine has one processor. What one of these runs takes as long as what the other does.
    Listed { name: "vm packets", lane: Some(Lane::All), load: 80, seconds: 300, program: PACKETS,
        args: &["netns", "ipvs::", "--skip", APART], vars: &[IN_VM] },
    Listed { name: "vm faults", lane: Some(Lane::All), load: 80, seconds: 110, program: PACKETS,
        args: &["netns", APART], vars: &[IN_VM] },
    Listed { name: "vm kube-proxy", lane: Some(Lane::All), load: 80, seconds: 120, program: PACKETS,
        args: &["vm"], vars: &[IN_VM] },
    Listed { name: "rig it", lane: Some(Lane::Quick), load: 40, seconds: 15, program: RIG,
        args: &["rig", "--skip", "browser::"], vars: &[] },
    Listed { name: "rig it", lane: Some(Lane::All), load: 60, seconds: 30, program: RIG,
        args: &["rig"], vars: &[] },
    Listed { name: "real nodes", lane: Some(Lane::All), load: 80, seconds: 50, program: RIG,
        args: &["real"], vars: &[] },
    Listed { name: "simulation", lane: Some(Lane::Quick), load: FILLER, seconds: 45, program: SIMULATION,
        args: &["--seeds", "2000"], vars: &[] },
    Listed { name: "simulation", lane: Some(Lane::All), load: FILLER, seconds: 240, program: SIMULATION,
        args: &["--seeds", SEEDS], vars: &[] },
    Listed { name: "controlplane it", lane: None, load: 80, seconds: 60, program: ("kp-controlplane", "it"),
        args: &[], vars: &[] },
    Listed { name: "nodeagent it", lane: None, load: 50, seconds: 150, program: ("kp-nodeagent", "it"),
        args: &[], vars: &[] },
];

/// Tests of `netns` that have a virtual machine of their own.
const APART: &str = "ipvs::virtual_server_faults";

/// Suites that are no test programs: name, lane or both, load, seconds, and what they execute.
type Other = (&'static str, Option<Lane>, u32, u32, Run);

#[rustfmt::skip]
const OTHERS: [Other; 11] = [
    ("demo", None, 60, 15, Run::Dev(&["demo"])),
    ("demo of a real cluster's objects", None, 60, 25, Run::Dev(&["demo", "--objects", "tests/data/cluster-dump.yaml"])),
    ("demo without rights", None, 60, 20, Run::Dev(&["demo", "--userspace"])),
    ("doc tests", None, FILLER, 30, Run::Cargo(&["test", "--workspace", "--doc"])),
    ("docs", Some(Lane::All), FILLER, 120, Run::Cargo(&["doc", "--workspace", "--no-deps", "--document-private-items"])),
    ("benchmarks", Some(Lane::All), FILLER, 90, Run::Tool(tools::lint_bench)),
    ("fuzz targets", Some(Lane::All), FILLER, 60, Run::Tool(tools::check_fuzz)),
    ("agent without features", Some(Lane::All), FILLER, 30, Run::Tool(tools::bare_agent)),
    ("licences", Some(Lane::All), FILLER, 5, Run::Tool(tools::deny)),
    ("licences of benchmarks", Some(Lane::All), FILLER, 5, Run::Tool(tools::deny_bench)),
    ("book", Some(Lane::All), FILLER, 5, Run::Tool(tools::book)),
];

impl Suite {
    /// Returns whether cargo runs it, whose messages say what it compiled.
    pub(super) fn is_by_cargo(&self) -> bool {
        matches!(self.run, Run::Cargo(_))
    }

    /// Returns the command that runs the suite.
    pub(super) fn command(&self, programs: &Path) -> Result<Command> {
        let mut command = match &self.run {
            Run::Test(program, args, vars) => {
                let mut command = Command::new(&program.executable);
                command.args(*args).current_dir(&program.folder);
                command.env("CARGO_MANIFEST_DIR", &program.folder);
                command.envs(vars.iter().map(|var| (var, "1")));
                command
            }
            Run::Dev(args) => {
                let mut command = Command::new(programs.join("kplane-dev"));
                let (task, options) = args.split_first().context("no subcommand")?;
                command.arg(task).arg("--bin-dir").arg(programs).args(options);
                command.current_dir(root()?);
                command
            }
            Run::Cargo(args) => {
                let mut command = as_tests()?;
                // Messages about errors are text, those about units are read afterwards.
                command.args(*args);
                command.arg("--message-format=json-render-diagnostics");
                command.env("RUSTDOCFLAGS", "-D warnings");
                command
            }
            Run::Tool(tool) => tool(root()?)?,
        };
        // Tests that run kplane's programs take these.
        command.env("KPLANE_PROGRAMS", programs);
        Ok(match self.load {
            FILLER => nice(&command),
            _ => command,
        })
    }
}

/// Returns the same command at the lowest priority.
///
/// The kernel compares priorities within a session only, and clusters' nodes have sessions of their own
/// (`sched_autogroup` in sched(7)). So the program gets a session of its own, too, whose priority [`calm`] lowers. It ends
/// with this program.
fn nice(command: &Command) -> Command {
    let mut nice = Command::new("setsid");
    nice.args(["setpriv", "--pdeathsig", "TERM", "nice", "-n", "19"])
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => nice.env(name, value),
            None => nice.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        nice.current_dir(folder);
    }
    nice
}

/// Lowers the priority of a session against all others, where the kernel has such priorities.
pub(super) fn calm(process: u32) {
    let _ = std::fs::write(format!("/proc/{process}/autogroup"), "19");
}

/// Returns the suites of a lane, longest first. Every test program runs in some suite: one that is not listed runs as a
/// suite of its own.
///
/// # Errors
/// The build has not made a listed program.
pub(super) fn suites(lane: Lane, tests: &[TestProgram]) -> Result<Vec<Suite>> {
    let is_listed = |test: &TestProgram| {
        LISTED
            .iter()
            .map(|listed| listed.program)
            .any(|program| program == (&*test.package, &*test.target))
    };
    let mut all: Vec<Suite> = Vec::new();
    for listed in LISTED.iter().filter(|listed| listed.lane.is_none_or(|its| its == lane)) {
        let (package, target) = listed.program;
        let program =
            tests
                .iter()
                .find(|test| (&*test.package, &*test.target) == listed.program)
                .with_context(|| format!("the build has no test program {package} {target}"))?;
        all.push(Suite {
            name: listed.name.to_owned(),
            load: listed.load,
            seconds: listed.seconds,
            run: Run::Test(program.clone(), listed.args, listed.vars),
        });
    }
    for test in tests.iter().filter(|test| !is_listed(test)) {
        let mut name = short(test);
        // A package may have unit tests in its library and in its program.
        if all.iter().any(|suite| suite.name == name) {
            name += " program";
        }
        all.push(Suite {
            name,
            load: 100,
            seconds: 10,
            run: Run::Test(test.clone(), &[], &[]),
        });
    }
    let others = OTHERS.into_iter().filter(|other| other.1.is_none_or(|its| its == lane));
    all.extend(others.map(|(name, _, load, seconds, run)| Suite {
        name: name.to_owned(),
        load,
        seconds,
        run,
    }));
    all.sort_by_key(|suite| std::cmp::Reverse(suite.seconds));
    Ok(all)
}

/// Returns the names of suites that are listed here, with their lane or both.
pub(super) fn names() -> impl Iterator<Item = (&'static str, Option<Lane>)> {
    LISTED
        .iter()
        .map(|listed| (listed.name, listed.lane))
        .chain(OTHERS.into_iter().map(|(name, lane, ..)| (name, lane)))
}

/// Returns the name of a test program's suite: `model` for a library, `cli it` for a test.
fn short(test: &TestProgram) -> String {
    let package = test.package.trim_start_matches("kplane-").trim_start_matches("kp-");
    let is_own = test.target.replace('_', "-") == test.package;
    if is_own { package.to_owned() } else { format!("{package} {}", test.target) }
}
