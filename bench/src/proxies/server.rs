//! The servers: threads that do as little as possible, so that the proxy is what is measured.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_tests::netns::NetNs;
use nix::sys::socket::{Backlog, MsgFlags, listen, recv, setsockopt, sockopt};
use socket2::SockRef;

use crate::proxies::load::patiently;
use crate::proxies::target::{ANSWER, REQUEST, SERVER, Target};

/// Threads that answer short connections.
const ACCEPTORS: usize = 8;

/// Most bytes that are dropped with one call.
const DROP: usize = 1024 * 1024;

/// What the servers have counted.
#[derive(Default)]
pub(crate) struct Counts {
    /// Bytes that were dropped.
    pub(crate) dropped: AtomicU64,
    /// Connections that are held.
    pub(crate) held: AtomicU64,
}

/// The servers of a namespace. Their threads end with the process.
pub(crate) struct Servers(pub(crate) Arc<Counts>);

impl Servers {
    pub(crate) fn start(ns: &NetNs) -> Result<Self> {
        let counts = Arc::<Counts>::default();
        let each = |target: Target, serve: fn(TcpStream, &Counts)| {
            let counts = counts.clone();
            accept(ns, target, 1, move |stream| {
                let counts = counts.clone();
                thread::spawn(move || serve(stream, &counts));
            })
        };
        each(Target::Sink, |stream, counts| sink(&stream, counts))?;
        each(Target::Echo, echo)?;
        each(Target::Hold, hold)?;
        each(Target::HalfClose, |stream, _| half_close(stream))?;
        each(Target::Resets, |stream, _| resets(stream))?;
        accept(ns, Target::Once, ACCEPTORS, once)?;
        let port = Target::Datagrams.server_port();
        let socket = ns.run(|| UdpSocket::bind((SERVER, port)).context("bind"))?;
        setsockopt(&socket, sockopt::RcvBuf, &(1 << 20))?;
        thread::spawn(move || datagrams(&socket));
        Ok(Self(counts))
    }
}

/// Accepts connections on some threads.
fn accept(
    ns: &NetNs,
    target: Target,
    threads: usize,
    serve: impl Fn(TcpStream) + Clone + Send + 'static,
) -> Result<()> {
    let port = target.server_port();
    let listener = ns.run(|| TcpListener::bind((SERVER, port)).context("listen"))?;
    listen(&listener, Backlog::new(4096)?)?;
    let listener = Arc::new(listener);
    for _ in 0..threads {
        let (listener, serve) = (listener.clone(), serve.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                serve(stream);
            }
        });
    }
    Ok(())
}

/// Drops what comes, which the kernel need not even copy.
fn sink(stream: &TcpStream, counts: &Counts) {
    let mut room = vec![0; DROP];
    let flags = MsgFlags::MSG_TRUNC | MsgFlags::MSG_DONTWAIT;
    let mut drop_some = || Ok(recv(stream.as_raw_fd(), &mut room, flags)?);
    while let Ok(count @ 1..) = patiently(&mut drop_some) {
        counts.dropped.fetch_add(count as u64, Relaxed);
    }
}

fn once(mut stream: TcpStream) {
    // A client that has gone does not matter.
    let mut request = [0; REQUEST];
    if stream.read_exact(&mut request).is_ok() {
        let _ = stream.write_all(&[b'a'; ANSWER]);
    }
}

fn echo(mut stream: TcpStream, _: &Counts) {
    let _ = stream.set_nodelay(true);
    let mut request = [0; REQUEST];
    while stream.read_exact(&mut request).is_ok() && stream.write_all(&[b'a'; ANSWER]).is_ok() {}
}

fn hold(mut stream: TcpStream, counts: &Counts) {
    counts.held.fetch_add(1, Relaxed);
    let mut byte = [0];
    let _ = stream.read(&mut byte);
    counts.held.fetch_sub(1, Relaxed);
}

fn half_close(mut stream: TcpStream) {
    if stream.read_to_end(&mut Vec::new()).is_ok() {
        let _ = stream.write_all(&[b'a'; ANSWER]);
    }
}

fn resets(mut stream: TcpStream) {
    if stream.read_exact(&mut [0; REQUEST]).is_ok() {
        let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    }
}

fn datagrams(socket: &UdpSocket) {
    let mut room = vec![0; usize::from(u16::MAX)];
    loop {
        // An error is that of an earlier answer to a client that has gone.
        if let Ok((count, from)) = socket.recv_from(&mut room) {
            let _ = socket.send_to(&room[..count], from);
        }
    }
}
