//! The arguments of `status`, and the option to follow changes.

use clap::{Args, ValueEnum};

use super::names::node_name;

/// Options of `status`.
#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    /// Show everything about this node
    #[arg(value_name = "NODE", conflicts_with = "watch", value_parser = node_name)]
    pub(crate) node: Option<String>,
    #[command(flatten)]
    pub(crate) watch: WatchArgs,
    /// Exit with code 3 unless all is well: `nodes` checks that every node is in sync, `input` that
    /// the input has no errors, `all` both
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with = "watch")]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    #[arg(hide_possible_values = true)]
    pub(crate) check: Option<Checked>,
    /// List every node, also healthy ones and those with the same problem
    #[arg(long)]
    pub(crate) all: bool,
}

/// What `status --check` checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Checked {
    /// Nodes and input
    All,
    /// Every node is in sync, and there is at least one
    Nodes,
    /// The input has no errors, and nothing of it is held or missing
    Input,
}

/// The option to follow changes.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct WatchArgs {
    /// Show every change until interrupted: in place on a terminal, one after the other otherwise
    #[arg(short, long)]
    pub(crate) watch: bool,
}
