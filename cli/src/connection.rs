//! The way to the control plane: straight to an address, or through the API server of a cluster.
//!
//! [`Route::choose`] decides once, without asking any server. [`Route::connect`] makes a connection; `watch` calls it
//! again after an outage, and files with credentials are read again each time.

use std::time::Duration;

use kplane_tls::{Token, Wire};

use crate::args::Options;

mod direct;
mod error;
mod kubernetes;
mod token;

pub(crate) use error::{ReachError, cause_at, plane_cause, root_cause};
pub(crate) use kubernetes::{Asked, ObjectClient};
pub(crate) use token::Bearer;

use direct::Direct;
use kubernetes::{Environment, Found, Kubernetes};

/// A connection to the status service of a control plane, inside TLS where there is any.
pub(crate) struct Connection {
    /// The bytes.
    pub(crate) wire: Box<dyn Wire>,
    /// The other end.
    pub(crate) peer: Peer,
    /// The token for each call.
    pub(crate) token: Option<Token>,
}

/// The control plane at the other end of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// A URL with its name and port.
    pub(crate) url: String,
    /// Its name in errors.
    pub(crate) name: String,
}

/// The way to the control plane.
#[derive(Debug)]
pub(crate) struct Route {
    way: Way,
    timeout: Duration,
}

#[derive(Debug)]
enum Way {
    Direct(Direct),
    Kubernetes(Box<Kubernetes>),
}

impl Route {
    /// Chooses the way: the address that the user named; or else the cluster of the kubeconfig; or else, where no
    /// kubeconfig names a cluster, this machine.
    pub(crate) fn choose(options: &Options) -> Result<Self, ReachError> {
        Self::choose_in(options, &Environment::current())
    }

    fn choose_in(options: &Options, environment: &Environment) -> Result<Self, ReachError> {
        let identity = &options.identity;
        let way = match &options.place.server {
            Some(server) => Way::Direct(Direct::named(server.clone(), identity)),
            None => match Kubernetes::find(&options.place, identity, environment)? {
                Found::Cluster(cluster) => Way::Kubernetes(cluster),
                Found::Nothing(reason) => Way::Direct(Direct::guessed(identity, reason)),
            },
        };
        Ok(Self {
            way,
            timeout: options.timeout,
        })
    }

    /// Returns the way to the objects of the kubeconfig's cluster, whatever the way to the control plane is.
    pub(crate) async fn objects(options: &Options) -> Result<ObjectClient, ReachError> {
        let environment = Environment::current();
        match Kubernetes::find(&options.place, &options.identity, &environment)? {
            Found::Cluster(cluster) => Ok(cluster.into_objects(options.timeout).await?),
            Found::Nothing(reason) => Err(kubernetes::DiscoveryError::no_cluster(reason).into()),
        }
    }

    /// Returns the longest time to wait for an answer.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the server that is asked first.
    pub(crate) fn describe(&self) -> String {
        match &self.way {
            Way::Direct(direct) => direct.describe(),
            Way::Kubernetes(cluster) => cluster.describe(),
        }
    }

    pub(crate) async fn connect(&mut self) -> Result<Connection, ReachError> {
        let timeout = self.timeout;
        match &mut self.way {
            Way::Direct(direct) => match tokio::time::timeout(timeout, direct.connect()).await {
                Ok(connected) => connected,
                Err(_) => Err(ReachError::Timeout {
                    from: direct.describe(),
                    timeout,
                }),
            },
            Way::Kubernetes(cluster) => cluster.connect(timeout).await,
        }
    }

    /// Forgets credentials that were refused, so that the next connection asks for new ones.
    pub(crate) fn forget_credentials(&mut self) {
        if let Way::Kubernetes(cluster) = &mut self.way {
            cluster.forget_credentials();
        }
    }
}

#[cfg(test)]
mod tests;
