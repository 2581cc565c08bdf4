//! `cargo xtask demo`: a small cluster out of network namespaces, real packets, and a walk through
//! what kplane does. Every step also checks what it shows.
//!
//! `objects` reads the manifests, `world` builds the network around them, and `stage` holds the
//! processes on it. `expect` computes what must happen to a packet, and `call` finds out what does
//! happen. `calls`, `load` and `frame` are the steps; the `show` records what they see. Network, packets and processes are those of
//! the tests (`kplane_rig`). `userspace` is another demo, which needs no namespaces.

mod call;
mod calls;
mod expect;
mod frame;
mod interrupt;
mod load;
mod manifests;
mod objects;
mod policies;
mod show;
mod stage;
mod userspace;
mod world;

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result};
use kplane_rig::userns::{self, Entry};
use owo_colors::OwoColorize as _;

use self::interrupt::Interrupted;
use self::show::{Show, aside, say};
use self::stage::{Stage, find_programs};

/// Exit code when this machine does not allow what the demo needs.
const IMPOSSIBLE: u8 = 3;
/// Exit code after Ctrl-C, as in shells.
const INTERRUPTED: u8 = 130;

/// Options of the demo.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Needs no root where the kernel allows user namespaces, and nothing but Rust. Exit codes: 0 all
checks passed, 1 not all, 3 this machine does not allow network namespaces, 130 interrupted.

Examples:
  cargo xtask demo                        the little shop in deploy/demo
  cargo xtask demo --keep                 ... and leave it running, to look around
  cargo xtask demo --userspace --keep     Services on loopback addresses, for curl
  kubectl get svc,endpointslices,nodes,servicecidrs -A -o yaml > cluster.yaml
  cargo xtask demo --objects cluster.yaml your own cluster, with echo servers as pods")]
pub(crate) struct Args {
    /// Leave everything running afterwards, print how to explore it, and wait for Ctrl-C
    #[arg(long)]
    keep: bool,
    /// Do it without namespaces and without any right: Services on loopback addresses of this machine
    #[arg(long)]
    userspace: bool,
    /// Do it with the objects of any cluster: a file, or a folder of files, of Kubernetes YAML
    #[arg(long, value_name = "FILE")]
    objects: Option<PathBuf>,
    /// Take the programs from a folder instead of building them
    #[arg(long, value_name = "DIR")]
    bin_dir: Option<PathBuf>,
}

/// A step: its title, and the function that shows something and records its checks. An error ends
/// the walk.
type Step = (&'static str, fn(&mut Show, &mut Stage) -> Result<()>);

/// The walk through any objects.
#[rustfmt::skip]
const WALK: [Step; 5] = [
    ("Start the control plane and an agent on each node", frame::start),
    ("Call every Service at all its addresses, from everywhere, and compare with the rules", calls::survey_all),
    ("Replace the pods of a Service, one by one, under load", load::roll),
    ("Ask kpctl", load::ask_kpctl),
    ("Kill an agent under load, and start it again", load::restart),
];
/// Steps after the first, with the objects of `deploy/demo`.
const DETAILS: [Step; 3] = [
    ("Call Services, and see who answers", calls::connect),
    (
        "Call a Service with session affinity: who comes again meets the same pod",
        calls::affinity,
    ),
    (
        "Protect a pod with NetworkPolicies, and let it be called",
        policies::walk,
    ),
];

/// The kernel does not allow what the demo needs.
#[derive(Debug, thiserror::Error)]
#[error(
    "the demo needs network namespaces, which this machine does not allow; run it as root, or allow user namespaces"
)]
struct Impossible;

/// Plays the demo.
pub(crate) fn run(args: &Args) -> ExitCode {
    let title = if args.userspace {
        "kplane demo: one agent without any right, real connections on this machine"
    } else {
        "kplane demo: one control plane, an agent on every node, real packets"
    };
    say!("{}", title.bold());
    play(args).unwrap_or_else(|error| {
        eprintln!("demo: {error:#}");
        let possible = !error.is::<Impossible>();
        ExitCode::from(if possible { 1 } else { IMPOSSIBLE })
    })
}

/// Builds everything, runs the walk, and cleans up after it in any case.
fn play(args: &Args) -> Result<ExitCode> {
    let own = env::current_exe().context("find this program")?;
    let beside = own.parent().context("programs lie in a folder")?;
    let programs = find_programs(args.bin_dir.as_deref().unwrap_or(beside))?;
    if args.userspace {
        return userspace::play(args, &programs);
    }
    let began = Instant::now();
    // This comes before any thread is started, or the kernel refuses. No mistake can reach this machine's network then.
    let entry = userns::isolate().context(Impossible)?;
    interrupt::watch()?;

    let shop = crate::workspace().join("deploy/demo");
    let manifests = args.objects.as_ref().unwrap_or(&shop);
    let mut walk = WALK.to_vec();
    if args.objects.is_none() {
        walk.splice(1..1, DETAILS);
    }
    let mut show = Show::new(walk.len() + 2);
    show.heading("Build a cluster out of network namespaces");
    let mut stage = Stage::build(programs, manifests)?;
    frame::show_nodes(&stage);
    let who = match entry {
        Entry::Privileged => "as root; this machine's own network",
        Entry::UserNamespace => "without root, in a user namespace; this machine",
    };
    aside!("{who} is not touched");

    let mut result = walk.iter().try_for_each(|step| take(&mut show, &mut stage, step));
    let mut took = began.elapsed();
    if args.keep && !is_interrupted(&result) {
        frame::wait(&stage, entry).unwrap_or_else(|error| eprintln!("demo: {error:#}"));
    }
    let started = Instant::now();
    if result.is_ok() {
        result = take(&mut show, &mut stage, &("Clean up", frame::clean_up));
    }
    let (good, interrupted) = (result.is_ok() && show.all_passed(), is_interrupted(&result));
    let size = stage.world.size();
    match stage.strike(!good && !interrupted) {
        Some(folder) => aside!("logs and manifests are left in {}", folder.display()),
        None => aside!("{size} namespaces, logs and copied manifests: gone"),
    }
    took += started.elapsed();
    if interrupted {
        say!("demo: interrupted; everything that it started has been ended");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    show.print(took);
    Ok(ExitCode::from(u8::from(!good)))
}

/// Takes a step. If it cannot continue, that is a failed check.
fn take(show: &mut Show, stage: &mut Stage, (title, run): &Step) -> Result<()> {
    show.heading(title);
    let started = Instant::now();
    let result = interrupt::check().map_err(Into::into).and_then(|()| run(show, stage));
    if let Err(error) = &result
        && !is_interrupted(&result)
    {
        let wrong = vec![format!("{error:#}")];
        show.check((title, "to go through"), "an error", wrong, started);
    }
    result
}

fn is_interrupted(result: &Result<()>) -> bool {
    result.as_ref().is_err_and(anyhow::Error::is::<Interrupted>)
}
