//! The commands, one function each: ask the control plane, show the answer, return a verdict.

mod bundle;
mod check;
mod describe;
mod drops;
mod flows;
mod get;
mod graph;
mod listing;
mod migrate;
mod page;
mod probe;
mod proxied;
mod record;
mod uninstall;
mod why;

use std::io::{self, IsTerminal as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use tokio::time::Instant;

use crate::args::{
    self, Checked, Cli, Command, DescribeCommand, FreezeArgs, RowArgs, StatusArgs, WaitArgs,
};
use crate::client::{self, Client};
use crate::complete;
use crate::connection::Route;
use crate::failure::Failure;
use crate::output::Output;
use crate::wait::Waiter;
use crate::watch;
use kplane_view::approve::ApprovalView;
use kplane_view::fleet::FleetView;
use kplane_view::freeze::FreezeView;
use kplane_view::node::NodeDescriptionView;
use kplane_view::version::VersionView;
use kplane_view::wait::WaitView;
use kplane_view::{List, View};

/// Time after which a person at a terminal hears what takes so long.
const PATIENCE: Duration = Duration::from_secs(1);

/// The outcome of a command that did its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Exit code 0.
    Done,
    /// Exit code 3: `--check` found something.
    CheckFailed,
    /// Exit code 4: the user did not approve.
    Declined,
    /// Exit code 1: the goal was not reached in time, or a check found something bad.
    NotReached,
    /// Exit code 2: something could not be checked.
    Blind,
    /// Exit code 6: a node did not answer.
    Unanswered,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Done => Self::SUCCESS,
            Verdict::NotReached => Self::FAILURE,
            Verdict::Blind => Self::from(2),
            Verdict::CheckFailed => Self::from(3),
            Verdict::Declined => Self::from(4),
            Verdict::Unanswered => Self::from(6),
        }
    }
}

/// Runs the command.
pub(crate) async fn run(cli: Cli) -> Result<Verdict, Failure> {
    if cli.options.no_color {
        anstream::ColorChoice::Never.write_global();
    }
    match &cli.command {
        Command::Status(args) => status(&cli, args).await,
        Command::Get(command) => get::run(&cli, command).await,
        Command::Describe(DescribeCommand::Service(args)) => {
            describe::service(&cli, args.name()?).await
        }
        Command::Describe(DescribeCommand::Policy(args)) => {
            describe::policy(&cli, args.name()?).await
        }
        Command::Why(args) => why::run(&cli, args).await,
        Command::Drops(args) => drops::run(&cli, args).await,
        Command::Flows(args) => flows::run(&cli, args).await,
        Command::Graph(args) => graph::run(&cli, args).await,
        Command::Describe(DescribeCommand::Node { node }) => {
            node_of(&cli, node).await?;
            Ok(Verdict::Done)
        }
        Command::Listed(args::FirstWord(args)) => listing::run(&cli, args).await,
        Command::Probe(args) => probe::run(&cli, args).await,
        Command::Wait(args) => wait(&cli, args).await,
        Command::Approve { yes } => approve(&cli, *yes).await,
        Command::Freeze(args) => freeze(&cli, args, false).await,
        Command::Thaw(args) => freeze(&cli, args, true).await,
        Command::History(args) => record::history(&cli, args).await,
        Command::Diff(args) => record::diff(&cli, args).await,
        Command::Bundle(args) => bundle::run(&cli, args).await,
        Command::Page(args) => page::run(&cli, args).await,
        Command::Check(args) => check::run(&cli, args).await,
        Command::Migrate(command) => migrate::run(&cli, command).await,
        Command::Uninstall(args) => uninstall::run(&cli, args).await,
        Command::Options => {
            io::Write::write_all(&mut io::stdout(), args::options(cli.program).as_bytes())?;
            Ok(Verdict::Done)
        }
        Command::Man { directory } => man(cli.program, directory),
        Command::Completion { shell } => {
            let mut script = Vec::new();
            complete::write_script(*shell, &mut script)?;
            io::Write::write_all(&mut io::stdout(), &script)?;
            Ok(Verdict::Done)
        }
        Command::Version { client } => version(&cli, *client).await,
    }
}

/// Writes the manual pages.
fn man(program: &'static str, directory: &Path) -> Result<Verdict, Failure> {
    let made = std::fs::create_dir_all(directory);
    made.and_then(|()| clap_mangen::generate_to(args::command(program), directory))
        .map_err(|error| {
            Failure::Refused(format!(
                "cannot write manual pages into {}: {error}. Name a directory that you may change",
                directory.display()
            ))
        })?;
    Ok(Verdict::Done)
}

/// Connects. A person at a terminal hears what takes longer than a moment.
async fn connect(cli: &Cli) -> Result<(Client, Route), client::Error> {
    let mut route = Route::choose(&cli.options)?;
    let server = route.describe();
    let connected = {
        let mut connecting = std::pin::pin!(Client::connect(&mut route));
        tokio::select! {
            connected = &mut connecting => connected,
            () = tokio::time::sleep(PATIENCE) => {
                if io::stderr().is_terminal() {
                    anstream::eprintln!("connecting to the control plane through {server}");
                }
                connecting.await
            }
        }
    };
    Ok((connected?, route))
}

async fn status(cli: &Cli, args: &StatusArgs) -> Result<Verdict, Failure> {
    if args.watch.watch {
        let mut link = watch::Link::new(connect(cli).await?);
        let view = |fleet| Ok(FleetView::from(fleet));
        watch::fleet(&mut link, &mut output(cli, true), view).await?;
        return Ok(Verdict::Done);
    }
    let healthy = if let Some(node) = &args.node {
        let in_sync = node_of(cli, node).await?.is_in_sync();
        // The input is not about one node.
        args.check.is_none() || in_sync
    } else {
        let view = FleetView::from(connect(cli).await?.0.fleet().await?);
        show(cli, &view)?;
        match args.check {
            None => true,
            Some(Checked::All) => view.summary.healthy,
            Some(Checked::Nodes) => view.summary.nodes_healthy,
            Some(Checked::Input) => view.summary.input_healthy,
        }
    };
    Ok(if healthy { Verdict::Done } else { Verdict::CheckFailed })
}

/// Shows everything about one node.
async fn node_of(cli: &Cli, node: &str) -> Result<NodeDescriptionView, Failure> {
    let fleet = connect(cli).await?.0.node(node).await?;
    let view = NodeDescriptionView::new(fleet).ok_or_else(|| get::no_node(cli, node))?;
    show(cli, &view)?;
    Ok(view)
}

/// Waits for Services, and shows how far they have come in the end.
async fn wait(cli: &Cli, args: &WaitArgs) -> Result<Verdict, Failure> {
    let names = args.names()?;
    let deadline = Instant::now() + cli.options.goal;
    let link = watch::Link::new(connect(cli).await?);
    let mut waiter = Waiter::new(link, deadline, output(cli, false));
    let mut services = Vec::new();
    for name in &names {
        services.push(waiter.until(name, args.goal, args.threshold).await?);
    }
    // The line with the progress goes away.
    drop(waiter);
    let view = WaitView::new(args.goal, args.threshold, cli.options.goal, services);
    show(cli, &view)?;
    Ok(if view.reached { Verdict::Done } else { Verdict::NotReached })
}

/// Shows what is held, asks for approval, and sends it.
async fn approve(cli: &Cli, yes: bool) -> Result<Verdict, Failure> {
    let (mut client, mut route) = connect(cli).await?;
    let pending = ApprovalView::from(client.fleet().await?);
    if pending.is_empty() {
        return show(cli, &pending);
    }
    if !yes {
        Output::stderr(cli.program).show(&pending)?;
        if !ask("Remove everything that is missing from the source? [y/N] ")? {
            anstream::eprintln!("Nothing was approved.");
            return Ok(Verdict::Declined);
        }
        // While the user was thinking, the control plane may have closed the idle connection.
        client = Client::connect(&mut route).await?;
    }
    let done = client.approve(pending.request()).await?;
    show(cli, &ApprovalView::from(done))
}

/// Freezes nodes, or thaws them.
async fn freeze(cli: &Cli, args: &FreezeArgs, thaw: bool) -> Result<Verdict, Failure> {
    let (client, _) = connect(cli).await?;
    let done = client.freeze(args.request(thaw)).await?;
    show(cli, &FreezeView::new(done, thaw))
}

/// Asks at the terminal; any answer but yes is a no.
fn ask(question: &str) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(Failure::NobodyToAsk);
    }
    anstream::eprint!("{question}");
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    let answer = answer.trim();
    Ok(["y", "yes"].iter().any(|yes| answer.eq_ignore_ascii_case(yes)))
}

/// Shows this program's version even when the control plane does not answer.
async fn version(cli: &Cli, client_only: bool) -> Result<Verdict, Failure> {
    if client_only {
        return show(cli, &VersionView::new(None));
    }
    let answer = match connect(cli).await {
        Ok((client, _)) => client.fleet().await,
        Err(error) => Err(error),
    };
    match answer {
        Ok(fleet) => {
            let version = fleet.control_plane.unwrap_or_default().version;
            show(cli, &VersionView::new(Some(version)))
        }
        Err(error) => {
            show(cli, &VersionView::new(None))?;
            Err(error.into())
        }
    }
}

fn output(cli: &Cli, watch: bool) -> Output<io::Stdout> {
    let output = Output::stdout(cli.options.output.clone(), cli.program, watch);
    output.with(cli.extent())
}

fn show<V: View>(cli: &Cli, view: &V) -> Result<Verdict, Failure> {
    output(cli, false).show(view)?;
    Ok(Verdict::Done)
}

/// Returns a list in the order of `--sort-by`.
fn sorted<V: List>(mut view: V, rows: &RowArgs) -> Result<V, Failure> {
    if let Some(path) = &rows.sort_by {
        path.sort(view.items()).map_err(Failure::Refused)?;
    }
    Ok(view)
}
