//! kplane's own connections: to the API server, and from agents to the control plane.
//!
//! They carry a mark that the node's rules recognize, so that kplane's rules never apply to them.
//! No Service can lock an agent out, whatever addresses it claims.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Once};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::rt::TokioIo;
use kplane_tls::{ClientConfig, Wire, bare, greet};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::time::timeout;

/// Parses a mark such as `0x50` or `80`; 0 = none.
///
/// # Errors
/// The valid forms, as text.
pub fn parse_mark(text: &str) -> Result<u32, &'static str> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "must be a mark of 32 bits such as 0x50, or 0 for none")
}

/// Maximum time to connect, for all addresses of a name together.
const CONNECT: Duration = Duration::from_secs(5);
/// Silence after which the kernel probes the peer, in seconds.
const KEEPALIVE_IDLE_S: u32 = 15;
/// Interval between two probes, in seconds.
const KEEPALIVE_INTERVAL_S: u32 = 5;
/// Number of unanswered probes after which a connection is dead: within 15 + 3 * 5 = 30 s.
const KEEPALIVE_PROBES: u32 = 3;
/// Port on which a control plane serves agents, unless an address names another one.
pub const AGENT_PORT: u16 = 7465;
/// Maximum number of addresses of one name that are used, and of a list of replicas.
pub const MAX_ADDRESSES: usize = 64;

/// Ensures that the log reports only once that marks cannot be set.
static UNMARKED: Once = Once::new();

/// A dialer whose connections carry kplane's mark.
#[derive(Clone, Copy, Debug)]
pub struct Dialer {
    /// The mark; 0 = none.
    mark: u32,
}

impl Dialer {
    /// Creates a dialer with a mark; 0 = none.
    pub fn new(mark: u32) -> Self {
        Self { mark }
    }

    /// Connects to the first address that answers.
    ///
    /// # Errors
    /// The failure of the last address.
    pub async fn connect(self, addresses: &[SocketAddr]) -> io::Result<TcpStream> {
        let each = CONNECT / u32::try_from(addresses.len().max(1)).unwrap_or(u32::MAX);
        let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in addresses {
            match timeout(each, self.connect_one(*address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => failed = error,
                Err(_) => failed = io::ErrorKind::TimedOut.into(),
            }
        }
        Err(failed)
    }

    /// Returns a connector to these addresses, whatever the URL names. With a TLS configuration, the server's
    /// certificate must have `server_name`, or else the URL's host.
    pub fn to(
        self,
        addresses: Vec<SocketAddr>,
        tls: Option<Arc<ClientConfig>>,
        server_name: Option<Arc<str>>,
    ) -> impl tower::Service<
        Uri,
        Response = TokioIo<Box<dyn Wire>>,
        Error = io::Error,
        Future = impl Future<Output = io::Result<TokioIo<Box<dyn Wire>>>> + Send,
    > + Send {
        let addresses: Arc<[SocketAddr]> = addresses.into();
        tower::service_fn(move |url: Uri| {
            let (addresses, tls) = (Arc::clone(&addresses), tls.clone());
            let server_name = server_name.clone();
            async move {
                let stream = self.connect(&addresses).await?;
                let host = server_name.as_deref().or(url.host()).unwrap_or_default();
                let greeted = timeout(CONNECT, greet(stream, tls, host))
                    .await
                    .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
                greeted.map(TokioIo::new)
            }
        })
    }

    async fn connect_one(self, address: SocketAddr) -> io::Result<TcpStream> {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        self.mark(&socket)?;
        socket.set_nodelay(true)?;
        socket.set_keepalive(true)?;
        setsockopt(&socket, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_S)?;
        setsockopt(&socket, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL_S)?;
        setsockopt(&socket, sockopt::TcpKeepCount, &KEEPALIVE_PROBES)?;
        socket.connect(address).await
    }

    /// Marks a socket, if this process is permitted to.
    fn mark(self, socket: &TcpSocket) -> io::Result<()> {
        if self.mark == 0 {
            return Ok(());
        }
        match setsockopt(socket, sockopt::Mark, &self.mark) {
            Ok(()) => Ok(()),
            Err(Errno::EPERM) => {
                UNMARKED.call_once(|| {
                    tracing::info!(
                        "cannot mark kplane's own connections, which needs CAP_NET_ADMIN; Services \
                         at the addresses and ports that kplane uses are still refused"
                    );
                });
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Resolves a URL to addresses and ports; without a port in the URL, the scheme decides.
///
/// # Errors
/// The name cannot be resolved now.
pub async fn resolve(url: &Uri) -> io::Result<Vec<SocketAddr>> {
    let by_scheme = if url.scheme_str() == Some("http") { 80 } else { 443 };
    let port = url.port_u16().unwrap_or(by_scheme);
    if let Some(ip) = literal(url) {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let host = url.host().unwrap_or_default();
    Ok(timeout(CONNECT, lookup_host((host, port)))
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??
        .take(MAX_ADDRESSES)
        .map(|at| SocketAddr::new(at.ip().to_canonical(), port))
        .collect())
}

/// Returns the IP address of a URL whose host is one.
pub fn literal(url: &Uri) -> Option<IpAddr> {
    let host = bare(url.host()?);
    host.parse().ok().map(|ip: IpAddr| ip.to_canonical())
}

impl tower::Service<Uri> for Dialer {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, url: Uri) -> Self::Future {
        let dialer = *self;
        Box::pin(async move {
            let addresses = resolve(&url).await?;
            dialer.connect(&addresses).await.map(TokioIo::new)
        })
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::OWN_MARK;

    use super::*;

    #[tokio::test]
    async fn a_urls_place_is_its_address_and_port() {
        for (url, place) in [
            ("https://192.0.2.1:6443", "192.0.2.1:6443"),
            ("https://192.0.2.1", "192.0.2.1:443"),
            ("http://[2001:db8::1]", "[2001:db8::1]:80"),
        ] {
            let found = resolve(&url.parse().unwrap()).await.unwrap();
            assert_eq!(found, [place.parse().unwrap()], "{url}");
        }
        let localhost = resolve(&"https://localhost:6443".parse().unwrap()).await.unwrap();
        assert!(localhost.iter().all(|at| at.ip().is_loopback() && at.port() == 6443));
    }

    #[tokio::test]
    async fn the_next_address_is_tried_and_who_may_not_mark_connects_all_the_same() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let there = listener.local_addr().unwrap();
        // No process listens at a port that was just given back.
        let gone = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let nobody = gone.local_addr().unwrap();
        drop(gone);
        let stream = Dialer::new(OWN_MARK).connect(&[nobody, there]).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), there);
        let refused = Dialer::new(0).connect(&[nobody]).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
