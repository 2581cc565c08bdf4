//! The command line, parsed and validated: its values can be used without further checks.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use jiff::SignedDuration;
use kplane_model::ServiceName;
use kplane_tls::{ClientFiles, is_this_machine};
use tonic::transport::Uri;

use crate::output::Format;

/// Port of the control plane's status service.
const STATUS_PORT: u16 = 7444;

/// The name of this program in help texts.
const PROGRAM: &str = "kpctl";

/// The name of this program when kubectl runs it as `kubectl-kplane`.
const PLUGIN: &str = "kubectl kplane";

/// Shows what every node holds of your Services, and why something is missing.
#[derive(Debug, Parser)]
#[command(name = PROGRAM, version, disable_help_subcommand = true, max_term_width = 100)]
#[command(after_help = "\
Exit codes:
  0  done            3  status --check: not in sync, or errors in the input
  1  server error    4  approve: not approved
  2  wrong usage

Examples:
  kpctl status
  kpctl describe service shop/web
  kpctl get endpoints -n shop -o wide --server 10.0.0.5:7444")]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) options: Options,
    #[command(subcommand)]
    pub(crate) command: Command,
    /// The name by which the user called this program.
    #[arg(skip = PROGRAM)]
    pub(crate) program: &'static str,
}

/// Options of every command.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Options {
    /// Status address of the control plane: HOST, HOST:PORT or https://HOST:PORT
    #[arg(long, global = true, env = "KPLANE_SERVER", value_name = "ADDRESS")]
    #[arg(default_value = "127.0.0.1:7444", value_parser = parse_server)]
    pub(crate) server: Server,
    #[command(flatten)]
    pub(crate) identity: Identity,
    /// Longest time to wait for an answer, such as 10s, 500ms or 1m
    #[arg(long, global = true, default_value = "10s", value_name = "DURATION")]
    #[arg(value_parser = parse_timeout)]
    pub(crate) timeout: Duration,
    /// Output format: table (fits the terminal), wide (shows everything), json or yaml
    #[arg(short, long, global = true, value_enum, default_value = "table")]
    #[arg(value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) output: Format,
    /// No colours (also: NO_COLOR=1)
    #[arg(long, global = true)]
    pub(crate) no_color: bool,
}

/// Options about TLS.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Identity {
    /// Authorities that issue the control plane's certificate (PEM); the server is https:// then
    #[arg(
        long,
        global = true,
        env = "KPLANE_CERTIFICATE_AUTHORITY",
        value_name = "FILE"
    )]
    pub(crate) certificate_authority: Option<PathBuf>,
    /// Your certificate, such as one of `kp-controlplane certs user`
    #[arg(
        long,
        global = true,
        env = "KPLANE_CLIENT_CERTIFICATE",
        value_name = "FILE"
    )]
    client_certificate: Option<PathBuf>,
    /// Private key of --client-certificate
    #[arg(long, global = true, env = "KPLANE_CLIENT_KEY", value_name = "FILE")]
    client_key: Option<PathBuf>,
    /// Connect in plain text to a control plane on another machine
    #[arg(long, global = true)]
    insecure: bool,
}

impl Options {
    /// Completes the server's address, and checks that its scheme fits the options about TLS.
    fn complete(&mut self) -> Result<(), clap::Error> {
        let wrong = |text: String| Err(Cli::command().error(ErrorKind::ValueValidation, text));
        let has_authority = self.identity.certificate_authority.is_some();
        if has_authority && !self.server.explicit {
            self.server.url = self.server.url.replacen("http://", "https://", 1);
        }
        match (self.server.is_secure(), has_authority) {
            (true, false) => wrong(format!(
                "{} needs --certificate-authority FILE",
                self.server
            )),
            (false, true) => wrong(format!(
                "--certificate-authority is for https://, and the server is {}",
                self.server
            )),
            (false, false) if !self.identity.insecure && !self.server.is_here() => wrong(format!(
                "{} is plain text to another machine: use https:// with --certificate-authority, \
                 --client-certificate and --client-key, or allow it with --insecure",
                self.server
            )),
            _ if self.identity.client_certificate.is_some()
                != self.identity.client_key.is_some() =>
            {
                wrong("--client-certificate and --client-key belong together".to_owned())
            }
            _ => Ok(()),
        }
    }
}

impl Identity {
    /// Returns the files for TLS; `None` = plain text.
    pub(crate) fn files(&self) -> Option<ClientFiles> {
        ClientFiles::of_options(
            self.certificate_authority.as_ref(),
            self.client_certificate.as_ref(),
            self.client_key.as_ref(),
        )
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show all nodes: in sync or not, since when, and why not
    #[command(
        visible_alias = "fleet",
        after_help = "\
Columns:
  SINCE    how long the node has been in this state
  APPLIED  revision that the kernel holds / revision that it should hold
  LAG      revisions between the two
  SYNC     how long the last update took, from its arrival to the kernel's acknowledgement
  OBJECTS  Services / endpoints that the agent holds

Examples:
  kpctl status                  the state of all nodes
  kpctl status -w               the same, with updates
  kpctl status -o wide          all columns, all failures
  kpctl status --check          for scripts: exit code 3 unless every node is in sync, the input
                                has no errors, and there is at least one node
  kpctl status -o json | jq '.nodes[] | select(.state != \"InSync\") | .name'"
    )]
    Status(StatusArgs),
    /// List Services, endpoints or nodes
    #[command(
        subcommand,
        after_help = "\
Examples:
  kpctl get services
  kpctl get ep -n shop
  kpctl get nodes -o wide -w"
    )]
    Get(GetCommand),
    /// Show everything about one object
    #[command(
        subcommand,
        after_help = "\
Examples:
  kpctl describe service shop/web"
    )]
    Describe(DescribeCommand),
    /// Approve deletions that kplane holds back
    #[command(after_help = "\
The control plane and its agents keep objects whose disappearance looks like a mistake: the source
could not be read completely since its start, or very many objects vanished at once. This command
shows what is kept and why, asks for approval, and removes it. Objects that vanish like that later
are kept again.

Examples:
  kpctl approve
  kpctl approve --yes -o json   for scripts: does not ask")]
    Approve {
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
    /// Print a completion script for a shell
    #[command(after_help = "\
Examples:
  kpctl completion bash > /etc/bash_completion.d/kpctl
  source <(kpctl completion zsh)
  kpctl completion fish > ~/.config/fish/completions/kpctl.fish")]
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Show the versions of this program and of the control plane
    #[command(after_help = "\
Examples:
  kpctl version
  kpctl version --client -o json")]
    Version {
        /// Do not ask the control plane
        #[arg(long)]
        client: bool,
    },
}

/// Options of `status`.
#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) watch: WatchArgs,
    /// Exit with code 3 unless every node is in sync and the input has no errors
    #[arg(long, conflicts_with = "watch")]
    pub(crate) check: bool,
}

/// The option to follow changes.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct WatchArgs {
    /// Show every change until interrupted: in place on a terminal, one after the other otherwise
    #[arg(short, long)]
    pub(crate) watch: bool,
}

/// The kinds of objects to list.
#[derive(Debug, Subcommand)]
pub(crate) enum GetCommand {
    /// Services with addresses, ports and how many endpoints are ready
    #[command(
        visible_alias = "svc",
        alias = "service",
        after_help = "\
READY counts the endpoints of the port that has the fewest. A Service with two families has two
lines.

Examples:
  kpctl get services
  kpctl get svc -n shop -o wide
  kpctl get svc -o yaml"
    )]
    Services(ListArgs),
    /// Endpoints with their node and state
    #[command(
        visible_alias = "ep",
        alias = "endpoint",
        after_help = "\
States:
  Ready        gets new connections
  Draining     shutting down, still answers: used when no other endpoint is ready
  Terminating  shutting down, does not answer
  NotReady     not used

Examples:
  kpctl get endpoints
  kpctl get ep -n shop -w
  kpctl get ep -o wide          with topology hints"
    )]
    Endpoints(ListArgs),
    /// Nodes with their agent's version, zone and addresses
    #[command(
        visible_alias = "no",
        alias = "node",
        after_help = "\
Examples:
  kpctl get nodes
  kpctl get no -o wide          with pod CIDRs, peer address, round trip"
    )]
    Nodes(WatchArgs),
}

/// Options of lists of namespaced objects.
#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// Only this namespace
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// All namespaces (the default)
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    #[command(flatten)]
    pub(crate) watch: WatchArgs,
}

/// The kinds of objects to describe.
#[derive(Debug, Subcommand)]
pub(crate) enum DescribeCommand {
    /// A Service: ports, policies, endpoints, and what every node holds of it
    #[command(
        visible_alias = "svc",
        alias = "services",
        after_help = "\
NODES counts the nodes for which the endpoint is chosen. CLUSTER and LOCAL count the endpoints that
are chosen for a node under each traffic policy; -o wide lists them.

Examples:
  kpctl describe service shop/web
  kpctl describe svc web -n shop
  kpctl describe svc kubernetes     in namespace default"
    )]
    Service(ServiceArgs),
}

/// Names a Service.
#[derive(Args, Debug)]
pub(crate) struct ServiceArgs {
    /// NAMESPACE/NAME, or NAME in the namespace of -n, else in `default`
    #[arg(value_name = "SERVICE")]
    service: String,
    /// The namespace
    #[arg(short, long)]
    namespace: Option<String>,
}

impl ServiceArgs {
    /// Returns the Service, or the error in its name.
    pub(crate) fn name(&self) -> Result<ServiceName, clap::Error> {
        let (in_name, name) = match self.service.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, self.service.as_str()),
        };
        let wrong = |why: &str| {
            let text = format!("'{}' {why}", self.service);
            Err(Cli::command().error(ErrorKind::ValueValidation, text))
        };
        match (in_name, self.namespace.as_deref()) {
            (Some(""), _) => wrong("has no namespace before the '/'"),
            (Some(a), Some(b)) if a != b => wrong(&format!("is not in the namespace of -n {b}")),
            _ if name.is_empty() || name.contains('/') => {
                wrong("is not a Service: write NAMESPACE/NAME")
            }
            (a, b) => Ok(ServiceName::new(a.or(b).unwrap_or("default"), name)),
        }
    }
}

/// The control plane's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    /// A URL with a port, such as `http://127.0.0.1:7444`.
    pub(crate) url: String,
    /// Whether the user wrote the scheme.
    explicit: bool,
}

impl Server {
    fn is_secure(&self) -> bool {
        self.url.starts_with("https://")
    }

    /// Returns whether the address is this machine's own, so that plain text leaves no machine.
    fn is_here(&self) -> bool {
        let uri = self.url.parse::<Uri>().ok();
        is_this_machine(uri.as_ref().and_then(Uri::host).unwrap_or_default())
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.url)
    }
}

fn parse_server(text: &str) -> Result<Server, String> {
    let (scheme, authority) = text.split_once("://").unwrap_or(("", text));
    let explicit = !scheme.is_empty();
    let scheme = match scheme {
        "" | "http" => "http",
        "https" => "https",
        _ => return Err("expected HOST, HOST:PORT or https://HOST:PORT".to_owned()),
    };
    let authority = authority.strip_suffix('/').unwrap_or(authority);
    let authority = match authority.parse() {
        Ok(IpAddr::V6(ip)) => format!("[{ip}]"),
        _ => authority.to_owned(),
    };
    let uri = format!("http://{authority}/").parse::<Uri>();
    let uri = uri.ok().filter(|uri| uri.path() == "/");
    let host = uri.as_ref().and_then(Uri::host).unwrap_or_default();
    match uri.as_ref().and_then(Uri::port_u16) {
        Some(_) if !host.is_empty() => Ok(Server {
            url: format!("{scheme}://{authority}"),
            explicit,
        }),
        None if !host.is_empty() && host == authority => Ok(Server {
            url: format!("{scheme}://{authority}:{STATUS_PORT}"),
            explicit,
        }),
        _ => Err("expected HOST, HOST:PORT or https://HOST:PORT".to_owned()),
    }
}

/// Parses a duration with a unit, or a number of seconds.
fn parse_timeout(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map(Duration::from_secs).ok();
    let parsed = || Duration::try_from(text.parse::<SignedDuration>().ok()?).ok();
    seconds
        .or_else(parsed)
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| "expected more than 0, such as 10s, 500ms or 1m".to_owned())
}

impl Cli {
    /// Parses the command line. Exits for `--help`, and with code 2 for a wrong command line.
    pub(crate) fn from_command_line() -> Self {
        let name = std::env::args_os().next().unwrap_or_default();
        let stem = Path::new(&name).file_stem().unwrap_or_default();
        let program = if stem == "kubectl-kplane" {
            PLUGIN
        } else {
            PROGRAM
        };
        let parsed = command(program).try_get_matches();
        let cli = parsed.and_then(|matches| {
            let mut cli = Self::from_arg_matches(&matches)?;
            cli.options.complete()?;
            Ok(cli)
        });
        match cli {
            Ok(cli) => Self { program, ..cli },
            Err(error) => error.exit(),
        }
    }
}

/// Returns the command line's definition, under the name that the user knows.
pub(crate) fn command(program: &'static str) -> clap::Command {
    let command = Cli::command();
    if program == PROGRAM {
        return command;
    }
    rename(command.bin_name(program), program)
}

/// Replaces the program's name in the examples by the user's name for it.
fn rename(command: clap::Command, program: &str) -> clap::Command {
    let help = command.get_after_help().map(ToString::to_string);
    let help = help.unwrap_or_default();
    command
        .after_help(help.replace(&format!("{PROGRAM} "), &format!("{program} ")))
        .mut_subcommands(|sub| rename(sub, program))
}

#[cfg(test)]
mod tests;
