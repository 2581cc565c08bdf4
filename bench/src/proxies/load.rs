//! The clients: threads in the client's namespace.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::proxies::target::{ANSWER, REQUEST};

/// Bytes of a large datagram, of 65,507 at most.
const DATAGRAM: usize = 60_000;

/// Bytes that a stream sends with one call.
const CHUNK: usize = 256 * 1024;

/// Time after which a socket of a stream is tried again.
const NAP: Duration = Duration::from_micros(100);

/// Time before a measurement in which the load is there already.
const WARM_UP: Duration = Duration::from_millis(300);

/// Time in which a client gives up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Runs `measure` while so many streams send as much as they can.
pub(crate) fn streams<T>(
    to: SocketAddr,
    streams: usize,
    measure: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let chunk = vec![b'x'; CHUNK];
    let all: Result<Vec<_>> =
        (0..streams).map(|_| Ok(TcpStream::connect_timeout(&to, PATIENCE)?)).collect();
    let all = all.with_context(|| format!("connect to {to}"))?;
    thread::scope(|scope| {
        for stream in &all {
            stream.set_nonblocking(true)?;
            scope.spawn(|| pour(&chunk, stream));
        }
        thread::sleep(WARM_UP);
        let measured = measure();
        for stream in &all {
            let _ = stream.shutdown(Shutdown::Both);
        }
        measured
    })
}

fn pour(chunk: &[u8], mut stream: &TcpStream) {
    while patiently(|| stream.write(chunk)).is_ok() {}
}

/// Repeats a call that does not wait, and sleeps while the socket is not ready. A thread that waited for the socket would
/// be woken by the proxy's system calls, whose CPU counts.
pub(crate) fn patiently(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(NAP),
            result => return result,
        }
    }
}

/// What a load has done.
#[derive(Default)]
pub(crate) struct Done {
    pub(crate) ok: AtomicU64,
    pub(crate) failed: AtomicU64,
}

/// Runs `measure` while clients repeat `act` on some threads.
pub(crate) fn repeat<T, S>(
    threads: usize,
    state: impl Fn() -> Result<S> + Sync,
    act: impl Fn(&mut S) -> io::Result<()> + Sync,
    measure: impl FnOnce(&Done) -> Result<T>,
) -> Result<T> {
    let (done, stop) = (Done::default(), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let Ok(mut state) = state() else {
                    return done.failed.fetch_add(1, Relaxed);
                };
                while !stop.load(Relaxed) {
                    match act(&mut state) {
                        Ok(()) => done.ok.fetch_add(1, Relaxed),
                        Err(_) => done.failed.fetch_add(1, Relaxed),
                    };
                }
                0
            });
        }
        thread::sleep(WARM_UP);
        let measured = measure(&done);
        stop.store(true, Relaxed);
        measured
    })
}

/// Opens a connection for requests.
pub(crate) fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// One request on a connection that stays.
pub(crate) fn request(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(&[b'q'; REQUEST])?;
    stream.read_exact(&mut [0; ANSWER])
}

/// One request on a connection of its own, which the server ends.
pub(crate) fn once(to: SocketAddr) -> io::Result<()> {
    let mut stream = connect(to)?;
    request(&mut stream)?;
    let mut byte = [0];
    match stream.read(&mut byte)? {
        0 => Ok(()),
        _ => Err(io::Error::other("more than one answer")),
    }
}

/// Returns whether a server gets the client's end of data, and the client its answer.
pub(crate) fn passes_an_end(to: SocketAddr) -> bool {
    let answer = || {
        let mut stream = connect(to)?;
        stream.write_all(&[b'q'; REQUEST])?;
        stream.shutdown(Shutdown::Write)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok::<_, io::Error>(answer.len() == ANSWER)
    };
    answer().unwrap_or(false)
}

/// Returns whether the client gets a server's reset.
pub(crate) fn passes_a_reset(to: SocketAddr) -> bool {
    let answer = || {
        let mut stream = connect(to)?;
        stream.write_all(&[b'q'; REQUEST])?;
        stream.read(&mut [0])
    };
    answer().is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

/// Returns whether a large datagram comes back whole.
pub(crate) fn passes_a_datagram(to: SocketAddr) -> bool {
    let answer = || {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.connect(to)?;
        socket.send(&[b'q'; DATAGRAM])?;
        socket.recv(&mut vec![0; 2 * DATAGRAM])
    };
    answer().is_ok_and(|bytes| bytes == DATAGRAM)
}

/// The outcome of connections that begin one after the other, whether the earlier ones have ended or not.
pub(crate) struct Steady {
    /// Times of those that succeeded, ascending.
    pub(crate) took: Vec<Duration>,
    pub(crate) failed: usize,
}

impl Steady {
    /// Returns the time that so many percent of the connections that succeeded did not exceed, in milliseconds.
    pub(crate) fn percentile(&self, percent: usize) -> f64 {
        let place = (self.took.len() * percent).div_ceil(100).max(1) - 1;
        let took = self.took.get(place);
        took.map_or(f64::NAN, |took| took.as_secs_f64() * 1e3)
    }

    pub(crate) fn failed_percent(&self) -> f64 {
        let all = self.took.len() + self.failed;
        self.failed as f64 * 100.0 / all as f64
    }
}

/// Starts connections at a steady pace.
pub(crate) fn steady(to: SocketAddr, number: u32, apart: Duration) -> Steady {
    let results = thread::scope(|scope| {
        let begun = Instant::now();
        let clients: Vec<_> = (0..number)
            .map(|number| {
                let at = begun + apart * number;
                thread::sleep(at.saturating_duration_since(Instant::now()));
                scope.spawn(move || {
                    let begun = Instant::now();
                    let in_time = || begun.elapsed() <= PATIENCE;
                    once(to).ok().filter(|()| in_time())?;
                    Some(begun.elapsed())
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect::<Vec<_>>()
    });
    let mut took: Vec<Duration> = results.iter().flatten().copied().collect();
    took.sort_unstable();
    let failed = results.len() - took.len();
    Steady { took, failed }
}

/// Opens connections and keeps them.
pub(crate) fn idle(to: SocketAddr, number: usize) -> Result<Vec<TcpStream>> {
    let mut all = Vec::with_capacity(number);
    for _ in 0..number {
        let stream = TcpStream::connect_timeout(&to, PATIENCE);
        all.push(stream.with_context(|| format!("connection {} to {to}", all.len()))?);
    }
    ensure!(all.len() == number);
    Ok(all)
}
