//! The command line, parsed and validated: its values can be used without further checks.

pub(crate) mod check;
mod connection;
pub(crate) mod drops;
pub(crate) mod flows;
mod freeze;
pub(crate) mod graph;
mod help;
mod kinds;
mod lists;
pub(crate) mod migrate;
mod names;
pub(crate) mod page;
pub(crate) mod probe;
pub(crate) mod record;
mod status;
pub(crate) mod uninstall;
mod wait;
pub(crate) mod why;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use jiff::SignedDuration;

pub(crate) use connection::{Identity, KUBECONFIG, Place, STATUS_PORT, Server};
pub(crate) use freeze::FreezeArgs;
pub(crate) use help::{command, options};
pub(crate) use kinds::{FirstWord, KindArgs};
pub(crate) use lists::{
    DescribeCommand, GetCommand, ListArgs, NodesArgs, PoliciesArgs, ProxiedArgs, RowArgs,
};
pub(crate) use status::{Checked, StatusArgs, WatchArgs};
pub(crate) use wait::WaitArgs;
pub(crate) use why::WhyArgs;

use self::check::CheckArgs;
use self::drops::DropsArgs;
use self::flows::FlowsArgs;
use self::graph::GraphArgs;
use self::migrate::MigrateCommand;
use self::page::PageArgs;
use self::probe::ProbeArgs;
use self::record::{BundleArgs, DiffArgs, HistoryArgs};
use self::uninstall::UninstallArgs;
use crate::output::{Extent, Format};

/// The name of this program in help texts.
const PROGRAM: &str = "kpctl";

/// The name of this program when kubectl runs it as `kubectl-kplane`.
const PLUGIN: &str = "kubectl kplane";

/// Longest time to wait for an answer, unless --timeout says otherwise; `wait` never waits longer for one.
const ANSWER: Duration = Duration::from_secs(10);

/// Longest time to wait for the answer of `probe`, unless --timeout says otherwise.
const PROBE: Duration = Duration::from_secs(30);

/// Longest time that `wait` takes, unless --timeout says otherwise.
const GOAL: Duration = Duration::from_secs(60);

/// Commands that need the API server of a cluster as well as the control plane, whose address may be given besides.
const BOTH: [&str; 4] = ["migrate", "check", "uninstall", "why"];

/// Heading of options that have no other one.
const GLOBAL: &str = "Global options";

/// Shows what every node holds of your Services, and why something is missing.
#[derive(Debug, Parser)]
#[command(name = PROGRAM, version, max_term_width = 100)]
#[command(after_help = "\
Exit codes:
  0  done            3  status --check: nodes not in sync, or errors in the input
  1  server error    4  approve, migrate, uninstall: not approved
                     6  get drops|flows|graph|affinity|proxied|findings, probe: a node or replica
                        did not answer
  2  wrong usage     1  wait: the goal was not reached in time; migrate: stopped; check: bad
                     2  check: something could not be checked

Examples:
  kpctl status                                  in the cluster of your kubeconfig
  kpctl status --context prod                   in another cluster
  kpctl status --server 127.0.0.1               on this machine
  kpctl status --server 10.0.0.5 --certificate-authority ca.crt --token-file token
  kpctl describe service shop/web")]
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
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) place: Place,
    #[command(flatten)]
    pub(crate) identity: Identity,
    /// Longest time to wait for an answer, such as 10s, 500ms or 1m; for `wait` the longest time to
    /// reach the goal, 60s unless given
    #[arg(long, global = true, default_value = "10s", value_name = "DURATION")]
    #[arg(value_parser = parse_timeout, help_heading = GLOBAL)]
    pub(crate) timeout: Duration,
    /// The longest time to reach a goal.
    #[arg(skip = GOAL)]
    pub(crate) goal: Duration,
    /// Output format: table (fits the terminal), wide (shows everything), json, yaml, name, dot (for
    /// Graphviz, only `graph`), jsonpath=TEMPLATE such as `jsonpath={.items[*].name}`, or
    /// custom-columns=COLUMNS such as `custom-columns=NAME:.name,STATE:.state`
    #[arg(short, long, global = true, default_value = "table")]
    #[arg(value_name = "FORMAT", help_heading = GLOBAL)]
    pub(crate) output: Format,
    /// No colours (also: NO_COLOR=1)
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub(crate) no_color: bool,
}

impl Options {
    /// Checks that the options fit each other, and settles which control plane they mean.
    pub(crate) fn complete(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        if matches.value_source("timeout") != Some(ValueSource::DefaultValue) {
            self.goal = self.timeout;
        } else if matches.subcommand_name() == Some("probe") {
            self.timeout = PROBE;
        }
        if matches.subcommand_name() == Some("wait") {
            // The time until the goal is no time to wait for an answer.
            self.timeout = self.timeout.min(ANSWER);
        }
        let both = matches.subcommand_name().is_some_and(|name| BOTH.contains(&name));
        self.place.settle(matches, both)?;
        self.identity.fit(self.place.server.as_mut())
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show all nodes: in sync or not, since when, and why not
    #[command(
        visible_alias = "fleet",
        after_help = "\
Of more than 10 nodes, those in sync are only counted, nodes with the same problem share a line, and
the 50 worst lines are shown. --all lists every node.

Columns:
  SINCE    how long the node has been in this state
  APPLIED  revision that the kernel holds / revision that it should hold
  LAG      revisions between the two
  SYNC     how long the last update took, from its arrival to the kernel's acknowledgement
  OBJECTS  Services / endpoints that the agent holds

Examples:
  kpctl status                  the state of all nodes
  kpctl status -w               the same, with updates
  kpctl status node-1           everything about one node, as `describe node`
  kpctl status --all            every node
  kpctl status -o wide          all columns, all nodes, all failures
  kpctl status --check          for scripts: exit code 3 unless every node is in sync, the input
                                has no errors, and there is at least one node
  kpctl status --check=nodes    the same, whatever errors are in the input
  kpctl status --check=input    the input only: errors, or objects that are held
  kpctl status -o json | jq '.nodes[] | select(.state != \"InSync\") | .name'"
    )]
    Status(StatusArgs),
    /// List objects of a kind: Services, endpoints, nodes, policies, connections, events
    #[command(
        subcommand,
        after_help = "\
Examples:
  kpctl get services
  kpctl get service shop/web
  kpctl get ep -n shop
  kpctl get nodes -o wide -w
  kpctl get nodes -o name
  kpctl get policies -n shop
  kpctl get flows shop/web
  kpctl get svc -o jsonpath='{range .items[*]}{.namespace}/{.name}{\"\\n\"}{end}'"
    )]
    Get(GetCommand),
    /// Show everything about one object
    #[command(
        subcommand,
        after_help = "\
Examples:
  kpctl describe service shop/web
  kpctl describe policy shop/web"
    )]
    Describe(DescribeCommand),
    /// Show the fate of a packet for a Service step by step, or what NetworkPolicies say to a connection
    #[command(after_help = why::HELP)]
    Why(WhyArgs),
    /// Show which Pods have connections that NetworkPolicies denied, or follow them
    #[command(hide = true, after_help = drops::HELP)]
    Drops(DropsArgs),
    /// Show who is connected to a Service, on all nodes
    #[command(hide = true, after_help = flows::HELP)]
    Flows(FlowsArgs),
    /// Show who talked to whom through Services in the last hour, and how many connections failed
    #[command(hide = true, after_help = graph::HELP)]
    Graph(GraphArgs),
    /// A kind of `get`.
    #[command(flatten)]
    Listed(FirstWord),
    /// Let every node connect to a Service through its own data path, and say what came back
    #[command(after_help = probe::HELP)]
    Probe(ProbeArgs),
    /// Wait until Services have reached the kernels of all nodes
    #[command(after_help = wait::HELP)]
    Wait(WaitArgs),
    /// Approve deletions that kplane holds back
    #[command(after_help = "\
The control plane and its agents keep objects whose disappearance looks like a mistake: the source
could not be read completely since its start, or very many objects vanished at once. This command
shows what is kept and why, asks for approval, and removes it. Objects that vanish like that later
are kept again. An approval counts for all replicas of the control plane, also for one that starts
within the next hour with the same picture.

Examples:
  kpctl approve
  kpctl approve --yes -o json   for scripts: does not ask")]
    Approve {
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
    /// Keep nodes at the Services that they serve now
    #[command(after_help = "\
A frozen node takes no newer Services or endpoints until `kpctl thaw`, whichever replica its agent
asks, and over restarts. Its agent still repairs what other programs change in the kernel. A node that serves
nothing yet takes the Services of the moment.

Examples:
  kpctl freeze --node node-1 --reason 'debugging #4711'
  kpctl freeze --zone zone-a
  kpctl freeze --all")]
    Freeze(FreezeArgs),
    /// Let frozen nodes go on
    #[command(after_help = "\
Examples:
  kpctl thaw --node node-1
  kpctl thaw --all")]
    Thaw(FreezeArgs),
    /// Show the latest publications, or what changed in one Service
    #[command(after_help = "\
Examples:
  kpctl history                                         when something changed, and how much
  kpctl history -o json | jq '.points[-1].revision'
  kpctl history service shop/web                        what changed, why, and when each node had it")]
    History(HistoryArgs),
    /// Show what a node's kernel does not hold as desired, from the last report of its agent
    #[command(after_help = "\
Examples:
  kpctl diff node/node-1
  kpctl diff node/node-1 -o json | jq '.services[].name'")]
    Diff(DiffArgs),
    /// Collect what the control plane knows into one file, for a report of an incident
    #[command(after_help = "\
The file has what `status`, `get`, `history`, `events` and `version` show with -o json,
the control plane's metrics, and for up to 50 Services (those with problems, and those of --service) what `describe service` and `history service` show. Nothing is run on nodes. A part that cannot
be had is named in bundle.json, with the reason. No part has tokens or keys.

Examples:
  kpctl bundle
  kpctl bundle --file incident.tar.gz --service shop/web
  kpctl bundle --hash-addresses

Exit codes: 0 everything is in the file, 2 the file is written, and lacks a part")]
    Bundle(BundleArgs),
    /// Serve the control plane's page to a browser on this machine
    #[command(after_help = "\
The page shows the fleet, nodes, Services, changes and reasons, live, with your rights. It is served on
127.0.0.1 until Ctrl-C, under an address that is new each time. Keep it to yourself: it gives your
right to read to all programs on this machine that know it.

Examples:
  kpctl page
  kpctl page --port 8080")]
    Page(PageArgs),
    /// Check everything, and say what to type next for each thing that is wrong
    #[command(after_help = "\
All checks always run, and each has one line. With -o json there is one document, with `checks` and
their `outcome`: Ok, Skipped, Warning, Unknown or Bad.

Examples:
  kpctl check                       an installation
  kpctl check -o json | jq '.checks[] | select(.outcome == \"Bad\")'
  kpctl check --pre                 a cluster before an installation: kube-proxy, its configuration
  kpctl check --pre --local         this node as well: its kernel, and who else owns rules

Exit codes: 0 all is well, 1 something is bad, 2 nothing is bad, but something could not be checked")]
    Check(CheckArgs),
    /// Replace kube-proxy node by node, or go back to it
    #[command(
        subcommand,
        after_help = "\
The state of a migration is in labels of nodes and in an annotation of kube-proxy's DaemonSet, so any
kpctl can continue what another one began. docs/migrate-from-kube-proxy.md describes all steps.

Examples:
  kpctl migrate plan
  kpctl migrate start --node node-1
  kpctl migrate start --all
  kpctl migrate status
  kpctl migrate back --all
  kpctl migrate finish"
    )]
    Migrate(MigrateCommand),
    /// Remove kplane from all nodes, and everything that helm does not remove
    #[command(after_help = "\
Ends the agents, runs a pod on each node that removes kplane's rules and its folder /var/lib/kplane,
and removes labels, taints, ConfigMaps and the Secret that kplane's programs made. Then it prints what
it removed, and the helm command for the rest. Repeat it if a node was away.

Move all nodes back to kube-proxy first (kpctl migrate back --all): without a proxy no Service works.

Examples:
  kpctl uninstall
  kpctl uninstall --yes                               for scripts: does not ask
  kpctl uninstall --image registry.example/agent:1    after helm uninstall, with your own image

Exit codes: 0 all is removed, 1 something is left, 4 not approved")]
    Uninstall(UninstallArgs),
    /// Print a completion script for a shell
    #[command(after_help = "\
The script calls kpctl at the prompt. It completes names of Services, namespaces, nodes and zones as
well, of the control plane that the options on the line name. For `kubectl kplane`, link kpctl as
kubectl_complete-kplane besides kubectl-kplane.

Examples:
  kpctl completion bash > /etc/bash_completion.d/kpctl
  source <(kpctl completion zsh)
  kpctl completion fish > ~/.config/fish/completions/kpctl.fish")]
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Show the options of every command, and how the control plane is found
    #[command(
        hide = true,
        after_help = "\
How the control plane is found:
  1. The one at --server or KPLANE_SERVER, with the certificate and the token of the flags. Your
     kubeconfig is not used.
  2. Or else the one in the cluster of your kubeconfig, through the API server, with the credentials
     of the kubeconfig. The flags replace them.
  3. Or else, if no kubeconfig names a cluster, the one at 127.0.0.1:7466.
  The flags --kubeconfig, --context and --kplane-namespace come before KPLANE_SERVER.

Examples:
  kpctl options
  kpctl status --context prod --timeout 30s"
    )]
    Options,
    /// Write the manual pages of all commands into a directory
    #[command(
        hide = true,
        after_help = "\
Examples:
  kpctl man /usr/local/share/man/man1
  man kpctl-describe-service"
    )]
    Man {
        /// The directory, which is made if it does not exist
        directory: PathBuf,
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
    pub(crate) fn from_command_line(called: &str) -> Self {
        let program = named(called);
        let definition = help::brief(command(program), program);
        let words = spread(&definition, std::env::args_os().collect());
        let parsed = definition.try_get_matches_from(words);
        let cli = parsed.and_then(|matches| {
            let mut cli = Self::from_arg_matches(&matches)?;
            cli.options.complete(&matches)?;
            Ok(cli)
        });
        match cli {
            Ok(cli) => Self { program, ..cli },
            Err(error) => error.exit(),
        }
    }
}

impl Cli {
    /// Returns what tables of the command leave out.
    pub(crate) fn extent(&self) -> Extent {
        let rows = match &self.command {
            Command::Get(GetCommand::Services(args)) => &args.list.rows,
            Command::Get(GetCommand::Endpoints(args)) => &args.rows,
            Command::Get(GetCommand::Nodes(args)) => &args.rows,
            Command::Get(GetCommand::Policies(args)) => &args.rows,
            Command::Get(GetCommand::Declared(args)) | Command::Listed(FirstWord(args)) => {
                &args.rows
            }
            command => {
                let all = match command {
                    Command::Status(args) => args.all,
                    Command::Describe(DescribeCommand::Service(args)) => args.all,
                    Command::Probe(args) => args.all,
                    _ => false,
                };
                let extent = Extent::default();
                return Extent { all, ..extent };
            }
        };
        Extent {
            all: false,
            headers: !rows.no_headers,
        }
    }
}

/// Returns the name by which the user called this program, without its folder.
pub(crate) fn called() -> String {
    let name = std::env::args_os().next().unwrap_or_default();
    let stem = Path::new(&name).file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// Returns the name of this program in texts, by the name of its file.
fn named(called: &str) -> &'static str {
    match called {
        "kubectl-kplane" => PLUGIN,
        _ => PROGRAM,
    }
}

/// Returns the name that the user types for this program.
pub(crate) fn program() -> &'static str {
    named(&called())
}

/// Splits KIND/NAME behind `get` and `describe`, as -o name prints it, into two words.
fn spread(definition: &clap::Command, mut words: Vec<OsString>) -> Vec<OsString> {
    let of = |word: &OsString| {
        let name = word.to_str().filter(|word| ["get", "describe"].contains(word))?;
        definition.find_subcommand(name)
    };
    let found = words.iter().enumerate().find_map(|(at, word)| Some((at + 1, of(word)?)));
    let split = found.and_then(|(at, command)| {
        let (kind, name) = words.get(at)?.to_str()?.split_once('/')?;
        command.find_subcommand(kind)?;
        Some((at, [kind, name].map(OsString::from)))
    });
    if let Some((at, both)) = split {
        words.splice(at..=at, both);
    }
    words
}

/// Returns an error in the command line, with the hint to `--help`.
fn error(kind: ErrorKind, text: &str) -> clap::Error {
    Cli::command().error(kind, text)
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
