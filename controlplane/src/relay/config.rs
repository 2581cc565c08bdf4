//! The flags about the control plane that a relay follows, and what they mean.

use std::path::PathBuf;

use clap::Args;
use kplane_tls::{ClientFiles, KeyPair, ServerFiles};

use crate::kubernetes::Access;
use crate::peers::Place;

/// Flags about the control plane that a relay follows.
#[derive(Args, Clone, Debug, Default)]
#[group(id = "relay", multiple = true)]
pub struct SourceFlags {
    /// Other control planes, separated by commas: addresses of their status ports, or a name with all these addresses. This
    /// one relays what the first of them that answers publishes, and takes the next one when that one fails. With
    /// --kubeconfig or --in-cluster, the API server only checks who calls, and keeps certificates.
    #[arg(
        long,
        value_name = "HOST[:PORT]",
        value_delimiter = ',',
        help_heading = "Where objects come from (one of these)"
    )]
    pub source_controlplane: Vec<Place>,

    /// Name that the certificates of the control planes in --source-controlplane must have [default: the host there].
    #[arg(long, value_name = "NAME", requires = "source_controlplane", help_heading = RELAY)]
    pub source_server_name: Option<String>,

    /// Authorities that issue these certificates [default: --client-ca-file].
    #[arg(long, value_name = "FILE", requires = "source_controlplane", help_heading = RELAY)]
    pub source_certificate_authority: Option<PathBuf>,

    /// Certificate by which this relay proves who it is: that of a control plane (O=kplane:controlplanes), or of a user
    /// who may read the desired state of all nodes [default: --tls-cert-file].
    #[arg(long, value_name = "FILE", requires = "source_controlplane", help_heading = RELAY)]
    #[arg(requires = "source_client_key")]
    pub source_client_certificate: Option<PathBuf>,

    /// Private key of --source-client-certificate.
    #[arg(long, value_name = "FILE", requires = "source_client_certificate", help_heading = RELAY)]
    pub source_client_key: Option<PathBuf>,

    /// Token of such a user. The file is read again when it changes.
    #[arg(long, value_name = "FILE", requires = "source_controlplane", help_heading = RELAY)]
    pub source_token_file: Option<PathBuf>,
}

/// Heading of the flags about the connection to the other control plane.
const RELAY: &str = "Relaying another control plane";

/// Configuration of a relay.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The flags.
    pub flags: SourceFlags,
    /// The API server that checks tokens and rights, and keeps certificates; `None` = there is none.
    pub access: Option<Access>,
    /// Packet mark of the connections; 0 = none.
    pub mark: u32,
}

impl Config {
    /// Returns the files of the connection to the other control plane; `None` without authorities. `own`: the files of
    /// this control plane's own ports.
    #[must_use]
    pub fn files(&self, own: Option<&ServerFiles>) -> Option<ClientFiles> {
        let flags = &self.flags;
        let authorities = flags.source_certificate_authority.clone();
        let of_own = || own.and_then(|own| own.client_authorities.clone());
        let pair = flags.source_client_certificate.clone();
        let pair = pair.zip(flags.source_client_key.clone());
        let pair = pair.map(|(certificate, key)| KeyPair { certificate, key });
        // A token is identity enough.
        let own_pair = own.filter(|_| flags.source_token_file.is_none());
        Some(ClientFiles {
            authorities: authorities.or_else(of_own)?,
            pair: pair.or_else(|| own_pair.map(|own| own.pair.clone())),
        })
    }
}
