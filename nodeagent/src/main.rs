//! `kp-nodeagent`: see `--help`.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use kp_nodeagent::app::{self, Bound, Ended, TaskError};
use kp_nodeagent::config::kube_proxy::{Level, Note, with_dashes};
use kp_nodeagent::config::{Checked, Config, Flags, Task};
use kp_nodeagent::log::LogControl;
use kp_nodeagent::{cleanup, log, oom, preflight, sysctl};
use kplane_dataplane::backend;
use kplane_dataplane::chain;
use kplane_dataplane::kernel_setting;
use kplane_desired_state::inside::Start;
use kplane_kube_proxy_config::{KubeProxyConfiguration, to_file};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// jemalloc, because the C library keeps most of what is freed. Its settings are in `.cargo/config.toml`.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Number of threads for streams and health checks; the engine has its own thread. One: to wake another thread for a
/// step of a change costs more than the step (with two, a change takes half as much CPU again).
const WORKERS: usize = 1;

/// The control plane of `--standalone`.
#[cfg(feature = "standalone")]
const INSIDE: Option<Start> = Some(kp_controlplane::app::inside);
#[cfg(not(feature = "standalone"))]
const INSIDE: Option<Start> = None;

/// Longest wait at the end for work in progress.
const LAST_WORK: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let flags = match Flags::try_parse_from(with_dashes(std::env::args_os())) {
        Ok(flags) => flags,
        Err(error) => return no_flags(&error),
    };
    let checked = match flags.check() {
        Ok(checked) => checked,
        Err(error) => return refuse(&error.to_string()),
    };
    let control = log::start(checked.log);
    raise_file_limit();
    if let Task::CheckConfig = checked.task {
        return tell(&checked.notes);
    }
    if let Task::Preflight {
        backend,
        settings,
        conntrack,
        ports,
    } = &checked.task
    {
        let findings = preflight::run(*backend, settings, conntrack, *ports, &checked.notes);
        return match serde_json::to_writer(std::io::stdout(), &findings) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => refuse(&format!("cannot write the findings: {error}")),
        };
    }
    match run(checked, control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(&chain(error.as_ref())),
    }
}

/// Raises the limit of open files as far as allowed: each health check node port takes one or two.
/// If that fails, the agent continues with the current limit, and reports ports that it cannot
/// open.
fn raise_file_limit() {
    if let Err(error) = kplane_http::raise_file_limit() {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}

/// Exit code of `--check-config` when there are warnings.
const WARNINGS: u8 = 2;

/// Exit code of a command line that clap refuses, as in kplane's other programs.
const USAGE: u8 = 2;

/// Prints the notes of `--check-config`.
fn tell(notes: &[Note]) -> ExitCode {
    let mut out = std::io::stdout();
    let mut code = ExitCode::SUCCESS;
    for note in notes {
        let level = match note.level {
            Level::Info => "note",
            Level::Warning => {
                code = WARNINGS.into();
                "warning"
            }
        };
        // A caller that closes standard output wants the exit code alone.
        let _ = writeln!(out, "{level}: {}", note.text);
    }
    code
}

/// Prints one clear line for each reason.
fn refuse(reasons: &str) -> ExitCode {
    for reason in reasons.lines() {
        eprintln!("kp-nodeagent: {reason}");
    }
    ExitCode::FAILURE
}

/// Prints the help, or what is wrong with the flags. `--check-config` has its own meaning of clap's exit code 2.
fn no_flags(error: &clap::Error) -> ExitCode {
    // An error means only that the output is closed.
    let _ = error.print();
    let checks = std::env::args_os().any(|arg| arg == "--check-config");
    match error.exit_code() {
        0 => ExitCode::SUCCESS,
        _ if checks => ExitCode::FAILURE,
        _ => USAGE.into(),
    }
}

fn run(checked: Checked, log: LogControl) -> anyhow::Result<()> {
    for note in &checked.notes {
        match note.level {
            Level::Info => tracing::info!("{}", note.text),
            Level::Warning => tracing::warn!("{}", note.text),
        }
    }
    let config = match checked.task {
        Task::Run(config) => {
            kernel_setting::remember_in(config.cache_dir.clone());
            config
        }
        Task::WriteConfig { path, config } => return to_file(&config, &path),
        Task::InitOnly {
            conntrack,
            ipvs,
            localhost,
            cache_dir,
        } => {
            kernel_setting::remember_in(cache_dir);
            sysctl::apply_and_log(&conntrack);
            ipvs.iter().for_each(backend::ipvs::prepare);
            if localhost {
                backend::iptables::prepare();
            }
            return Ok(());
        }
        Task::Cleanup(task) => return clean_up(&task),
        // The notes, logged above, are the whole result.
        Task::CheckConfig | Task::Preflight { .. } => return Ok(()),
    };
    if let Err(error) = oom::set_score(config.oom_score_adj) {
        tracing::warn!(
            %error,
            "cannot set oomScoreAdj to {}; when memory runs out, the kernel may end the agent like \
             any other process. The rules would stay",
            config.oom_score_adj
        );
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()?;
    let served = runtime.block_on(serve(
        Config {
            inside: INSIDE,
            ..*config
        },
        log,
    ));
    // Tasks that still wait for a disk are abandoned.
    runtime.shutdown_timeout(LAST_WORK);
    served
}

/// Prints one line for each thing, and returns an error with all problems.
fn clean_up(task: &cleanup::Cleanup) -> anyhow::Result<()> {
    let done = cleanup::run(task);
    let mut out = std::io::stdout();
    for line in &done.lines {
        // The cleanup goes on if standard output is closed.
        let _ = writeln!(out, "{line}");
    }
    anyhow::ensure!(done.problems.is_empty(), done.problems.join("\n"));
    Ok(())
}

async fn serve(config: Config, log: LogControl) -> anyhow::Result<()> {
    // These come before anything starts: from here on a signal ends the agent in order.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(async move {
        signalled(&mut terminate, &mut interrupt).await;
        tracing::info!("shutting down; the rules stay in the kernel");
        stopped.cancel();
        signalled(&mut terminate, &mut interrupt).await;
        tracing::info!("second signal: ending at once");
        std::process::exit(0);
    });
    loop {
        let bound = tokio::select! {
            // The start may be waiting for an earlier agent.
            () = stop.cancelled() => return Ok(()),
            bound = app::build(config.clone()) => bound?,
        };
        tokio::spawn(follow_verbosity(bound.configuration(), log.clone()));
        match run_until(bound, &stop).await? {
            Ended::Stopped => return Ok(()),
            Ended::Resumed => {}
        }
    }
}

/// Runs an agent until it ends by itself or the token is cancelled.
async fn run_until(bound: Bound, stop: &CancellationToken) -> Result<Ended, TaskError> {
    let shutdown = bound.shutdown_token();
    let ended = bound.wait();
    tokio::pin!(ended);
    tokio::select! {
        ended = &mut ended => ended,
        () = stop.cancelled() => {
            shutdown.cancel();
            ended.await
        }
    }
}

/// Changes the log level with the configuration file.
async fn follow_verbosity(
    mut configuration: watch::Receiver<Arc<KubeProxyConfiguration>>,
    log: LogControl,
) {
    while configuration.changed().await.is_ok() {
        log.set_verbosity(configuration.borrow_and_update().logging.verbosity);
    }
}

async fn signalled(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
