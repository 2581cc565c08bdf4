//! A control plane at an address.

use std::io;
use std::path::PathBuf;

use kplane_tls::{ClientFiles, Files as _, Token, bare, greet};
use tokio::net::TcpStream;
use tonic::transport::Uri;

use super::{Connection, Peer, ReachError, plane_cause};
use crate::args::{Identity, Server};

/// An address, and the files with which to connect to it.
#[derive(Debug)]
pub(super) struct Direct {
    server: Server,
    /// The files for TLS; `None` = plain text.
    files: Option<ClientFiles>,
    token: Option<PathBuf>,
    /// The reason why this address is asked, if the user did not name it.
    guess: Option<String>,
}

impl Direct {
    /// Takes an address that the user named.
    pub(super) fn named(server: Server, identity: &Identity) -> Self {
        Self::new(server, identity, None)
    }

    /// Takes the address of this machine, for the reason `guess`.
    pub(super) fn guessed(identity: &Identity, guess: String) -> Self {
        let server = Server::of_this_machine(identity.certificate_authority.is_some());
        Self::new(server, identity, Some(guess))
    }

    fn new(server: Server, identity: &Identity, guess: Option<String>) -> Self {
        let authorities = identity.certificate_authority.clone();
        Self {
            server,
            files: authorities.map(|authorities| ClientFiles {
                authorities,
                pair: identity.pair(),
            }),
            token: identity.token_file.clone(),
            guess,
        }
    }

    /// Returns the address.
    pub(super) fn describe(&self) -> String {
        self.server.to_string()
    }

    /// Reads the files and connects.
    pub(super) async fn connect(&self) -> Result<Connection, ReachError> {
        let token = self.token.as_deref().map(Token::read).transpose()?;
        let tls = self.files.as_ref().map(ClientFiles::load).transpose()?;
        let url: Uri = self.server.url.parse().unwrap_or_default();
        let host = url.host().unwrap_or_default();
        let stream = dial(host, url.port_u16().unwrap_or_default())
            .await
            .map_err(|error| self.failed(&error))?;
        let wire = greet(stream, tls, host).await;
        Ok(Connection {
            wire: wire.map_err(|error| self.failed(&error))?,
            peer: Peer {
                url: self.server.url.clone(),
                name: self.server.to_string(),
            },
            token,
        })
    }

    fn failed(&self, error: &io::Error) -> ReachError {
        let advice = match &self.guess {
            None => "Check that kp-controlplane runs there; --server or KPLANE_SERVER sets its \
                     address"
                .to_owned(),
            Some(reason) => format!(
                "kpctl tried this address because {reason}. Start kp-controlplane there, or name \
                 a control plane with --server, or a cluster with --kubeconfig"
            ),
        };
        ReachError::Connect {
            to: self.server.to_string(),
            cause: plane_cause(error),
            advice,
        }
    }
}

async fn dial(host: &str, port: u16) -> io::Result<TcpStream> {
    let stream = TcpStream::connect((bare(host), port)).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, FromArgMatches as _};

    use super::*;
    use crate::args::Cli;

    #[test]
    fn an_address_that_no_user_named_is_explained() {
        let matches = Cli::command().try_get_matches_from(["kpctl", "status"]);
        let options = Cli::from_arg_matches(&matches.unwrap()).unwrap().options;
        let direct = Direct::guessed(&options.identity, "there is no kubeconfig".to_owned());
        let refused = io::Error::from_raw_os_error(111);
        let expected = "cannot connect to http://127.0.0.1:7466: connection refused. kpctl tried \
                        this address because there is no kubeconfig. Start kp-controlplane there, \
                        or name a control plane with --server, or a cluster with --kubeconfig";
        assert_eq!(direct.failed(&refused).to_string(), expected);
    }
}
