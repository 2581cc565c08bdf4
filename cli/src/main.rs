//! `kpctl`: what does every node hold, and why not? See [`args`] for the commands.
//!
//! One direction: arguments -> `client` (gRPC) -> `view` (pure: message -> view -> text) ->
//! `output` (the only place that writes). `view/` never does I/O and never asks for the time.

mod args;
mod client;
mod commands;
mod failure;
mod output;
mod style;
mod table;
mod text;
mod time;
mod view;
mod watch;

use std::process::ExitCode;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let cli = args::Cli::from_command_line();
    match commands::run(cli).await {
        Ok(verdict) => verdict.into(),
        Err(failure) => failure.report(),
    }
}
