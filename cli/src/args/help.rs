//! Help texts as a terminal shows them.

use clap::CommandFactory as _;

use super::{Cli, PROGRAM};

/// Returns the command line's definition, under the name that the user knows.
pub(crate) fn command(program: &'static str) -> clap::Command {
    let command = flowing(Cli::command());
    if program == PROGRAM {
        return command;
    }
    rename(command.bin_name(program), program)
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
