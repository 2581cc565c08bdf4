//! The page `docs/cli.md`, made of the help texts.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use super::{PROGRAM, command};

/// Set to write the page instead of comparing it.
const WRITE: &str = "KPLANE_WRITE";

const HEAD: &str = "\
# Commands of kpctl

Each command with its help text, made by `KPLANE_WRITE=1 cargo test -p kpctl reference`. As a plugin of kubectl the commands are
the same: `kubectl kplane status`. Options of every command are listed once, at the top. `kpctl man DIRECTORY` writes manual
pages.
";

/// Returns the help of a command and of those below it, in Markdown.
fn page(mut command: clap::Command, name: &str) -> String {
    let mut page = String::new();
    let help = command.render_long_help().to_string();
    let depth = "#".repeat(name.split(' ').count().min(3) + 1);
    let lines: Vec<_> = help
        .lines()
        .map(|line| format!("    {line}"))
        .map(|line| line.trim_end().to_owned())
        .collect();
    let _ = write!(page, "\n{depth} {name}\n\n{}\n", lines.join("\n"));
    for below in command.get_subcommands() {
        // clap adds `help` to commands with others below them.
        let is_listed = !below.is_hide_set() || below.get_name() == "options";
        if is_listed && below.get_name() != "help" {
            let below_name = format!("{name} {}", below.get_name());
            let below = below.clone().mut_args(|arg| {
                let everywhere = arg.is_global_set();
                arg.hide(everywhere)
            });
            page += &self::page(below, &below_name);
        }
    }
    page
}

#[test]
fn the_page_has_the_help_of_every_command() {
    let mut all = command(PROGRAM).term_width(100);
    all.build();
    let page = HEAD.to_owned() + &page(all, PROGRAM);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cli.md");
    if env::var_os(WRITE).is_some() {
        fs::write(&file, &page).unwrap();
    }
    let written = fs::read_to_string(file).unwrap_or_default();
    assert!(
        page == written,
        "docs/cli.md differs from the help texts; write it with: {WRITE}=1 cargo test -p kpctl reference"
    );
}
