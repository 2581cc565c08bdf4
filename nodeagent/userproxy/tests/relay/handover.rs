//! One proxy after the other: connections and flows go on (U57).

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::mpsc;

use kplane_model::Protocol;
use kplane_userproxy::{Bundle, HandoverError, HandoverListener, Options, Successor, ask};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use crate::datagrams;
use crate::fixture::{PATIENCE, Served, Silent, answered, echo, eventually, server};

const CONNECTIONS: usize = 200;

/// Room of the sockets at both ends, in bytes. The kernel enlarges it otherwise, up to 32 MiB.
const ROOM: usize = 1024 * 1024;

/// More than both ends, the proxy's sockets and a pipe take: these may have up to 32, 4 and 1 MiB.
const MUCH: usize = 48 * 1024 * 1024;

/// Waits for a successor.
fn asked(listener: &HandoverListener) -> Result<Successor, HandoverError> {
    let mut found = None;
    eventually("a successor asks", || {
        found = listener.accept().transpose();
        found.is_some()
    });
    found.unwrap()
}

/// Passes everything through the socket at which another process would ask.
fn over_a_socket(bundle: Bundle) -> Bundle {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("proxy.sock");
    let listener = HandoverListener::open(&path).unwrap();
    let successor = std::thread::spawn(move || ask(&path));
    let before = bundle.counts();
    asked(&listener).unwrap().give(bundle).unwrap();
    let bundle = successor.join().unwrap().unwrap().unwrap();
    assert_eq!(bundle.counts(), before);
    bundle
}

fn exchange(stream: &mut TcpStream, text: &[u8]) {
    stream.write_all(text).unwrap();
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, text);
}

#[test]
fn u57_connections_go_on_in_the_next_proxy() {
    let mut served = Served::new(Protocol::Tcp, &[echo(), echo()], Options::default());
    let mut streams: Vec<TcpStream> = (0..CONNECTIONS).map(|_| served.connect()).collect();
    for stream in &mut streams {
        answered(stream).unwrap();
        exchange(stream, b"before");
    }
    let mut half_closed = streams.pop().unwrap();
    half_closed.write_all(b"last words").unwrap();
    half_closed.shutdown(Shutdown::Write).unwrap();
    for _ in 0..3 {
        let mut in_between = None;
        served = served.succeeded_by(|bundle| {
            in_between = Some(served_at(bundle.counts(), &streams[0]));
            over_a_socket(bundle)
        });
        answered(&mut in_between.unwrap()).unwrap();
        streams.iter_mut().for_each(|stream| exchange(stream, b"after"));
        assert_eq!(served.state().counts.failed, [0; 5]);
    }
    let mut rest = Vec::new();
    half_closed.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"last words");
    let before = streams.len();
    eventually("the connections are counted", || {
        served.state().counts.open == before as u64
    });
    drop(streams);
    eventually("all connections have ended", || {
        served.proxy.open() == [0, 0]
    });
}

/// Connects while no proxy accepts: the client waits, and is not refused.
fn served_at(counts: [usize; 3], other: &TcpStream) -> TcpStream {
    assert_eq!(counts[0], 1, "the listener stays open");
    let stream = TcpStream::connect(other.peer_addr().unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Starts a server that reads nothing until it is asked to, and then counts.
fn late_reader() -> (SocketAddr, mpsc::Sender<()>, mpsc::Receiver<Vec<u8>>) {
    let (go, wait) = mpsc::channel::<()>();
    let (tell, seen) = mpsc::channel();
    let wait = std::sync::Arc::new(std::sync::Mutex::new(wait));
    let at = server(move |mut stream| {
        SockRef::from(&stream).set_recv_buffer_size(ROOM).unwrap();
        wait.lock().unwrap().recv().unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        tell.send(all).unwrap();
    });
    (at, go, seen)
}

/// Sends as much as everything on the way takes; returns the number of bytes.
fn fill(stream: &mut TcpStream, pattern: &[u8]) -> usize {
    stream.set_nonblocking(true).unwrap();
    let (mut sent, mut quiet) = (0, 0);
    // The proxy moves data meanwhile: it is full when nothing fits for a while.
    while quiet < 50 && sent < pattern.len() {
        match stream.write(&pattern[sent..]) {
            Ok(count) => (sent, quiet) = (sent + count, 0),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                quiet += 1;
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        }
    }
    stream.set_nonblocking(false).unwrap();
    sent
}

/// `is_urgent`: the proxy copies; otherwise the kernel moves the data through a pipe.
fn data_on_its_way_arrives_once(is_urgent: bool) {
    let (at, go, seen) = late_reader();
    let served = Served::new(Protocol::Tcp, &[at], Options::default());
    let pattern: Vec<u8> =
        (0..u32::try_from(MUCH / 4).unwrap()).flat_map(u32::to_be_bytes).collect();
    let mut stream = served.connect();
    SockRef::from(&stream).set_send_buffer_size(ROOM).unwrap();
    let mut start = 0;
    if is_urgent {
        start = SockRef::from(&stream).send_out_of_band(&pattern[..1]).unwrap();
    }
    let middle = start + fill(&mut stream, &pattern[start..]);
    assert!(middle < MUCH, "the way has room for everything");
    let served = served.succeeded_by(over_a_socket);
    go.send(()).unwrap();
    stream.write_all(&pattern[middle..]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let all = seen.recv_timeout(PATIENCE).unwrap();
    assert!(
        all == pattern,
        "{} bytes of {MUCH}, or in another order",
        all.len()
    );
    drop(served);
}

#[test]
fn u57_data_in_a_pipe_arrives_once() {
    data_on_its_way_arrives_once(false);
}

#[test]
fn u57_data_in_a_buffer_arrives_once() {
    data_on_its_way_arrives_once(true);
}

#[test]
fn u57_a_client_that_waits_for_an_endpoint_goes_on_waiting() {
    let (silent, well) = (Silent::new(), echo());
    let served = Served::new(Protocol::Tcp, &[silent.at], Options::default());
    let mut waiting = served.connect();
    eventually("the proxy has the client", || served.proxy.open() == [1, 0]);
    let mut served = served.succeeded_by(|bundle| {
        assert_eq!(bundle.counts(), [1, 1, 0]);
        over_a_socket(bundle)
    });
    served.change(|spec| spec.endpoints.cluster = crate::fixture::addrs(&[well]));
    assert_eq!(answered(&mut waiting).unwrap(), well);
}

#[test]
fn u57_flows_stay_with_their_endpoints() {
    let servers = [datagrams::echo(), datagrams::echo()];
    let mut served = Served::new(Protocol::Udp, &servers, Options::default());
    let clients: Vec<_> = (0..20).map(|_| served.udp()).collect();
    let ask_all = || -> Vec<SocketAddr> {
        let ask = |client| datagrams::ask(client, b"who").0;
        clients.iter().map(ask).collect()
    };
    let first = ask_all();
    for threads in [1, 5, 2] {
        served = served.succeeded_with(threads, over_a_socket);
        assert_eq!(ask_all(), first, "{threads} threads");
        assert_eq!(served.proxy.open(), [0, clients.len()]);
        assert_eq!(served.state().counts.opened, 0, "no flow is new");
    }
    let new = served.udp();
    datagrams::ask(&new, b"me too");
}

/// Returns the number of the tests' network namespace.
fn own_namespace() -> u64 {
    std::fs::metadata("/proc/thread-self/ns/net").unwrap().ino()
}

/// A successor that asks, and ends before it has confirmed anything.
fn dying_successor(path: &Path, version: u16, namespace: u64) -> Socket {
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
    socket.connect(&SockAddr::unix(path).unwrap()).unwrap();
    let mut hello = vec![0];
    hello.extend(b"kplaneho");
    hello.extend(version.to_be_bytes());
    hello.extend(namespace.to_be_bytes());
    socket.send(&hello).unwrap();
    socket
}

#[test]
fn u57_a_successor_that_dies_leaves_everything_to_the_predecessor() {
    let served = Served::new(Protocol::Tcp, &[echo()], Options::default());
    let mut streams: Vec<TcpStream> = (0..CONNECTIONS).map(|_| served.connect()).collect();
    for stream in &mut streams {
        answered(stream).unwrap();
    }
    let served = served.succeeded_by(|bundle| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("proxy.sock");
        let listener = HandoverListener::open(&path).unwrap();
        let dying = dying_successor(&path, 1, own_namespace());
        let successor = asked(&listener).unwrap();
        drop(dying);
        let (bundle, error) = successor.give(bundle).unwrap_err();
        assert!(matches!(error, HandoverError::Io(_)), "{error}");
        bundle
    });
    streams.iter_mut().for_each(|stream| exchange(stream, b"after"));
    drop(served);
}

#[test]
fn u57_another_version_or_namespace_gets_a_refusal_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("proxy.sock");
    let listener = HandoverListener::open(&path).unwrap();
    for (version, namespace, reason) in [
        (99, own_namespace(), "version 99"),
        (1, own_namespace() + 1, "another network namespace"),
        (99, own_namespace() + 1, "version 99"),
    ] {
        let mut successor = dying_successor(&path, version, namespace);
        let error = asked(&listener).unwrap_err();
        assert!(matches!(error, HandoverError::Refused(_)), "{error}");
        let mut answer = vec![0; 256];
        let count = successor.read(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer[..count]);
        assert!(answer.contains(reason), "{answer}");
    }
}

#[test]
fn u57_nobody_at_the_socket_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("proxy.sock");
    assert!(ask(&path).unwrap().is_none());
    // A process that was killed leaves its socket behind.
    drop(HandoverListener::open(&path).unwrap());
    assert!(ask(&path).unwrap().is_none());
    HandoverListener::open(&path).unwrap();
}
