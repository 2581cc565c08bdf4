//! Programs that listen on kube-proxy's ports, and their answers.

use std::collections::HashSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use kplane_model::Family;

use super::{CompetingProxy, Ports, inode};

/// Most sockets to ask; a node has two.
const MAX_ASKED: usize = 8;
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Most bytes of an answer that are read.
const MAX_ANSWER: usize = 16 << 10;
/// State of a socket that listens: `TCP_LISTEN` (net/tcp_states.h).
const LISTEN: &str = "0A";
/// kube-proxy's modes, as `/proxyMode` reports them.
const MODES: [&str; 3] = ["iptables", "ipvs", "nftables"];
/// Words in the answer of kube-proxy's `/healthz`; other programs (Cilium) imitate only the first two.
const HEALTHZ: [&str; 3] = ["\"lastUpdated\"", "\"currentTime\"", "\"nodeEligible\""];

/// Asks the sockets of other processes that listen on these ports of the calling thread's network namespace.
pub(super) fn answering(ports: Ports) -> Option<CompetingProxy> {
    let own = own_sockets();
    let mut found = None;
    for file in ["tcp", "tcp6"] {
        let list = fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
        let sockets = list.lines().skip(1).filter_map(listening);
        let others = sockets.filter(|(at, inode)| ports.has(at.port()) && !own.contains(inode));
        for (at, _) in others.take(MAX_ASKED) {
            match ask(at) {
                Some(competing_proxy @ CompetingProxy::Answers(..)) => {
                    return Some(competing_proxy);
                }
                competing_proxy => found = found.or(competing_proxy),
            }
        }
    }
    found
}

/// Returns the numbers of all sockets of this process.
fn own_sockets() -> HashSet<String> {
    fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|fd| inode(fd.path()))
        .collect()
}

/// Returns address and number of a listening socket, from a line of `/proc/net/tcp` or `tcp6`.
pub(super) fn listening(line: &str) -> Option<(SocketAddr, String)> {
    // sl local_address rem_address st tx_queue:rx_queue tr:when retrnsmt uid timeout inode
    let words: Vec<&str> = line.split_whitespace().take(10).collect();
    let (local, state, inode) = (words.get(1)?, words.get(3)?, words.get(9)?);
    let (ip, port) = local.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // The address consists of 32-bit words, printed as they are in memory, in network byte order.
    let word = |at: usize| u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok();
    let ip = match ip.len() {
        8 => IpAddr::from(word(0)?.to_ne_bytes()),
        32 => {
            let mut bytes = [0; 16];
            for (at, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(at)?.to_ne_bytes());
            }
            Ipv6Addr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    (*state == LISTEN).then(|| (SocketAddr::new(ip, port), (*inode).to_owned()))
}

fn ask(at: SocketAddr) -> Option<CompetingProxy> {
    let loopback = Family::ALL.map(Family::loopback);
    let candidates = match at.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => &loopback[..1],
        IpAddr::V6(ip) if ip.is_unspecified() => &loopback[..],
        ip => &[ip],
    };
    let mut silent = None;
    for ip in candidates {
        let to = SocketAddr::new(*ip, at.port());
        for (path, is_its) in [
            ("/proxyMode", is_mode as fn(&str) -> bool),
            ("/healthz", is_health),
        ] {
            match get(to, path) {
                Reply::Text(body) if is_its(&body) => {
                    return Some(CompetingProxy::Answers(to, path));
                }
                Reply::Text(_) | Reply::Nobody => {}
                Reply::Silence => {
                    silent = Some(CompetingProxy::Silent(to));
                    break;
                }
            }
        }
    }
    silent
}

pub(super) fn is_mode(body: &str) -> bool {
    MODES.contains(&body.trim())
}

pub(super) fn is_health(body: &str) -> bool {
    HEALTHZ.iter().all(|field| body.contains(field))
}

enum Reply {
    /// The body of an answer, whatever its status.
    Text(String),
    /// No program listens at that address.
    Nobody,
    /// A program accepted the connection and sent nothing in time.
    Silence,
}

fn get(to: SocketAddr, path: &str) -> Reply {
    let deadline = Instant::now() + PATIENCE;
    let mut stream = match TcpStream::connect_timeout(&to, PATIENCE) {
        Ok(stream) => stream,
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => return Reply::Silence,
        Err(_) => return Reply::Nobody,
    };
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    let limited = stream
        .set_write_timeout(Some(PATIENCE))
        .and_then(|()| stream.write_all(request.as_bytes()));
    if limited.is_err() {
        return Reply::Silence;
    }
    let mut answer = Vec::new();
    let mut part = [0; 4096];
    while answer.len() < MAX_ANSWER {
        let left = deadline.saturating_duration_since(Instant::now());
        // A timeout of zero would mean no timeout.
        if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
            break;
        }
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(read) => answer.extend_from_slice(part.get(..read).unwrap_or_default()),
            Err(_) => break,
        }
    }
    let answer = String::from_utf8_lossy(&answer);
    match answer.split_once("\r\n\r\n") {
        Some((_, body)) => Reply::Text(body.to_owned()),
        None if answer.is_empty() => Reply::Silence,
        // The program speaks another protocol.
        None => Reply::Text(String::new()),
    }
}
