//! `kp-nodeagent`: see `--help`.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use kp_nodeagent::app;
use kp_nodeagent::config::{Config, Flags, LogFormat, Task};
use kp_nodeagent::report::chain;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

/// Threads for streams and health checks; the kernel's work has a thread of its own.
const WORKERS: usize = 2;

fn main() -> ExitCode {
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        Err(error) if !error.use_stderr() => {
            // --help and --version; a closed standard output is nobody's fault.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => return refuse(&first_paragraph(&error.to_string())),
    };
    start_log(flags.log_format, flags.verbose);
    raise_file_limit();
    match run(flags) {
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

/// One clear line.
fn refuse(reason: &str) -> ExitCode {
    eprintln!("kp-nodeagent: {reason}");
    ExitCode::FAILURE
}

/// What clap says before its usage, on one line.
fn first_paragraph(text: &str) -> String {
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<_> = paragraph.split_whitespace().collect();
    words.join(" ").trim_start_matches("error: ").to_owned()
}

fn start_log(format: LogFormat, verbose: u8) {
    let level = match verbose {
        0 => "info",
        1 => "info,kp_nodeagent=debug,kp_controlplane=debug",
        _ => "debug,kp_nodeagent=trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
}

fn run(flags: Flags) -> anyhow::Result<()> {
    let config = match flags.check()? {
        Task::Run(config) => config,
        Task::Cleanup(kind, settings) => return app::cleanup(kind, &settings),
    };
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(WORKERS).enable_all().build()?;
    runtime.block_on(serve(*config))
}

async fn serve(config: Config) -> anyhow::Result<()> {
    // Before anything starts: from here on a signal ends the agent in order.
    let terminate = signal(SignalKind::terminate())?;
    let interrupt = signal(SignalKind::interrupt())?;
    let bound = app::build(config).await?;
    tokio::spawn(stop_on_signal(terminate, interrupt, bound.shutdown_token()));
    Ok(bound.wait().await?)
}

async fn stop_on_signal(mut terminate: Signal, mut interrupt: Signal, shutdown: CancellationToken) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("shutting down; the rules stay in the kernel");
    shutdown.cancel();
}
