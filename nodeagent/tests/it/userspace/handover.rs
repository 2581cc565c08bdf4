//! One agent after the other: no connection is cut, and none fails (U57).

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use kplane_rig::loopback::unused;
use kplane_rig::process::Process;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;

use super::{PATIENCE, listed, start_with, write_service};
use crate::support::eventually;

/// Open connections: half of them exchange data all the time.
const CONNECTIONS: usize = 2000;

/// Threads that exchange data.
const THREADS: usize = 4;

/// Starts a server that sends everything back.
pub(crate) fn echo() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let thread = std::thread::Builder::new().stack_size(64 * 1024);
            let serve = move || {
                let mut buffer = [0; 256];
                while let Ok(count @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..count]).is_err() {
                        return;
                    }
                }
            };
            thread.spawn(serve).unwrap();
        }
    });
    at
}

pub(crate) fn connect(to: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

pub(crate) fn exchange(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"ping")?;
    let mut answer = [0; 4];
    stream.read_exact(&mut answer)?;
    if &answer == b"ping" { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
}

/// Clients that never stop.
struct Load {
    stop: Arc<AtomicBool>,
    exchanged: Arc<AtomicUsize>,
    opened: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<std::io::Result<()>>>,
}

impl Load {
    /// Exchanges data over these connections, and over new ones to `to`.
    fn start(mut streams: Vec<TcpStream>, to: SocketAddr) -> Self {
        let mut load = Self {
            stop: Arc::default(),
            exchanged: Arc::default(),
            opened: Arc::default(),
            threads: Vec::new(),
        };
        let share = streams.len() / THREADS;
        for _ in 0..THREADS {
            let mut own = streams.split_off(streams.len() - share);
            load.spawn(load.exchanged.clone(), move || {
                own.iter_mut().try_for_each(exchange)
            });
        }
        load.spawn(load.opened.clone(), move || exchange(&mut connect(to)?));
        load
    }

    fn spawn(
        &mut self,
        count: Arc<AtomicUsize>,
        mut work: impl FnMut() -> std::io::Result<()> + Send + 'static,
    ) {
        let stop = self.stop.clone();
        self.threads.push(std::thread::spawn(move || {
            while !stop.load(Relaxed) {
                work()?;
                count.fetch_add(1, Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }));
    }

    /// Waits until all clients have done more.
    fn progresses(&self) {
        let now = || [&self.exchanged, &self.opened].map(|count| count.load(Relaxed));
        let before = now();
        eventually("clients go on", || {
            let failed = self.threads.iter().any(JoinHandle::is_finished);
            let [exchanged, opened] = now();
            (failed || (exchanged > before[0] + 2 * THREADS && opened > before[1] + 20))
                .then_some(())
        });
    }

    /// Wants that no client has failed.
    fn end(self) -> usize {
        self.stop.store(true, Relaxed);
        for thread in self.threads {
            thread.join().unwrap().unwrap();
        }
        self.opened.load(Relaxed)
    }
}

fn ended(agent: &mut Process) -> ExitStatus {
    eventually("the agent ends", || agent.try_wait().unwrap())
}

fn terminate(agent: &Process) {
    agent.signal(Signal::SIGTERM).unwrap();
}

/// Returns whether this process may open enough files. The agent inherits the limit, and lets a ServicePort have less than
/// a fifth of it.
fn raise_limit() -> bool {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    hard >= 6 * CONNECTIONS as u64
}

fn run_dir(folder: &Path) -> [String; 4] {
    let run = folder.join("run").display().to_string();
    [
        "--run-dir".to_owned(),
        run,
        "--drain-timeout".to_owned(),
        "60s".to_owned(),
    ]
}

#[test]
fn u57_upgrades_and_restarts_under_2000_open_connections_cut_none() {
    if !raise_limit() {
        assert!(
            std::env::var_os("CI").is_none(),
            "the limit of open files is too low"
        );
        kplane_rig::privilege::skip("the limit of open files is too low");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let manifests = folder.path().join("manifests");
    std::fs::create_dir(&manifests).unwrap();
    let node_port = unused();
    write_service(&manifests, node_port.port(), &[echo(), echo()]);
    let flags = run_dir(folder.path());
    let start = || start_with(folder.path(), &manifests, &flags);

    let mut agent = start();
    let at = eventually("the Service is listed", || listed(folder.path()));
    let mut idle: Vec<TcpStream> = (0..CONNECTIONS).map(|_| connect(at).unwrap()).collect();
    idle.iter_mut().for_each(|stream| exchange(stream).unwrap());
    let busy = idle.split_off(CONNECTIONS / 2);
    let load = Load::start(busy, node_port);
    load.progresses();

    // An upgrade: the next agent starts while this one runs.
    for _ in 0..2 {
        let next = start();
        assert!(ended(&mut agent).success());
        agent = next;
        load.progresses();
        idle.iter_mut().for_each(|stream| exchange(stream).unwrap());
    }
    // A restart: this one is stopped, and the next one comes later.
    terminate(&agent);
    load.progresses();
    idle.iter_mut().for_each(|stream| exchange(stream).unwrap());
    let next = start();
    assert!(ended(&mut agent).success());
    load.progresses();
    idle.iter_mut().for_each(|stream| exchange(stream).unwrap());

    let opened = load.end();
    assert!(opened > 80, "{opened} new connections");
    drop(idle);
    terminate(&next);
    let mut last = next;
    assert!(
        ended(&mut last).success(),
        "an agent without connections ends at once"
    );
}

#[test]
fn u57_a_second_signal_ends_an_agent_that_drains() {
    let folder = tempfile::tempdir().unwrap();
    let manifests = folder.path().join("manifests");
    std::fs::create_dir(&manifests).unwrap();
    write_service(&manifests, unused().port(), &[echo()]);
    let mut agent = start_with(folder.path(), &manifests, &run_dir(folder.path()));
    let at = eventually("the Service is listed", || listed(folder.path()));
    let mut stream = connect(at).unwrap();
    exchange(&mut stream).unwrap();
    terminate(&agent);
    // The engine's last report goes with it, and connections stay.
    for _ in 0..20 {
        exchange(&mut stream).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(
        agent.try_wait().unwrap().is_none(),
        "it waits for its connection"
    );
    terminate(&agent);
    assert!(ended(&mut agent).success());
    assert!(exchange(&mut stream).is_err());
}
