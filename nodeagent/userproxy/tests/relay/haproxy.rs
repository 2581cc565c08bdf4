//! The PROXY protocol, as HAProxy reads it.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use kplane_model::{Protocol, ProxyHeader};
use kplane_userproxy::Options;
use tempfile::TempDir;

use crate::fixture::{Served, eventually};

/// HAProxy, which answers with the addresses of the header. It ends with the test.
struct Haproxy {
    process: Child,
    at: SocketAddr,
    _folder: TempDir,
}

impl Drop for Haproxy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Haproxy {
    /// Starts the program; `None` if there is none.
    fn start() -> Option<Self> {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = free.local_addr().unwrap();
        drop(free);
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("haproxy.cfg");
        let config = format!(
            "defaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\nfrontend f\n  \
             bind {at} accept-proxy\n  http-request return status 200 content-type text/plain lf-string \"%[src] \
             %[src_port] %[dst] %[dst_port]\"\n"
        );
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-f").arg(file).stderr(Stdio::null());
        let process = match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            spawned => spawned.unwrap(),
        };
        eventually("HAProxy listens", || TcpStream::connect(at).is_ok());
        Some(Self {
            process,
            at,
            _folder: folder,
        })
    }
}

#[test]
fn haproxy_understands_both_versions_of_the_header() {
    let Some(haproxy) = Haproxy::start() else {
        assert!(std::env::var_os("CI").is_none(), "there is no haproxy");
        eprintln!("skipped: there is no haproxy (apt-get install haproxy)");
        return;
    };
    for version in [ProxyHeader::V1, ProxyHeader::V2] {
        let options = Options {
            header: Some(version),
            ..Options::default()
        };
        let served = Served::new(Protocol::Tcp, &[haproxy.at], options);
        let mut stream = served.connect();
        let from = stream.local_addr().unwrap();
        let request = "GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let expected = format!(
            "{} {} 127.0.0.1 {}",
            from.ip(),
            from.port(),
            served.at.port()
        );
        assert!(answer.ends_with(&expected), "{version:?}: {answer:?}");
    }
}
