//! The program `kp-controlplane`; see `--help`.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use kp_controlplane::flags::{Args, Command, LogFormat};
use kp_controlplane::signals::Signals;
use kp_controlplane::{app, check};
use kplane_agents::certs;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

/// jemalloc, because the C library keeps most of what is freed. Its settings are in `.cargo/config.toml`.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Maximum time for work in progress after everything else has ended.
const LAST_WORK: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(Command::Certs(command)) = &args.command {
        return certs::main(command);
    }
    if let Some(path) = &args.check {
        return check::run(path, args.admission());
    }
    start_log(args.log_format);
    if let Err(error) = kplane_http::raise_file_limit() {
        warn!(%error, "cannot raise the limit of open files");
    }
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kp-controlplane: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(serve(args));
    // Threads that wait for a disk without an answer are left behind.
    runtime.shutdown_timeout(LAST_WORK);
    served
}

fn start_log(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
}

async fn serve(args: &Args) -> anyhow::Result<()> {
    let signals = Signals::listen()?;
    let drain = Duration::from_secs(args.drain);
    let bound = app::build(args.config()).await?;
    let [agents, status, http] = [bound.agent_addr, bound.status_addr, bound.http_addr]
        .map(|at| at.map_or_else(|| "nowhere".to_owned(), |at| at.to_string()));
    info!(agents, status, http, "serving");
    if args.is_local_by_default() {
        info!(
            "agents on other machines cannot connect, since there are no certificates: give --tls-cert-file and \
             --client-ca-file (`kp-controlplane certs init` makes them), and --agent-listen"
        );
    }
    tokio::spawn(signals.follow(Arc::clone(bound.hub()), drain));
    Ok(bound.wait().await?)
}
