//! The kinds of `kpctl get` that the API declares: their commands are made of what their methods and requests declare.

use std::net::IpAddr;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args as _, Command, FromArgMatches, Subcommand};
use kplane_model::ServiceName;
use kplane_view::declared::{Argument, Listing};
use prost_reflect::prost::Message;
use prost_reflect::{DynamicMessage, Kind, Value};

use super::names::{node_name, pod_name, service_name};
use super::{RowArgs, WatchArgs, error};

/// A question for a list of a declared kind.
#[derive(Debug)]
pub(crate) struct KindArgs {
    pub(crate) listing: &'static Listing,
    pub(crate) request: DynamicMessage,
    /// The Service that the question names.
    pub(crate) service: Option<ServiceName>,
    pub(crate) rows: RowArgs,
    /// Go on with what is new.
    pub(crate) watch: bool,
}

/// The same kinds as first words, which help texts do not show.
#[derive(Debug)]
pub(crate) struct FirstWord(pub(crate) KindArgs);

/// Words that have a command of their own, which does more.
const OWN: [&str; 1] = ["drops"];

/// Returns the kinds without a command of their own.
fn kinds() -> impl Iterator<Item = &'static Listing> {
    Listing::all().iter().filter(|of| !OWN.contains(&of.name()))
}

fn command(of: &'static Listing) -> Command {
    let words = of.declared.words.iter().map(String::as_str);
    let has = |field: &str| of.method.output().get_field_by_name(field).is_some();
    let codes = match (of.asked().is_some(), has("missing_replicas")) {
        (true, _) => "\n\nExit codes: 0 all nodes answered, 6 a node did not",
        (false, true) => "\n\nExit codes: 0 all replicas answered, 6 one did not",
        (false, false) => "",
    };
    let help = format!("{}{codes}", of.declared.help);
    let command = Command::new(of.name()).args(of.arguments.iter().map(arg));
    let command = RowArgs::augment_args(with_namespace(command, of));
    let follows = !of.declared.after.is_empty();
    let command = if follows { WatchArgs::augment_args(command) } else { command };
    command
        .about(of.declared.about.as_str())
        .after_help(help)
        .aliases(words.skip(1))
}

/// Adds -n where the question names objects in namespaces, and -A where it may be about all.
fn with_namespace(command: Command, of: &Listing) -> Command {
    let has = |object: &str| of.arguments.iter().any(|of| of.declared.object == object);
    if has("Namespace") {
        command.arg(
            Arg::new("all_namespaces")
                .short('A')
                .long("all-namespaces")
                .action(ArgAction::SetTrue)
                .conflicts_with("namespace")
                .help("All namespaces (the default)"),
        )
    } else if has("Service") {
        let own = Arg::new("namespace").short('n').long("namespace");
        command.arg(own.help("The namespace"))
    } else {
        command
    }
}

fn arg(of: &'static Argument) -> Arg {
    let declared = &of.declared;
    if declared.positional {
        let help = "NAMESPACE/NAME, or NAME in the namespace of -n, else in `default`";
        return Arg::new("service").value_name("SERVICE").required(true).help(help);
    }
    let name = of.field.name();
    let arg = Arg::new(name).long(name).help(declared.help.as_str());
    match (declared.object.as_str(), of.field.kind()) {
        (_, Kind::Bool) => arg.action(ArgAction::SetTrue),
        ("Namespace", _) => arg.short('n'),
        ("Node", _) => arg.value_parser(node_name),
        ("Address", _) => arg.value_name("ADDRESS").value_parser(address),
        (_, Kind::Uint32) => arg.value_name("NUMBER").value_parser(number),
        _ => arg,
    }
}

fn address(text: &str) -> Result<String, std::net::AddrParseError> {
    text.parse().map(|address: IpAddr| address.to_string())
}

fn number(text: &str) -> Result<String, std::num::ParseIntError> {
    text.parse().map(|number: u32| number.to_string())
}

impl KindArgs {
    /// Returns a question for a kind; `None` if the request is none for it.
    pub(crate) fn asking(word: &str, request: &impl Message) -> Option<Self> {
        let listing = Listing::named(word)?;
        let request = request.encode_to_vec();
        let request = DynamicMessage::decode(listing.method.input(), request.as_slice()).ok()?;
        Some(Self {
            listing,
            request,
            service: None,
            rows: RowArgs::default(),
            watch: false,
        })
    }

    fn of(listing: &'static Listing, matches: &ArgMatches) -> Result<Self, clap::Error> {
        let text = |name: &str| matches.try_get_one::<String>(name).ok().flatten();
        let namespace = text("namespace").map(String::as_str);
        let mut request = DynamicMessage::new(listing.method.input());
        let mut service = None;
        for argument in &listing.arguments {
            let (name, kind) = (argument.field.name(), argument.field.kind());
            if argument.declared.positional {
                let named = text("service").map_or("", String::as_str);
                let named = service_name(named, namespace)?;
                set(&mut request, "namespace", &named.namespace)?;
                set(&mut request, "name", &named.name)?;
                service = Some(named);
            } else if kind == Kind::Bool {
                let is = matches.get_flag(name);
                request.set_field(&argument.field, Value::Bool(is));
            } else if let Some(value) = text(name) {
                if argument.declared.object == "Pod" {
                    let pod = pod_name(value, namespace)?;
                    set(&mut request, "namespace", &pod.namespace)?;
                    set(&mut request, name, &pod.name)?;
                } else {
                    set(&mut request, name, value)?;
                }
            }
        }
        let watch = !listing.declared.after.is_empty() && matches.get_flag("watch");
        Ok(Self {
            listing,
            request,
            service,
            rows: RowArgs::from_arg_matches(matches)?,
            watch,
        })
    }
}

/// Sets a field of a request to a text, or to the number that it stands for.
fn set(request: &mut DynamicMessage, name: &str, text: &str) -> Result<(), clap::Error> {
    let number = text.parse().ok().map(Value::U32);
    for value in number.into_iter().chain([Value::String(text.to_owned())]) {
        if request.try_set_field_by_name(name, value).is_ok() {
            return Ok(());
        }
    }
    let wrong = format!("the API declares no text or number '{name}': update kpctl");
    Err(error(ErrorKind::InvalidValue, &wrong))
}

impl FromArgMatches for KindArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let found = matches.subcommand();
        match found.and_then(|(word, matches)| Some((Listing::named(word)?, matches))) {
            Some((listing, matches)) => Self::of(listing, matches),
            None => Err(error(ErrorKind::MissingSubcommand, "name a kind of object")),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for KindArgs {
    fn augment_subcommands(command: Command) -> Command {
        command.subcommands(kinds().map(self::command))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        kinds().any(|of| of.name() == name)
    }
}

impl FromArgMatches for FirstWord {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        KindArgs::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl Subcommand for FirstWord {
    fn augment_subcommands(command: Command) -> Command {
        command.subcommands(kinds().map(|of| self::command(of).hide(true)))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        KindArgs::has_subcommand(name)
    }
}
