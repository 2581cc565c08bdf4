//! Subscribers of a NATS server, from Debian's package `nats-server`.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kplane_rig::process::Process;
use kplane_tls::{ClientConfig, ClientFiles, Files as _, Wire, greet};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep};

use super::crowd::{Client, Crowd, Measured};
use crate::fleet::{DEADLINE, make_certs};

const PORT: u16 = 4222;
/// Address of the first client: 127.2.0.1.
const OWN: u32 = 0x7f02_0001;
/// Bytes of a message.
const MESSAGE: usize = 128;
/// Size of a client's buffer, which holds some messages.
const BUFFER: usize = 512;

/// Measures so many subscribers of one subject.
///
/// # Errors
/// There is no `nats-server`, or it cannot bear them.
pub async fn measure(clients: u32, changes: usize) -> Result<Measured> {
    let folder = tempfile::tempdir()?;
    let certs = folder.path().join("certs");
    make_certs(&certs, Vec::new())?;
    let server = start(&certs)?;
    let files = ClientFiles {
        authorities: certs.join("ca.crt"),
        pair: None,
    };
    let config = files.load()?;
    let new = |number| Subscriber {
        own: Ipv4Addr::from(OWN + number),
        config: Arc::clone(&config),
    };
    let mut publisher = new(clients).connect_patiently().await?;
    let subscribers = (0..clients).map(new).collect();
    let crowd = Arc::<Crowd>::default();
    let message = format!("PUB change {MESSAGE}\r\n{}\r\n", "x".repeat(MESSAGE));
    let change = async || {
        publisher.write_all(message.as_bytes()).await?;
        Ok(publisher.flush().await?)
    };
    crowd
        .measure(server.id(), subscribers, changes, change)
        .await
}

fn start(certs: &Path) -> Result<Process> {
    let file = |name: &str| -> PathBuf { certs.join(name) };
    let mut command = Command::new("nats-server");
    command
        .args(["--addr", "127.0.0.1", "--port", &PORT.to_string(), "--tls"])
        .args(["--tlscert".into(), file("server.crt")])
        .args(["--tlskey".into(), file("server.key")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Process::start(command).context("install Debian's package nats-server")
}

/// A client that subscribes.
#[derive(Debug)]
struct Subscriber {
    own: Ipv4Addr,
    config: Arc<ClientConfig>,
}

type Stream = BufReader<Box<dyn Wire>>;

impl Subscriber {
    async fn connect(&self) -> Result<Stream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((self.own, 0).into())?;
        let server = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
        let mut stream = socket.connect(server).await?;
        ensure!(line(&mut stream).await?.starts_with("INFO "), "no server");
        let stream = greet(stream, Some(Arc::clone(&self.config)), "localhost").await?;
        let mut stream = BufReader::with_capacity(BUFFER, stream);
        let hello = "CONNECT {\"verbose\":false,\"pedantic\":false,\"tls_required\":true}\r\n";
        stream.write_all(hello.as_bytes()).await?;
        Ok(stream)
    }

    /// Connects as soon as the server is there.
    async fn connect_patiently(&self) -> Result<Stream> {
        let begun = Instant::now();
        loop {
            match self.connect().await {
                Err(_) if begun.elapsed() < DEADLINE => sleep(super::crowd::LOOK).await,
                connected => return connected,
            }
        }
    }
}

impl Client for Subscriber {
    async fn listen(&self, crowd: &Crowd) -> Result<()> {
        let mut stream = self.connect().await?;
        stream.write_all(b"SUB change 1\r\nPING\r\n").await?;
        stream.flush().await?;
        let mut attending = None;
        let mut text = String::new();
        loop {
            text.clear();
            if stream.read_line(&mut text).await? == 0 {
                return Err(std::io::Error::from(ErrorKind::UnexpectedEof).into());
            }
            match text.split_ascii_whitespace().next() {
                Some("PONG") => attending = Some(crowd.attend()),
                Some("PING") => {
                    stream.write_all(b"PONG\r\n").await?;
                    stream.flush().await?;
                }
                Some("MSG") => {
                    text.clear();
                    stream.read_line(&mut text).await?;
                    ensure!(text.trim_end().len() == MESSAGE, "a torn message");
                    ensure!(attending.is_some(), "a message before the answer");
                    crowd.arrive(1);
                }
                _ => {}
            }
        }
    }
}

/// Reads a line of plain text, and nothing after it.
async fn line(stream: &mut TcpStream) -> Result<String> {
    let mut line = String::new();
    while !line.ends_with('\n') {
        line.push(char::from(stream.read_u8().await?));
        ensure!(line.len() < 8 * 1024, "a long line");
    }
    Ok(line)
}
