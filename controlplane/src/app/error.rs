//! Errors of a control plane that starts, and of one that runs.

use std::net::SocketAddr;

use kplane_agents::identity::AuthenticatorError;
use kplane_desired_state::source::SourceError;
use kplane_tls::FileError;

/// An error that prevents a control plane from starting.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A port cannot be opened.
    #[error(
        "cannot listen on {address} for {purpose}: another control plane may have the port, or another program, such as \
         KubePrism of Talos (7445) or k0s (7443);{} --{flag} chooses another one, and controlPlane.ports.{value} of the chart",
        kplane_http::holder(source, *address)
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The port's purpose.
        purpose: &'static str,
        /// The flag that chooses the address, without dashes.
        flag: &'static str,
        /// The name of the port in the chart.
        value: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// A port in plain text would be open to other machines.
    #[error(
        "refusing to serve {purpose} on {address} in plain text, since any machine that reaches that address could pose as \
         any node: give --tls-cert-file, --tls-private-key-file and --client-ca-file (`kp-controlplane certs init` makes \
         them), listen on a loopback address, or allow it with --insecure"
    )]
    PlainText {
        /// The address.
        address: SocketAddr,
        /// The port's purpose.
        purpose: &'static str,
    },
    /// A certificate or key cannot be used.
    #[error("cannot set up TLS: {0}")]
    Tls(FileError),
    /// A file about identities or rights cannot be used.
    #[error(transparent)]
    Authenticator(#[from] AuthenticatorError),
    /// TLS for the pages of health and metrics, without any certificate.
    #[error(
        "--http-tls needs a certificate: give --tls-cert-file and --tls-private-key-file, or --certificates-in"
    )]
    NoCertificate,
    /// The lack of a cluster in which the control plane could keep its own certificates.
    #[error(
        "--certificates-in needs objects from an API server: give --kubeconfig or --in-cluster"
    )]
    NoApi,
    /// Other replicas, whose certificates could not be checked.
    #[error(
        "--peers needs the authorities of the other replicas' certificates: give --peer-certificate-authority, or --client-ca-file"
    )]
    NoPeerAuthority,
    /// No caller could prove an identity.
    #[error(
        "no agent and no user could connect: give --client-ca-file for callers with certificates, --token-auth-file for callers with \
         tokens, or objects from an API server, which reviews tokens"
    )]
    NoCallers,
    /// The source cannot deliver anything.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The gRPC descriptors of this build are damaged.
    #[error("cannot set up gRPC reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The same, found before.
    #[error("cannot read the gRPC descriptors of this build")]
    Descriptors(#[from] prost::DecodeError),
}

/// A part of a running control plane that ended.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// The source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A gRPC server.
    #[error("gRPC server failed")]
    Server(#[from] tonic::transport::Error),
    /// A task panicked, which is a bug.
    #[error("a task panicked")]
    Panic(#[from] tokio::task::JoinError),
}
