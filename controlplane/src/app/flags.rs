//! The flags about TLS, identities and rights, and what they mean.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kplane_agents::authority::LOOK;
use kplane_agents::identity::{self, AuditLog, WATCHES};
use kplane_tls::{KeyPair, ServerFiles};

use super::{Protection, pod_namespace};

/// Flags about TLS on the ports of agents and of the status API, and about identities and rights.
#[derive(Args, Debug)]
#[command(next_help_heading = "TLS, identities and rights")]
pub struct TlsFlags {
    /// Certificate of this control plane (PEM), for agents and for kpctl. The file is read again when it changes.
    /// `kp-controlplane certs init DIR` makes one.
    #[arg(long, value_name = "FILE", requires = "tls_private_key_file")]
    pub tls_cert_file: Option<PathBuf>,

    /// Private key of --tls-cert-file.
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    pub tls_private_key_file: Option<PathBuf>,

    /// Authorities that issue the certificates of agents and users. An agent's certificate names its node
    /// (CN=system:node:NAME, O=system:nodes, as kubelet's does); a user's certificate with O=kplane:admins allows
    /// `kpctl approve`.
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,

    /// Namespace in which the control plane keeps certificates that it makes itself: the Secret kplane-certificates, and
    /// the ConfigMap kplane-ca for agents and kpctl [default: with --in-cluster the namespace of the pod].
    #[arg(long, value_name = "NAMESPACE", conflicts_with_all = ["tls_cert_file", "insecure"])]
    pub certificates_in: Option<String>,

    /// Interval in seconds at which the objects of --certificates-in are read again. Tests shorten it.
    #[arg(long, value_name = "SECONDS", default_value_t = LOOK.as_secs(), hide = true)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub certificates_interval: u64,

    /// ServiceAccounts of agents, as NAMESPACE:NAME, separated by commas. A pod of such an account may be the agent
    /// of the node on which it runs, if it has a projected token with the audience "kplane". The API server of
    /// --kubeconfig or --in-cluster checks the tokens.
    #[arg(
        long,
        value_name = "ACCOUNT",
        value_delimiter = ',',
        default_value = "kplane:kplane-nodeagent"
    )]
    #[arg(value_parser = parse_account)]
    pub agent_service_account: Vec<String>,

    /// Tokens of agents and users, for use without a cluster: lines of token,user,uid,"group1,group2" (CSV, as in
    /// kube-apiserver). An agent is the user system:node:NAME in the group system:nodes. The file is read again when
    /// it changes.
    #[arg(long, value_name = "FILE")]
    pub token_auth_file: Option<PathBuf>,

    /// Rights on the status API (YAML: `rules` with `users`, `groups`, `verbs`, `paths`; see docs/security.md)
    /// [default: with --kubeconfig or --in-cluster the API server decides; otherwise every user reads, and the group
    /// kplane:admins acts].
    #[arg(long, value_name = "FILE")]
    pub authorization_file: Option<PathBuf>,

    /// File to which the control plane adds a JSON line for each refusal and each action of a user; - for standard
    /// output, empty for none.
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub audit_log: String,

    /// Maximum number of watches of the status API (kpctl --watch) at a time.
    #[arg(long, value_name = "N", default_value_t = WATCHES, help_heading = "Limits on clients")]
    pub max_watches: usize,

    /// Serve agents and kpctl in plain text on addresses that other machines reach. Any machine that
    /// reaches them can pose as any node.
    #[arg(long, conflicts_with = "tls_cert_file")]
    pub insecure: bool,
}

/// Parses a ServiceAccount's name; returns its user name.
fn parse_account(text: &str) -> Result<String, String> {
    match text.split_once(':') {
        Some((namespace, name))
            if !namespace.is_empty() && !name.is_empty() && !name.contains(':') =>
        {
            Ok(format!("system:serviceaccount:{namespace}:{name}"))
        }
        _ => Err("a ServiceAccount is NAMESPACE:NAME".to_owned()),
    }
}

impl TlsFlags {
    /// Returns the protection of the gRPC ports. In a pod the control plane makes its own certificates, unless the
    /// operator says otherwise.
    pub fn protection(&self, in_cluster: bool) -> Protection {
        let pair = self.tls_cert_file.clone().zip(self.tls_private_key_file.clone());
        if let Some((certificate, key)) = pair {
            return Protection::Files(ServerFiles {
                pair: KeyPair { certificate, key },
                client_authorities: self.client_ca_file.clone(),
            });
        }
        let own = self
            .certificates_in
            .clone()
            .or_else(|| in_cluster.then(pod_namespace).flatten());
        if !self.insecure
            && let Some(namespace) = own
        {
            Protection::Own {
                namespace,
                client_ca: self.client_ca_file.clone(),
                interval: Duration::from_secs(self.certificates_interval),
            }
        } else {
            Protection::PlainText {
                exposed: self.insecure,
            }
        }
    }

    /// Returns how callers are identified, and who decides on their rights.
    pub fn identity(&self) -> identity::AuthenticatorConfig {
        identity::AuthenticatorConfig {
            agent_accounts: self.agent_service_account.clone(),
            token_auth_file: self.token_auth_file.clone(),
            authorization_file: self.authorization_file.clone(),
            watches: self.max_watches,
            audit: match self.audit_log.as_str() {
                "" => AuditLog::Off,
                "-" => AuditLog::Stdout,
                file => AuditLog::File(file.into()),
            },
        }
    }
}
