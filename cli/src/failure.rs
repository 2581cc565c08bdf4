//! Why a command could not do its work, and how that is said.

use std::io;
use std::process::ExitCode;

use crate::client;
use crate::style::Tone;
use crate::text::Span;

/// Why a command could not do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The control plane did not answer, or not as hoped: exit code 1.
    #[error(transparent)]
    Client(#[from] client::Error),
    /// Nobody can read the result: exit code 1.
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
    /// Wrong arguments: exit code 2.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// A question, and nobody to answer it: exit code 2.
    #[error("there is no terminal to ask at. Look at what it is about, then give --yes")]
    NobodyToAsk,
}

impl Failure {
    /// Says so, and tells the exit code.
    pub(crate) fn report(self) -> ExitCode {
        match self {
            Self::Usage(error) => error.exit(),
            Self::NobodyToAsk => {
                anstream::eprintln!("{} {self}", Tone::Bad.paint("error:"));
                ExitCode::from(2)
            }
            // `kpctl get services | head`: the reader has seen enough.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            failure => {
                // Part of the text is the server's.
                let text = Span::new(failure.to_string(), Tone::Plain).text;
                anstream::eprintln!("{} {text}", Tone::Bad.paint("error:"));
                ExitCode::FAILURE
            }
        }
    }
}
