//! `kpctl` shows what every node holds, and why not. See [`args`] for the commands.
//!
//! Data flows one way: arguments -> `connection` (a connection) -> `client` (gRPC) -> `view` (pure: message -> view ->
//! text) -> `output` (the only module that writes). `view/` never does I/O and never reads the clock.

mod args;
mod bundle;
mod check;
mod client;
mod columns;
mod commands;
mod complete;
mod connection;
mod failure;
mod jsonpath;
mod migrate;
mod output;
mod page;
mod view;
mod wait;
mod watch;

use std::process::ExitCode;

fn main() -> ExitCode {
    let program = args::called();
    if let Some(completed) = complete::at_prompt(&program) {
        return completed;
    }
    run(&program)
}

#[tokio::main(flavor = "current_thread")]
async fn run(program: &str) -> ExitCode {
    let cli = args::Cli::from_command_line(program);
    match commands::run(cli).await {
        Ok(verdict) => verdict.into(),
        Err(failure) => failure.report(),
    }
}
