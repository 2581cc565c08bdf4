//! Where the API server is reached, so that no Service gets its address and port.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::Uri;
use tokio::net::lookup_host;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::{Batch, Event};
use crate::kubernetes::Api;

/// How often the server's name is resolved again.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Longest that resolving may take.
const RESOLVE: Duration = Duration::from_secs(5);
/// Addresses of one name that count.
const MAX_ADDRESSES: usize = 64;

/// Tells where the server is, and again when that changes, until nobody listens.
pub(super) async fn follow(api: Arc<Api>, sink: mpsc::Sender<Batch>) {
    let mut told = BTreeSet::new();
    loop {
        // A name that cannot be resolved at the moment has not moved.
        if let Some(now) = resolve(&api.server()).await
            && now != told
        {
            told.clone_from(&now);
            let batch = Batch {
                events: vec![Event::ApiServer(now)],
                observed_at: SystemTime::now(),
            };
            if sink.send(batch).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = sleep(LOOK_EVERY) => {}
            () = sink.closed() => return,
        }
    }
}

async fn resolve(server: &str) -> Option<BTreeSet<SocketAddr>> {
    let uri: Uri = server.parse().ok()?;
    let by_scheme = if uri.scheme_str() == Some("http") {
        80
    } else {
        443
    };
    let port = uri.port_u16().unwrap_or(by_scheme);
    let host = uri.host()?.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Some(BTreeSet::from([SocketAddr::new(ip.to_canonical(), port)]));
    }
    let found = timeout(RESOLVE, lookup_host((host, port)))
        .await
        .ok()?
        .ok()?;
    let found = found.take(MAX_ADDRESSES);
    Some(
        found
            .map(|at| SocketAddr::new(at.ip().to_canonical(), port))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_servers_place_is_its_address_and_port() {
        for (url, place) in [
            ("https://192.0.2.1:6443", "192.0.2.1:6443"),
            ("https://192.0.2.1", "192.0.2.1:443"),
            ("http://[2001:db8::1]", "[2001:db8::1]:80"),
        ] {
            let place = BTreeSet::from([place.parse().unwrap()]);
            assert_eq!(resolve(url).await, Some(place), "{url}");
        }
        let localhost = resolve("https://localhost:6443").await.unwrap();
        assert!(
            localhost
                .iter()
                .all(|at| at.ip().is_loopback() && at.port() == 6443)
        );
    }
}
