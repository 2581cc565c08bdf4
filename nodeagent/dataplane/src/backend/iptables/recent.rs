//! The lists of the match `recent`, in which mode iptables remembers clients (net/netfilter/xt_recent.c). Each endpoint of
//! a ServicePort has one, with the name of its chain.

use std::fs;
use std::io::{Error, ErrorKind};
use std::net::IpAddr;
use std::time::Instant;

use super::name::ChainName;
use crate::backend::affinity::{AffinityClient, AffinityClients, AffinityPort, ClientQuery, LATE};

/// The folder of the lists, for the network namespace of the calling thread.
const FOLDER: &str = "/proc/thread-self/net/xt_recent";
/// Longest list that is read, in bytes: some 10,000 clients. The kernel's default limit is 100.
const LIST: usize = 4 << 20;

/// Reads which clients are remembered. A list keeps clients whose time is over until a packet passes it, and does not say
/// how old they are.
pub(in crate::backend) fn remembered(
    ports: &[AffinityPort],
    wanted: ClientQuery,
) -> Result<AffinityClients, Error> {
    let mut clients = AffinityClients::default();
    for (index, port) in ports.iter().enumerate() {
        for endpoint in &port.endpoints {
            if Instant::now() > wanted.until {
                return Err(Error::new(ErrorKind::TimedOut, LATE));
            }
            let list = ChainName::endpoint(&port.key, *endpoint);
            for client in read(list.as_str())? {
                if wanted.wants(client) {
                    clients.add(AffinityClient {
                        port: index,
                        client,
                        endpoint: Some(*endpoint),
                        expires: None,
                    });
                }
            }
        }
    }
    Ok(clients)
}

fn named(file: &str, error: &Error) -> Error {
    Error::new(error.kind(), format!("{file}: {error}"))
}

/// Reads the clients of a list; none if there is no such list.
fn read(list: &str) -> Result<Vec<IpAddr>, Error> {
    use std::io::Read as _;
    let file = format!("{FOLDER}/{list}");
    let mut text = String::new();
    let open = match fs::File::open(&file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        open => open.map_err(|error| named(&file, &error))?,
    };
    let most = u64::try_from(LIST).unwrap_or(u64::MAX);
    let read = open.take(most).read_to_string(&mut text);
    read.map_err(|error| named(&file, &error))?;
    if text.len() >= LIST {
        return Err(Error::other(format!("{file} is too long")));
    }
    Ok(text.lines().filter_map(parse).collect())
}

/// Reads a line such as `src=10.0.0.1 ttl: 64 last_seen: 4295 oldest_pkt: 1 4295`.
fn parse(line: &str) -> Option<IpAddr> {
    let word = line.split_ascii_whitespace().next()?;
    word.strip_prefix("src=")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_both_families_are_read() {
        let v4 = "src=10.244.1.9 ttl: 64 last_seen: 4294950000 oldest_pkt: 1 4294950000";
        assert_eq!(parse(v4), "10.244.1.9".parse().ok());
        let v6 = "src=fd00:0000:0000:0000:0000:0000:0000:0009 ttl: 64 last_seen: 1 oldest_pkt: 1 1";
        assert_eq!(parse(v6), "fd00::9".parse().ok());
        for wrong in ["", "src=", "dst=10.0.0.1", "10.0.0.1"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
