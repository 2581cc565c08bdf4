//! A small HTTP server with the pages that the tests need.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_rig::netns::NetNs;

/// Time that the server takes for `/late`.
const LATE: Duration = Duration::from_millis(300);

/// Pages: path, further headers, content.
const PAGES: [(&str, &str, &str); 9] = [
    (
        "/slow",
        "",
        "<title>Slow</title><img src=/late alt=''>",
    ),
    ("/plain", "", "<title>Plain</title><h1>Words</h1>"),
    (
        "/loud",
        "",
        "<title>Loud</title><img src=/missing alt=''><script>
        console.log('a word', '{\"a\":1}'); console.warn('a warning'); console.error('an error');
        alert('a dialog'); throw new Error('a failure');</script>",
    ),
    (
        "/strict",
        "content-security-policy: default-src 'none'\r\n",
        "<title>Strict</title><script>document.title = 'ran'</script><p style='color:red'>Words</p>
        <img src=x onerror=\"document.title = 'ran'\" alt=''><img src=http://192.0.2.1/away.png alt=''>",
    ),
    (
        "/outward",
        "",
        "<title>Outward</title><img src=http://192.0.2.1/away.png alt=''>",
    ),
    (
        "/scripts",
        "",
        "<title>Scripts</title><script>document.title = 'scripted'</script><noscript>without scripts</noscript>",
    ),
    (
        "/follower",
        "",
        "<title>Follower</title><body><script>
        new EventSource('/events').onmessage = (event) => { document.body.textContent = event.data; };</script>",
    ),
    (
        "/coloured",
        "",
        "<title>Coloured</title><style>body { background: white }
        @media (prefers-color-scheme: dark) { body { background: black } }</style>",
    ),
    (
        "/keys",
        "",
        "<title>Keys</title><nav aria-label=Sheets><a href=#main>Skip</a>
        <a href=#main style='outline: none'>Hidden outline</a></nav><main id=main><h1>Keys</h1>
        <form action=/keys><input name=name aria-label=Search></form>
        <button onclick=\"document.title = 'pressed'\">Press</button>
        <table><tr><th scope=col>Node<tr><td>node-1</table></main>",
    ),
];

/// A server on loopback.
pub(super) struct Server {
    ns: NetNs,
    address: SocketAddr,
    shared: Arc<Shared>,
    listener: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    ends: AtomicBool,
    /// Streams of events.
    followers: Mutex<Vec<TcpStream>>,
}

impl Server {
    pub(super) fn start(ns: &NetNs) -> Result<Self> {
        // Browsers refuse some ports below 10,081, which the kernel may choose here.
        let listener = ns.run(|| Ok(TcpListener::bind("127.0.0.1:8080")?))?;
        let shared = Arc::<Shared>::default();
        let (address, inside) = (listener.local_addr()?, Arc::clone(&shared));
        Ok(Self {
            ns: ns.clone(),
            address,
            shared,
            listener: Some(thread::spawn(move || serve(&listener, &inside))),
        })
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Number of streams of events.
    pub(super) fn followers(&self) -> usize {
        self.shared.followers().len()
    }

    /// Sends an event.
    pub(super) fn say(&self, word: &str) -> Result<()> {
        let mut followers = self.shared.followers();
        followers
            .iter_mut()
            .try_for_each(|stream| write!(stream, "data: {word}\n\n"))
            .context("send an event")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        // A connection wakes the listener.
        let _ = self.ns.run(|| Ok(TcpStream::connect(self.address)?));
        let _ = self.listener.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn followers(&self) -> std::sync::MutexGuard<'_, Vec<TcpStream>> {
        let followers = self.followers.lock();
        followers.unwrap_or_else(PoisonError::into_inner)
    }
}

fn serve(listener: &TcpListener, shared: &Shared) {
    // A browser also opens connections that it may need later, so each has a thread. They end with the browser.
    thread::scope(|scope| {
        while let Ok((stream, _)) = listener.accept() {
            if shared.ends.load(Ordering::SeqCst) {
                break;
            }
            // A browser that goes away closes its connections.
            scope.spawn(|| answer(stream, shared).ok());
        }
    });
}

fn answer(mut stream: TcpStream, shared: &Shared) -> Result<()> {
    let mut head = String::new();
    let mut reader = BufReader::new(stream.try_clone()?);
    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head)? > 0 {}
    let path = head.split(' ').nth(1).context("no path")?.split('?').next().unwrap_or_default();
    if path == "/late" {
        thread::sleep(LATE);
    }
    if path == "/events" {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")?;
        shared.followers().push(stream);
        return Ok(());
    }
    let page = PAGES.into_iter().find(|(of, ..)| *of == path);
    let (status, kind, headers, body) = match (page, path) {
        (Some((_, headers, body)), _) => ("200 OK", "text/html; charset=utf-8", headers, body),
        (None, "/echo") => ("200 OK", "text/plain", "", &*head),
        (None, "/favicon.ico") => ("204 No Content", "text/plain", "", ""),
        _ => ("404 Not Found", "text/html", "", "<title>Missing</title>"),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )?;
    Ok(())
}
