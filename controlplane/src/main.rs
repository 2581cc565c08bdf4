//! `kp-controlplane`: see `--help`.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgAction, ArgGroup, Parser, ValueEnum};
use kp_controlplane::app::Origin;
use kp_controlplane::convert::ExternalIps;
use kp_controlplane::index::{CliffGuard, Guarded};
use kp_controlplane::kubernetes::Access;
use kp_controlplane::source::kubernetes;
use kp_controlplane::{app, check};
use kplane_model::Cidr;
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;
use tracing_subscriber::EnvFilter;

/// kplane's control plane: reads Services once and streams to every node what it must have.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
#[command(group = ArgGroup::new("source").required(true)
    .args(["manifests", "kubeconfig", "in_cluster", "check"]))]
struct Args {
    /// Folder or file of Kubernetes YAML or JSON, or - for standard input: Services,
    /// EndpointSlices, Nodes, ServiceCIDRs. Changes are picked up at once.
    #[arg(
        long,
        value_name = "PATH",
        help_heading = "Where objects come from (one of these)"
    )]
    manifests: Option<PathBuf>,

    /// The Kubernetes API server that a kubeconfig file names, by its current context.
    #[arg(
        long,
        value_name = "FILE",
        help_heading = "Where objects come from (one of these)"
    )]
    kubeconfig: Option<PathBuf>,

    /// The Kubernetes API server of the cluster in whose pod this runs.
    #[arg(long, help_heading = "Where objects come from (one of these)")]
    in_cluster: bool,

    /// Another address of the API server than the kubeconfig's.
    #[arg(long, value_name = "URL", requires = "kubeconfig")]
    master: Option<String>,

    /// Only check a folder or file of manifests, print what is wrong with it, and exit: 0 if it is
    /// fine, 1 if something in it would not be served.
    #[arg(long, value_name = "PATH", help_heading = "Instead of serving")]
    check: Option<PathBuf>,

    /// Where node agents connect.
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:7443")]
    agent_listen: SocketAddr,

    /// Where kpctl and other tools connect.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7444")]
    status_listen: SocketAddr,

    /// Where /livez, /readyz and /metrics are; they show no objects.
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:7445")]
    http_listen: SocketAddr,

    /// Whether Services may have externalIPs at all, as kube-proxy's AllowServiceExternalIPs.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    allow_external_ips: bool,

    /// Ranges in which externalIPs must be, separated by commas; others are refused [default: all].
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    external_ip_cidr: Vec<Cidr>,

    /// Which deletions are held back when they are a cliff, until what they take is back, a later look at
    /// the API server agrees, or `kpctl approve`.
    #[arg(long, value_enum, default_value = "absence", help_heading = CLIFF_GUARD)]
    cliff_guard: Guarded,

    /// A step is a cliff when it takes more than so many percent of the Services, or leaves more than so
    /// many percent of those that have endpoints without any.
    #[arg(long, value_name = "PERCENT", default_value_t = 30, help_heading = CLIFF_GUARD)]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=100))]
    cliff_guard_share: u8,

    /// Fewer Services than this are never a cliff.
    #[arg(long, value_name = "SERVICES", default_value_t = 10, help_heading = CLIFF_GUARD)]
    cliff_guard_minimum: usize,

    /// Whether Kubernetes events are written: about Services that cannot be served, nodes without an
    /// agent, agents that fail. Needs create and patch of events.events.k8s.io.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    events: bool,

    /// How log lines look.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl Args {
    /// clap has made sure that there is exactly one.
    fn origin(&self) -> Origin {
        let access = match (&self.manifests, &self.kubeconfig) {
            (Some(path), _) => return Origin::Manifests(path.clone()),
            (None, Some(file)) => Access::Kubeconfig {
                file: file.clone(),
                master: self.master.clone(),
            },
            (None, None) => Access::InCluster,
        };
        Origin::Kubernetes(kubernetes::Config {
            access,
            only_node: None,
        })
    }

    fn external_ips(&self) -> ExternalIps {
        ExternalIps::new(self.allow_external_ips, self.external_ip_cidr.clone())
    }

    fn cliff_guard(&self) -> CliffGuard {
        CliffGuard {
            deletions: self.cliff_guard,
            share: self.cliff_guard_share,
            minimum: self.cliff_guard_minimum,
        }
    }
}

/// Heading of the flags about deletions of many Services at once.
const CLIFF_GUARD: &str = "Deletions of many Services at once";

const EXAMPLES: &str = "\
Examples:
  Serve a folder of YAML:
    kp-controlplane --manifests deploy/demo
  Serve a cluster:
    kp-controlplane --kubeconfig /etc/kplane/kubeconfig
  Serve what a cluster has at the moment:
    kubectl get svc,endpointslices,nodes,servicecidrs -A -o yaml | kp-controlplane --manifests -
  Check a folder before it goes live:
    kp-controlplane --check deploy/demo

Environment:
  RUST_LOG  what is logged, such as debug or kp_controlplane=debug (default: info)";

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(path) = &args.check {
        return check::run(path, args.external_ips());
    }
    start_log(args.log_format);
    match serve(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kp-controlplane: {error:#}");
            ExitCode::FAILURE
        }
    }
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

async fn serve(args: Args) -> anyhow::Result<()> {
    // From the start, so that a signal is never missed.
    let signals = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
    let [terminate, interrupt] = signals;
    let (mut terminate, mut interrupt) = (terminate?, interrupt?);
    let external_ips = args.external_ips();
    let bound = app::build(app::Config {
        source: args.origin(),
        agent_listen: Some(args.agent_listen),
        status_listen: Some(args.status_listen),
        http_listen: Some(args.http_listen),
        external_ips,
        cliff_guard: args.cliff_guard(),
        events: args.events,
    })
    .await?;
    info!(agents = ?bound.agent_addr, status = ?bound.status_addr, http = ?bound.http_addr, "serving");
    let shutdown = bound.shutdown_token();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        info!("shutting down; agents keep what they have");
        shutdown.cancel();
    });
    Ok(bound.wait().await?)
}
