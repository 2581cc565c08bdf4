//! Servers in pods that report to a client which server answered, and the addresses of the packet
//! on arrival.
//!
//! The answer is one line, `name peer_ip peer_port local_ip local_port`. Over TCP the server sends
//! it at once on a new connection, and then echoes. Over UDP the server answers each datagram with
//! it. All servers of a [`Pool`] share one thread, because a socket stays in the namespace in which
//! it was opened.

use std::io::Result as IoResult;
use std::net::{Shutdown, SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use socket2::SockRef;
use tokio::io::AsyncWriteExt as _;
use tokio::net;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::client::Protocol;
use crate::netns::NetNs;
use crate::wait::eventually;

/// Longest wait for an address that a child process holds between its fork and its exec. Until the
/// exec, the child has copies of all sockets of this process, including those that were closed
/// meanwhile.
const FORK_TIME: Duration = Duration::from_secs(5);
/// Pause after a failed accept; the usual cause is a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// The thread behind any number of servers. Dropping it stops all of them.
#[derive(Debug)]
pub struct Pool {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A listening server. Dropping it stops the server.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    protocol: Protocol,
    /// Carries the time that open connections still have.
    stop: Option<oneshot::Sender<Duration>>,
    /// The channel that is closed with the last socket.
    done: mpsc::Receiver<()>,
}

impl Pool {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn new() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new()
            .name("echo".to_owned())
            .spawn(move || {
                // The receiver completes when the sender is used or dropped: both mean stop.
                let _ = runtime.block_on(stopped);
            })
            .context("start the echo thread")?;
        Ok(Self {
            handle,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Starts a server called `name` in a namespace; port 0 takes a free one.
    ///
    /// # Errors
    /// The address is in use or does not belong to the namespace, or the name contains white space.
    pub fn serve(
        &self,
        ns: &NetNs,
        name: impl Into<String>,
        protocol: Protocol,
        address: SocketAddr,
    ) -> Result<Server> {
        let name = name.into();
        ensure!(!name.contains(char::is_whitespace), "server name {name:?}");
        let what = format!("{name}: listen on {protocol} {address}");
        let (stop, stopped) = oneshot::channel();
        let (running, done) = mpsc::channel();
        let address = match protocol {
            Protocol::Tcp => {
                let listener =
                    ns.run(|| eventually(FORK_TIME, &what, || TcpListener::bind(address)))?;
                let address = listener.local_addr()?;
                self.handle.spawn(async move {
                    let _running = running;
                    tcp(listener, name.into(), stopped).await
                });
                address
            }
            Protocol::Udp => {
                let socket =
                    ns.run(|| eventually(FORK_TIME, &what, || UdpSocket::bind(address)))?;
                let address = socket.local_addr()?;
                self.handle.spawn(async move {
                    let _running = running;
                    udp(socket, &name, address, stopped).await
                });
                address
            }
        };
        Ok(Server {
            address,
            protocol,
            stop: Some(stop),
            done,
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been printed already.
            let _ = thread.join();
        }
    }
}

impl Server {
    /// Returns the address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the protocol of the server.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Closes everything; new connections are refused when this returns.
    pub fn stop(self) {
        self.stop_gracefully(Duration::ZERO);
    }

    /// Stops listening at once, lets open connections continue for up to `grace`, and returns when
    /// the last one is closed.
    pub fn stop_gracefully(mut self, grace: Duration) {
        self.end(grace);
    }

    fn end(&mut self, grace: Duration) {
        if let Some(stop) = self.stop.take() {
            // Both fail when the pool is gone, and its sockets with it.
            let _ = stop.send(grace);
            let _ = self.done.recv();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

async fn tcp(
    listener: TcpListener,
    name: Arc<str>,
    mut stopped: oneshot::Receiver<Duration>,
) -> IoResult<()> {
    listener.set_nonblocking(true)?;
    let listener = net::TcpListener::from_std(listener)?;
    let mut open = JoinSet::new();
    let grace = loop {
        tokio::select! {
            grace = &mut stopped => break grace.unwrap_or_default(),
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => { open.spawn(talk(stream, peer, name.clone())); }
                Err(_) => sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = open.join_next() => {}
        }
    };
    // Closing alone does not refuse connections while a child process holds a copy (FORK_TIME).
    SockRef::from(&listener).shutdown(Shutdown::Both)?;
    drop(listener);
    // Dropping the set closes all connections that are still open.
    let _ = timeout(grace, async { while open.join_next().await.is_some() {} }).await;
    Ok(())
}

async fn talk(mut stream: net::TcpStream, peer: SocketAddr, name: Arc<str>) -> IoResult<()> {
    let line = answer(&name, peer, stream.local_addr()?);
    stream.write_all(line.as_bytes()).await?;
    let (mut from, mut to) = stream.split();
    tokio::io::copy(&mut from, &mut to).await.map(drop)
}

async fn udp(
    socket: UdpSocket,
    name: &str,
    local: SocketAddr,
    mut stopped: oneshot::Receiver<Duration>,
) -> IoResult<()> {
    socket.set_nonblocking(true)?;
    let socket = net::UdpSocket::from_std(socket)?;
    let mut datagram = [0; 1];
    loop {
        tokio::select! {
            _ = &mut stopped => break,
            received = socket.recv_from(&mut datagram) => {
                // A failed receive or send is an ICMP error about an earlier answer.
                let Ok((_, peer)) = received else { continue };
                let _ = socket.send_to(answer(name, peer, local).as_bytes(), peer).await;
            }
        }
    }
    // Clients whose datagrams arrived before the end get an answer.
    while let Ok((_, peer)) = socket.try_recv_from(&mut datagram) {
        let _ = socket.try_send_to(answer(name, peer, local).as_bytes(), peer);
    }
    Ok(())
}

fn answer(name: &str, peer: SocketAddr, local: SocketAddr) -> String {
    let (peer_ip, local_ip) = (peer.ip(), local.ip());
    format!(
        "{name} {peer_ip} {} {local_ip} {}\n",
        peer.port(),
        local.port()
    )
}
