//! `cargo xtask demo`: a small cluster out of network namespaces, real packets, and a walk through
//! what kplane does. Every step also checks what it shows.
//!
//! `objects` reads the manifests, `world` builds the network around them, and `cast` holds the
//! processes. `status` queries the control plane. `expect` computes what must happen to a packet;
//! `call` and `survey` find out what does happen. `steps` show it on the `screen` and record it in
//! the `ledger`.

mod call;
mod cast;
mod expect;
mod interrupt;
mod layout;
mod ledger;
mod manifests;
mod objects;
mod programs;
mod screen;
mod stage;
mod status;
mod steps;
mod survey;
mod world;

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result};
use kplane_rig::userns::{self, Entry};

use self::interrupt::Interrupted;
use self::programs::Programs;
use self::screen::{Screen, Tone};
use self::stage::{Show, Stage};
pub(crate) use self::steps::hold;

/// Exit code when this machine does not allow what the demo needs.
const IMPOSSIBLE: u8 = 3;
/// Exit code after Ctrl-C, as in shells.
const INTERRUPTED: u8 = 130;
/// Steps around the walk: network, clean-up.
const FRAME: usize = 2;

/// Options of the demo.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Needs no root where the kernel allows user namespaces, and nothing but Rust. Exit codes: 0 all
checks passed, 1 not all, 3 this machine does not allow network namespaces, 130 interrupted.

Examples:
  cargo xtask demo                        the little shop in deploy/demo
  cargo xtask demo --keep                 ... and leave it running, to look around
  kubectl get svc,endpointslices,nodes,servicecidrs -A -o yaml > cluster.yaml
  cargo xtask demo --objects cluster.yaml your own cluster, with echo servers as pods")]
pub(crate) struct Args {
    /// Leave everything running afterwards, print how to explore it, and wait for Ctrl-C
    #[arg(long)]
    keep: bool,
    /// Do it with the objects of any cluster: a file, or a folder of files, of Kubernetes YAML
    #[arg(long, value_name = "FILE")]
    objects: Option<PathBuf>,
    /// Take the programs from a folder instead of building them
    #[arg(long, value_name = "DIR")]
    bin_dir: Option<PathBuf>,
}

/// Plays the demo.
pub(crate) fn run(args: &Args) -> ExitCode {
    let walk = if args.objects.is_some() {
        steps::OBJECTS
    } else {
        steps::DEMO
    };
    let screen = Screen::stdout();
    let mut show = Show::new(screen, walk.len() + FRAME);
    let title = "kplane demo: one control plane, an agent on every node, real packets";
    screen.line(screen.paint(Tone::Strong, title));
    match open(&mut show, args) {
        Ok((entry, stage, began)) => play(show, walk, stage, (args.keep, entry), began),
        Err((error, code)) => {
            screen.flush();
            eprintln!("demo: {error:#}");
            code
        }
    }
}

/// Prepares everything that must exist before the first process starts.
fn open(
    show: &mut Show,
    args: &Args,
) -> Result<(Entry, Stage, Instant), (anyhow::Error, ExitCode)> {
    let failed = |error| (error, ExitCode::FAILURE);
    let programs = find(args.bin_dir.as_deref()).map_err(failed)?;
    let began = Instant::now();
    // This comes before any thread is started, or the kernel refuses.
    let entry = userns::isolate().map_err(|error| {
        let why = "the demo needs network namespaces, which this machine does not allow; \
                   run it as root, or allow user namespaces";
        (error.context(why), ExitCode::from(IMPOSSIBLE))
    })?;
    interrupt::watch().map_err(failed)?;
    show.heading("Build a cluster out of network namespaces");
    let shop = crate::workspace().join("deploy/demo");
    let manifests = args.objects.as_ref().unwrap_or(&shop);
    let working = show.screen.working("machines, links, routes, echo servers");
    let stage = Stage::build(programs, manifests).map_err(failed)?;
    drop(working);
    steps::show_nodes(&show.screen, &stage);
    show.screen.aside(match entry {
        Entry::Privileged => "as root; this machine's own network is not touched",
        Entry::UserNamespace => "without root, in a user namespace; this machine is not touched",
    });
    Ok((entry, stage, began))
}

/// Finds the programs in a folder; without one they lie beside this program.
fn find(folder: Option<&Path>) -> Result<Programs> {
    match folder {
        Some(folder) => Programs::in_folder(folder),
        None => {
            let program = env::current_exe().context("find this program")?;
            Programs::in_folder(program.parent().context("programs lie in a folder")?)
        }
    }
}

/// Runs the walk, and cleans up after it in any case.
fn play(
    mut show: Show,
    walk: &[steps::Step],
    mut stage: Stage,
    (keep, entry): (bool, Entry),
    began: Instant,
) -> ExitCode {
    let screen = show.screen;
    let mut result = Ok(());
    for step in walk {
        show.heading(step.title);
        let started = Instant::now();
        result = interrupt::check()
            .map_err(Into::into)
            .and_then(|()| (step.run)(&mut show, &mut stage));
        if let Err(error) = &result {
            note(&mut show, step.title, error, started);
            break;
        }
    }
    let mut took = began.elapsed();
    if keep
        && !is_interrupted(&result)
        && let Err(error) = steps::wait(&screen, &stage, entry)
    {
        eprintln!("demo: {error:#}");
    }
    show.last_heading("Clean up");
    let started = Instant::now();
    if result.is_ok() {
        result = steps::strike(&mut show, &mut stage);
        if let Err(error) = &result {
            note(&mut show, "clean up", error, started);
        }
    }
    let good = result.is_ok() && show.ledger.all_passed();
    let size = stage.world.size;
    match stage.strike(!good && !is_interrupted(&result)) {
        Some(folder) => screen.aside(format!(
            "logs and manifests are left in {}",
            folder.display()
        )),
        None => screen.aside(format!(
            "{size} namespaces, logs and copied manifests: gone"
        )),
    }
    took += started.elapsed();
    if is_interrupted(&result) {
        screen.line("demo: interrupted; everything that it started has been ended");
        return ExitCode::from(INTERRUPTED);
    }
    screen.gap();
    show.ledger.print(&screen, took);
    if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Records a step that could not continue as a failed check.
fn note(show: &mut Show, title: &str, error: &anyhow::Error, started: Instant) {
    if !error.is::<Interrupted>() {
        let wrong = vec![format!("{error:#}")];
        show.check((title, "to go through"), "an error", wrong, started);
    }
}

fn is_interrupted(result: &Result<()>) -> bool {
    result.as_ref().is_err_and(anyhow::Error::is::<Interrupted>)
}
