//! The configuration of identities and rights.

use std::io;
use std::path::PathBuf;

use kplane_tls::FileError;

use super::super::audit::AuditLog;

/// A gRPC port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// The port of agents.
    Agents,
    /// The port of the status API.
    Status,
}

impl Port {
    /// All ports.
    pub const ALL: [Self; 2] = [Self::Agents, Self::Status];

    /// Returns the name in metrics and in the audit log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agents => "agents",
            Self::Status => "status",
        }
    }
}

/// Configuration of identities and rights.
#[derive(Clone, Debug)]
pub struct AuthenticatorConfig {
    /// User names of agents' ServiceAccounts, `system:serviceaccount:NAMESPACE:NAME`.
    pub agent_accounts: Vec<String>,
    /// File of tokens and their owners.
    pub token_auth_file: Option<PathBuf>,
    /// File of rights on the status API, in place of the API server's decisions.
    pub authorization_file: Option<PathBuf>,
    /// The audit log.
    pub audit: AuditLog,
    /// Most watches of the status API at a time.
    pub watches: usize,
}

/// Default of [`AuthenticatorConfig::watches`].
pub const WATCHES: usize = 256;

impl Default for AuthenticatorConfig {
    fn default() -> Self {
        Self {
            agent_accounts: Vec::new(),
            token_auth_file: None,
            authorization_file: None,
            audit: AuditLog::default(),
            watches: WATCHES,
        }
    }
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthenticatorError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The audit log cannot be opened.
    #[error("cannot open the audit log; check --audit-log")]
    Audit(#[source] io::Error),
}
