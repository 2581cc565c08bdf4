//! The reasons why a command could not do its work, and their output.

use std::io;
use std::process::ExitCode;

use crate::client;
use crate::connection;
use kplane_view::style::Tone;
use kplane_view::text::Span;

/// The reason why a command could not do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The control plane did not answer, or answered with an error: exit code 1.
    #[error(transparent)]
    Client(#[from] client::Error),
    /// The cluster is not in a state for the command: exit code 1.
    #[error("{0}")]
    Refused(String),
    /// The result cannot be written: exit code 1.
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
    /// Wrong arguments: exit code 2.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// A question cannot be asked, because there is no terminal: exit code 2.
    #[error(
        "cannot ask for approval without a terminal. Check what would be removed, then use --yes"
    )]
    NobodyToAsk,
}

impl From<connection::ReachError> for Failure {
    fn from(error: connection::ReachError) -> Self {
        Self::Client(error.into())
    }
}

impl Failure {
    /// Returns whether the same attempt may succeed a second later.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Client(error) if error.is_transient())
    }

    /// Prints the failure, and returns the exit code.
    pub(crate) fn report(self) -> ExitCode {
        match self {
            Self::Usage(error) => error.exit(),
            Self::NobodyToAsk => {
                anstream::eprintln!("{} {self}", Tone::Bad.paint("error:"));
                ExitCode::from(2)
            }
            // In `kpctl get services | head` the reader has seen enough.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            failure => {
                // A part of the text comes from the server.
                let text = Span::new(failure.to_string(), Tone::Plain).text;
                anstream::eprintln!("{} {text}", Tone::Bad.paint("error:"));
                ExitCode::FAILURE
            }
        }
    }
}
