//! Completion at the prompt, which knows Services, namespaces, nodes and zones.
//!
//! The scripts of `kpctl completion` call kpctl again with [`VARIABLE`] set. kubectl calls the program
//! `kubectl_complete-kplane`, a link to kpctl. Both ask the control plane that the options on the line name. Without an
//! answer nothing is offered.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Arg, ArgMatches, CommandFactory as _};
use clap_complete::Shell;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, complete};
use clap_complete::env::{CompleteEnv, Shells};
use kplane_proto::v1 as pb;

use crate::args::{Cli, Options, command};
use crate::client::{Client, Error};
use crate::connection::Route;
use crate::output::FORMATS;

/// The environment variable with which a completion script calls kpctl.
const VARIABLE: &str = "KPCTL_COMPLETE";

/// The program that kubectl calls to complete `kubectl kplane`.
const OF_KUBECTL: &str = "kubectl_complete-kplane";

/// The last line for kubectl: the candidates are in order, and no file names are wanted.
const NO_FILES: &str = ":36";

/// Longest time that a person waits for candidates.
const PATIENCE: Duration = Duration::from_secs(2);

/// Objects that an argument names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    Services,
    /// Services with their kind in front, as `wait` wants them.
    KindAndServices,
    Policies,
    Namespaces,
    Nodes,
    Zones,
}

impl Names {
    /// Returns what an argument names, judged by its name in the help text.
    fn of(command: &str, arg: &Arg) -> Option<Self> {
        let value = arg
            .get_value_names()
            .and_then(|names| names.first())
            .map(|name| name.to_ascii_uppercase());
        match (arg.get_id().as_str(), value.as_deref()) {
            (_, Some("SERVICE")) if command == "wait" => Some(Self::KindAndServices),
            (_, Some("SERVICE" | "SERVICE[:PORT]" | "SUBJECT")) => Some(Self::Services),
            (_, Some("POLICY")) => Some(Self::Policies),
            ("namespace", _) => Some(Self::Namespaces),
            ("node", _) | (_, Some("NODE")) => Some(Self::Nodes),
            ("zone", _) => Some(Self::Zones),
            _ => None,
        }
    }
}

/// Completes the line in the environment, if there is one; it never returns then.
pub(crate) fn at_prompt(program: &str) -> Option<ExitCode> {
    if program == OF_KUBECTL {
        return Some(match for_kubectl() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        });
    }
    CompleteEnv::with_factory(completing).var(VARIABLE).complete();
    None
}

/// Writes the script that a shell has to read once.
pub(crate) fn write_script(shell: Shell, out: &mut dyn Write) -> io::Result<()> {
    let name = shell.to_string();
    let shells = Shells::builtins();
    let shell = shells
        .completer(&name)
        .ok_or_else(|| io::Error::other(format!("no completion for {name}")))?;
    shell.write_registration(VARIABLE, "kpctl", "kpctl", "kpctl", out)
}

/// Prints candidates as kubectl wants them: one a line, with a tab before the help.
fn for_kubectl() -> io::Result<()> {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    if let Some(first) = words.first_mut() {
        *first = "kpctl".into();
    }
    let last = words.len().saturating_sub(1);
    let candidates = complete(&mut completing(), words, last, None)?;
    let mut out = String::new();
    for candidate in candidates.iter().filter(|of| !of.is_hide_set()) {
        out.push_str(&candidate.get_value().to_string_lossy());
        if let Some(help) = candidate.get_help() {
            let help = help.to_string();
            out.push_str(&format!("\t{}", help.lines().next().unwrap_or_default()));
        }
        out.push('\n');
    }
    out.push_str(NO_FILES);
    out.push('\n');
    io::stdout().write_all(out.as_bytes())
}

/// Returns the command line's definition, with completers. Options are offered when a dash is typed, or there is nothing
/// else.
fn completing() -> clap::Command {
    let word = std::env::args().next_back().unwrap_or_default();
    with_completers(Cli::command(), word.starts_with('-'))
}

fn with_completers(command: clap::Command, options: bool) -> clap::Command {
    let name = command.get_name().to_owned();
    let completed = |arg: Arg| match Names::of(&name, &arg) {
        Some(names) => {
            let completer = move |current: &OsStr| candidates(names, current);
            arg.add(ArgValueCompleter::new(completer))
        }
        None if arg.get_id() == "output" => {
            let formats = |current: &OsStr| beginning(FORMATS.map(str::to_owned), current);
            arg.add(ArgValueCompleter::new(formats))
        }
        None => arg,
    };
    command
        .disable_help_flag(!options)
        .disable_version_flag(!options)
        .mut_args(|arg| {
            let hidden = !options && !arg.is_positional();
            let arg = completed(arg);
            if hidden { arg.hide(true) } else { arg }
        })
        .mut_subcommands(|sub| with_completers(sub, options))
}

/// Returns the names that begin like the current word.
fn beginning(names: impl IntoIterator<Item = String>, current: &OsStr) -> Vec<CompletionCandidate> {
    let begun = current.to_string_lossy();
    names
        .into_iter()
        .filter(|name| name.starts_with(&*begun))
        .map(CompletionCandidate::new)
        .collect()
}

fn candidates(names: Names, current: &OsStr) -> Vec<CompletionCandidate> {
    let Some((options, line)) = line() else {
        return Vec::new();
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else {
        return Vec::new();
    };
    let begun = current.to_string_lossy().into_owned();
    let asked = async {
        let asked = ask(&options, &line, names, &begun);
        tokio::time::timeout(PATIENCE, asked).await
    };
    // An error has no place on a line that is being typed.
    match runtime.block_on(asked) {
        Ok(Ok(found)) => beginning(found, current),
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

/// Returns the options on the line before the current word, and the line.
fn line() -> Option<(Options, ArgMatches)> {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    if let Some(at) = words.iter().position(|word| word == "--") {
        words.drain(..=at);
    }
    // The current word is no value yet.
    words.pop();
    if let Some(first) = words.first_mut() {
        *first = "kpctl".into();
    }
    let matches = command("kpctl").ignore_errors(true).try_get_matches_from(words).ok()?;
    let mut options = <Options as clap::FromArgMatches>::from_arg_matches(&matches).ok()?;
    options.complete(&matches).ok()?;
    options.timeout = PATIENCE;
    Some((options, matches))
}

/// Returns the namespace of -n on the line.
fn namespace(mut line: &ArgMatches) -> Option<String> {
    while let Some((_, deeper)) = line.subcommand() {
        line = deeper;
    }
    line.try_get_one::<String>("namespace").ok().flatten().cloned()
}

/// Asks the control plane for names.
async fn ask(
    options: &Options,
    line: &ArgMatches,
    names: Names,
    begun: &str,
) -> Result<BTreeSet<String>, Error> {
    let mut route = Route::choose(options)?;
    let client = Client::connect(&mut route).await?;
    if matches!(names, Names::Nodes | Names::Zones) {
        let nodes = client.fleet().await?.nodes.into_iter();
        let found = nodes.map(|node| match names {
            Names::Zones => node.zone,
            _ => node.name,
        });
        return Ok(found.filter(|name| !name.is_empty()).collect());
    }
    let kind = match names {
        Names::KindAndServices => "service/",
        _ => "",
    };
    let within = if names == Names::Namespaces { None } else { namespace(line) };
    let typed = begun.strip_prefix(kind).unwrap_or(begun);
    let in_word = typed.split_once('/').map(|(namespace, _)| namespace);
    let wanted = in_word.map(str::to_owned).or(within.clone()).unwrap_or_default();
    let all: Vec<(String, String)> = if names == Names::Policies {
        client
            .policies(&wanted)
            .await?
            .into_iter()
            .map(|of| (of.namespace, of.name))
            .collect()
    } else {
        let request = pb::ListServicesRequest {
            namespace: wanted,
            ..pb::ListServicesRequest::default()
        };
        client
            .services(request)
            .await?
            .into_iter()
            .filter_map(|port| port.key)
            .map(|key| (key.namespace, key.name))
            .collect()
    };
    Ok(all
        .into_iter()
        .map(|(namespace, name)| match (names, &within, in_word) {
            (Names::Namespaces, _, _) => namespace,
            // The namespace is on the line already.
            (_, Some(_), None) => format!("{kind}{name}"),
            _ => format!("{kind}{namespace}/{name}"),
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_known_by_what_they_name() {
        let completed = completing();
        let of = |path: &[&str], id: &str| {
            let mut command = &completed;
            for name in path {
                command = command.find_subcommand(name).unwrap();
            }
            let arg = command.get_arguments().find(|arg| arg.get_id() == id).unwrap();
            let completes = arg.get::<ArgValueCompleter>().is_some();
            let names = Names::of(command.get_name(), arg);
            assert_eq!(
                completes,
                names.is_some() || id == "output",
                "{path:?} {id}"
            );
            names
        };
        for (path, id, names) in [
            (
                &["describe", "service"][..],
                "service",
                Some(Names::Services),
            ),
            (&["get", "endpoints"], "service", Some(Names::Services)),
            (&["get", "endpoints"], "namespace", Some(Names::Namespaces)),
            (&["get", "services"], "node", Some(Names::Nodes)),
            (&["describe", "policy"], "policy", Some(Names::Policies)),
            (&["get", "policies"], "namespace", Some(Names::Namespaces)),
            (&["get", "nodes"], "node", Some(Names::Nodes)),
            (&["get", "nodes"], "zone", Some(Names::Zones)),
            (&["describe", "node"], "node", Some(Names::Nodes)),
            (&["status"], "node", Some(Names::Nodes)),
            (&["why"], "service", Some(Names::Services)),
            (&["why"], "via", Some(Names::Nodes)),
            (&["get", "affinity"], "node", Some(Names::Nodes)),
            (&["get", "proxied"], "service", Some(Names::Services)),
            (&["get", "proxied"], "node", Some(Names::Nodes)),
            (&["probe"], "node", Some(Names::Nodes)),
            (&["wait"], "services", Some(Names::KindAndServices)),
            (&["freeze"], "node", Some(Names::Nodes)),
            (&["freeze"], "zone", Some(Names::Zones)),
            (&["freeze"], "reason", None),
        ] {
            assert_eq!(of(path, id), names, "{path:?} {id}");
        }
        completing().debug_assert();
    }
}
