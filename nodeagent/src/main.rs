//! `kp-nodeagent`: see `--help`.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use kp_nodeagent::backend;
use kp_nodeagent::cache::Cache;
use kp_nodeagent::config::kube_proxy::{KubeProxyConfiguration, Level, to_file, with_dashes};
use kp_nodeagent::config::{Checked, Config, Flags, Task};
use kp_nodeagent::log::LogControl;
use kp_nodeagent::report::chain;
use kp_nodeagent::{app, log, oom, sysctl};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Threads for streams and health checks; the kernel's work has a thread of its own.
const WORKERS: usize = 2;

fn main() -> ExitCode {
    let flags = match Flags::try_parse_from(with_dashes(std::env::args_os())) {
        Ok(flags) => flags,
        Err(error) if !error.use_stderr() => {
            // --help and --version; a closed standard output is nobody's fault.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => return refuse(&first_paragraph(&error.to_string())),
    };
    let checked = match flags.check() {
        Ok(checked) => checked,
        Err(error) => return refuse(&error.to_string()),
    };
    let control = log::start(checked.log);
    raise_file_limit();
    match run(checked, control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(&chain(error.as_ref())),
    }
}

/// As many open files as the agent may have: each health check node port takes one or two. It goes
/// on with what it has if that cannot be raised, and reports ports that it cannot open.
fn raise_file_limit() {
    let files = Resource::RLIMIT_NOFILE;
    let raised = getrlimit(files).and_then(|(_, hard)| setrlimit(files, hard, hard));
    if let Err(error) = raised {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}

/// One clear line for each reason.
fn refuse(reasons: &str) -> ExitCode {
    for reason in reasons.lines() {
        eprintln!("kp-nodeagent: {reason}");
    }
    ExitCode::FAILURE
}

/// What clap says before its usage, on one line.
fn first_paragraph(text: &str) -> String {
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<_> = paragraph.split_whitespace().collect();
    words.join(" ").trim_start_matches("error: ").to_owned()
}

fn run(checked: Checked, log: LogControl) -> anyhow::Result<()> {
    for note in &checked.notes {
        match note.level {
            Level::Info => tracing::info!("{}", note.text),
            Level::Warning => tracing::warn!("{}", note.text),
        }
    }
    let config = match checked.task {
        Task::Run(config) => config,
        Task::WriteConfig { path, config } => return to_file(&config, &path),
        Task::InitOnly { conntrack, ipvs } => {
            sysctl::apply_and_log(&conntrack);
            ipvs.iter().for_each(backend::ipvs::prepare);
            return Ok(());
        }
        Task::Cleanup {
            backend,
            settings,
            cache_dir,
        } => return clean_up(backend, &settings, cache_dir.as_deref()),
    };
    if app::takes_over(config.backend) {
        sysctl::apply_and_log(&config.conntrack);
    }
    if let Err(error) = oom::set_score(config.oom_score_adj) {
        tracing::warn!(
            %error,
            "oomScoreAdj {} cannot be set; when memory runs out this process is as likely to be \
             ended as any other. The rules would stay",
            config.oom_score_adj
        );
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(WORKERS).enable_all().build()?;
    runtime.block_on(serve(*config, log))
}

/// One line for each thing that is gone, and an error that names all that could not be removed.
fn clean_up(
    kind: backend::Kind,
    settings: &backend::Settings,
    cache_dir: Option<&Path>,
) -> anyhow::Result<()> {
    let mut done = app::cleanup(kind, settings);
    match cache_dir.map_or(Ok(0), Cache::forget) {
        Ok(0) => {}
        Ok(_) => done.gone.push("the memory of what was served".to_owned()),
        Err(error) => done
            .problems
            .push(format!("the memory of what was served: {error}")),
    }
    let mut out = std::io::stdout();
    for name in &done.gone {
        // A closed standard output is no reason to leave anything.
        let _ = writeln!(out, "gone: {name}");
    }
    let problems = done.problems.join("; ");
    anyhow::ensure!(
        problems.is_empty(),
        "not everything could be removed: {problems}"
    );
    Ok(())
}

async fn serve(config: Config, log: LogControl) -> anyhow::Result<()> {
    // Before anything starts: from here on a signal ends the agent in order.
    let terminate = signal(SignalKind::terminate())?;
    let interrupt = signal(SignalKind::interrupt())?;
    let bound = app::build(config).await?;
    tokio::spawn(stop_on_signal(terminate, interrupt, bound.shutdown_token()));
    tokio::spawn(follow_verbosity(bound.configuration(), log));
    Ok(bound.wait().await?)
}

/// Logs more or less when the configuration file says so.
async fn follow_verbosity(
    mut configuration: watch::Receiver<Arc<KubeProxyConfiguration>>,
    log: LogControl,
) {
    while configuration.changed().await.is_ok() {
        log.set_verbosity(configuration.borrow_and_update().logging.verbosity);
    }
}

async fn stop_on_signal(mut terminate: Signal, mut interrupt: Signal, shutdown: CancellationToken) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("shutting down; the rules stay in the kernel");
    shutdown.cancel();
}
