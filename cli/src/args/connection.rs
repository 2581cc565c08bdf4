//! The options that say which control plane to ask, and as whom.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use kplane_tls::{KeyPair, is_this_machine};
use tonic::transport::Uri;

/// Port of the control plane's status service.
pub(crate) const STATUS_PORT: u16 = 7466;

/// Namespace of the control plane in a cluster.
const NAMESPACE: &str = "kplane";

/// Environment variable with the kubeconfig files, as kubectl reads it.
pub(crate) const KUBECONFIG: &str = "KUBECONFIG";

/// Longest label of DNS (RFC 1123), and so the longest name of a namespace.
const MAX_LABEL: usize = 63;

/// Options that choose a control plane.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Which control plane")]
pub(crate) struct Place {
    /// Status address of the control plane: HOST, HOST:PORT or https://HOST:PORT
    #[arg(long, global = true, env = "KPLANE_SERVER", value_name = "ADDRESS")]
    #[arg(value_parser = parse_server)]
    pub(crate) server: Option<Server>,
    /// Kubeconfig of the cluster in which the control plane runs [default: the files of KUBECONFIG,
    /// or else ~/.kube/config]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current-context]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// Namespace of the control plane in that cluster
    #[arg(long, global = true, env = "KPLANE_NAMESPACE", value_name = "NAME")]
    #[arg(default_value = NAMESPACE, value_parser = parse_namespace)]
    pub(crate) kplane_namespace: String,
    /// Whether a flag names a cluster.
    #[arg(skip)]
    pub(crate) names_cluster: bool,
}

/// Options about credentials and TLS.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Credentials")]
pub(crate) struct Identity {
    /// Authorities that issue the control plane's certificate (PEM); --server is https:// then
    #[arg(
        long,
        global = true,
        env = "KPLANE_CERTIFICATE_AUTHORITY",
        value_name = "FILE"
    )]
    pub(crate) certificate_authority: Option<PathBuf>,
    /// Your certificate, such as one of `kp-controlplane certs user`
    #[arg(
        long,
        global = true,
        env = "KPLANE_CLIENT_CERTIFICATE",
        value_name = "FILE"
    )]
    client_certificate: Option<PathBuf>,
    /// Private key of --client-certificate
    #[arg(long, global = true, env = "KPLANE_CLIENT_KEY", value_name = "FILE")]
    client_key: Option<PathBuf>,
    /// File with your bearer token
    #[arg(long, global = true, env = "KPLANE_TOKEN_FILE", value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Connect in plain text to a control plane on another machine; no token is sent then
    #[arg(long, global = true)]
    pub(crate) insecure: bool,
}

impl Place {
    /// Drops an address from the environment if a flag names a cluster. `both` allows flags for an address and a cluster.
    ///
    /// # Errors
    /// Flags name both an address and a cluster.
    pub(super) fn settle(&mut self, matches: &ArgMatches, both: bool) -> Result<(), clap::Error> {
        let is_flag = |id| matches.value_source(id) == Some(ValueSource::CommandLine);
        let cluster = [
            ("kubeconfig", "--kubeconfig"),
            ("context", "--context"),
            ("kplane_namespace", "--kplane-namespace"),
        ];
        let Some((_, flag)) = cluster.into_iter().find(|(id, _)| is_flag(id)) else {
            return Ok(());
        };
        if is_flag("server") && both {
            return Ok(());
        }
        if is_flag("server") {
            return Err(super::error(
                ErrorKind::ArgumentConflict,
                &format!("--server names an address, and {flag} a cluster: use one of them"),
            ));
        }
        self.server = None;
        self.names_cluster = true;
        Ok(())
    }
}

impl Identity {
    /// Returns the certificate and key of the flags.
    pub(crate) fn pair(&self) -> Option<KeyPair> {
        self.client_certificate
            .clone()
            .zip(self.client_key.clone())
            .map(|(certificate, key)| KeyPair { certificate, key })
    }

    /// Checks that the options fit each other, and the server if there is one, and completes the server's address.
    pub(super) fn fit(&self, server: Option<&mut Server>) -> Result<(), clap::Error> {
        let wrong = |text: &str| Err(super::error(ErrorKind::ValueValidation, text));
        if self.client_certificate.is_some() != self.client_key.is_some() {
            return wrong("--client-certificate and --client-key belong together");
        }
        let Some(server) = server else {
            return Ok(());
        };
        let has_authority = self.certificate_authority.is_some();
        if has_authority && !server.explicit {
            server.url = server.url.replacen("http://", "https://", 1);
        }
        match (server.is_secure(), has_authority) {
            (true, false) => wrong(&format!("{server} needs --certificate-authority FILE")),
            (false, true) => wrong(&format!(
                "--certificate-authority is for https://, and the server is {server}"
            )),
            (false, false) if !self.insecure && !server.is_here() => wrong(&format!(
                "{server} is plain text to another machine: use https:// with \
                 --certificate-authority, --client-certificate and --client-key, or allow it with \
                 --insecure"
            )),
            (false, false) if self.token_file.is_some() && !server.is_here() => wrong(&format!(
                "a token is not sent in plain text to another machine, not even with --insecure: \
                 use https:// with --certificate-authority for {server}"
            )),
            _ => Ok(()),
        }
    }
}

/// An address of a control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    /// A URL with a port, such as `http://127.0.0.1:7466`.
    pub(crate) url: String,
    /// Whether the user wrote the scheme.
    explicit: bool,
}

impl Server {
    /// Returns the address of a control plane on this machine.
    pub(crate) fn of_this_machine(secure: bool) -> Self {
        let scheme = if secure { "https" } else { "http" };
        Self {
            url: format!("{scheme}://127.0.0.1:{STATUS_PORT}"),
            explicit: false,
        }
    }

    fn is_secure(&self) -> bool {
        self.url.starts_with("https://")
    }

    /// Returns whether the address is this machine's own, so that plain text leaves no machine.
    fn is_here(&self) -> bool {
        let uri = self.url.parse::<Uri>().ok();
        is_this_machine(uri.as_ref().and_then(Uri::host).unwrap_or_default())
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.url)
    }
}

pub(super) fn parse_server(text: &str) -> Result<Server, String> {
    let (scheme, authority) = text.split_once("://").unwrap_or(("", text));
    let explicit = !scheme.is_empty();
    let scheme = match scheme {
        "" | "http" => "http",
        "https" => "https",
        _ => return Err("expected HOST, HOST:PORT or https://HOST:PORT".to_owned()),
    };
    let authority = authority.strip_suffix('/').unwrap_or(authority);
    let authority = match authority.parse() {
        Ok(IpAddr::V6(ip)) => format!("[{ip}]"),
        _ => authority.to_owned(),
    };
    let uri = format!("http://{authority}/").parse::<Uri>();
    let uri = uri.ok().filter(|uri| uri.path() == "/");
    let host = uri.as_ref().and_then(Uri::host).unwrap_or_default();
    match uri.as_ref().and_then(Uri::port_u16) {
        Some(_) if !host.is_empty() => Ok(Server {
            url: format!("{scheme}://{authority}"),
            explicit,
        }),
        None if !host.is_empty() && host == authority => Ok(Server {
            url: format!("{scheme}://{authority}:{STATUS_PORT}"),
            explicit,
        }),
        _ => Err("expected HOST, HOST:PORT or https://HOST:PORT".to_owned()),
    }
}

/// Parses a name that fits into a URL as it is.
fn parse_namespace(text: &str) -> Result<String, String> {
    let is_label = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-');
    let valid = !text.is_empty() && text.len() <= MAX_LABEL && text.chars().all(is_label);
    valid
        .then(|| text.to_owned())
        .ok_or_else(|| "expected the name of a namespace, such as kplane".to_owned())
}

#[cfg(test)]
mod tests;
