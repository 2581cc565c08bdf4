//! `page`: the control plane's page in a browser.

use std::io::{self, Write as _};

use super::{Verdict, connect};
use crate::args::Cli;
use crate::args::page::PageArgs;
use crate::failure::Failure;
use crate::page::PageServer;

/// Serves the page on this machine until Ctrl-C.
pub(crate) async fn run(cli: &Cli, args: &PageArgs) -> Result<Verdict, Failure> {
    let (client, route) = connect(cli).await?;
    let server = PageServer::open(client.line(), route, args.port).await.map_err(|error| {
        Failure::Refused(format!(
            "cannot listen on port {} of 127.0.0.1: {error}. Choose another one with --port",
            args.port
        ))
    })?;
    writeln!(io::stdout(), "{}", server.url())?;
    anstream::eprintln!("Open this address in a browser on this machine. Ctrl-C ends it.");
    tokio::select! {
        failed = server.serve() => match failed {
            Ok(never) => match never {},
            Err(error) => Err(error.into()),
        },
        stopped = tokio::signal::ctrl_c() => {
            stopped?;
            Ok(Verdict::Done)
        }
    }
}
