//! Help texts as a terminal shows them.

use std::fmt::Write as _;

use clap::CommandFactory as _;

use super::{Cli, PROGRAM};

/// The commands by what they are for.
pub(super) const GROUPS: [(&str, &[&str]); 5] = [
    (
        "Look",
        &[
            "status", "get", "describe", "why", "history", "diff", "page",
        ],
    ),
    ("Ask nodes", &["probe", "wait"]),
    ("Change", &["approve", "freeze", "thaw"]),
    ("Install", &["check", "migrate", "uninstall"]),
    ("Tools", &["bundle", "completion", "version"]),
];

/// The way to the options that `brief` hides.
const OPTIONS: &str = "`kpctl options` lists the options of every command.";

/// Returns the command line's definition, under the name that the user knows.
pub(crate) fn command(program: &'static str) -> clap::Command {
    let command = flowing(Cli::command());
    if program == PROGRAM {
        return command;
    }
    rename(command.bin_name(program), program)
}

/// Lists the commands in groups, and hides the options of every command but -o, which `kpctl options` lists.
pub(super) fn brief(command: clap::Command, program: &str) -> clap::Command {
    fn hint(command: clap::Command, line: &str) -> clap::Command {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let sub = |sub: clap::Command| match sub.get_name() {
            "options" => sub,
            _ => hint(sub, line),
        };
        command.after_help(format!("{help}\n\n{line}")).mut_subcommands(sub)
    }
    let hidden = command.mut_args(|arg| {
        let is_shown = !arg.is_global_set() || arg.get_id() == "output";
        if is_shown { arg.help_heading(None) } else { arg.hide(true) }
    });
    hint(grouped(hidden), &OPTIONS.replace(PROGRAM, program))
}

/// Returns a text with the options of every command, and how the control plane is found.
pub(crate) fn options(program: &'static str) -> String {
    let of_all = command(program);
    let options = of_all.get_arguments().filter(|arg| arg.is_global_set()).cloned();
    let mut shown = clap::Command::new(program)
        .disable_help_flag(true)
        .help_template("{all-args}{after-help}\n")
        .max_term_width(100)
        .args(options);
    if let Some(help) = of_all.find_subcommand("options").and_then(clap::Command::get_after_help) {
        shown = shown.after_help(help.clone());
    }
    shown.render_help().to_string()
}

/// Lists the commands in groups.
fn grouped(command: clap::Command) -> clap::Command {
    let names = GROUPS.iter().flat_map(|(_, names)| *names);
    let width = names.fold(0, |width, name| width.max(name.len()));
    let mut list = String::new();
    for (title, names) in GROUPS {
        let _ = writeln!(list, "{title}:");
        for sub in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(list, "  {:width$}  {about}", sub.get_name());
        }
        list.push('\n');
    }
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}Options:\n{{options}}{{after-help}}"
    );
    command.help_template(template)
}

/// Joins the lines of each paragraph at the end of a help text: the terminal's width decides where they break.
fn flowing(command: clap::Command) -> clap::Command {
    let is_title = |line: &str| line.len() < 50 && line.ends_with(':');
    let help = command.get_after_help().map(ToString::to_string);
    let mut text = String::new();
    for line in help.unwrap_or_default().lines() {
        let is_apart = line.is_empty() || line.starts_with(' ') || text.ends_with('\n');
        text.push_str(match text.lines().last() {
            None | Some("") => "",
            Some(last) if is_apart || last.starts_with(' ') || is_title(last) => "\n",
            Some(_) => " ",
        });
        text.push_str(line);
        if line.is_empty() {
            text.push('\n');
        }
    }
    command.after_help(text).mut_subcommands(flowing)
}

/// Replaces the program's name in the examples by the user's name for it.
fn rename(command: clap::Command, program: &str) -> clap::Command {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    command
        .after_help(help.replace(&format!("{PROGRAM} "), &format!("{program} ")))
        .mut_subcommands(|sub| rename(sub, program))
}
