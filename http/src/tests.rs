//! Clients of all kinds, over loopback.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::client::{ask, get, until};
use super::port::REBIND;
use super::*;

const CAPACITY: usize = 8;

fn ok(_: &Request<Incoming>) -> Answer {
    answer(StatusCode::OK, TEXT, "hello")
}

async fn server() -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { serve(listener, &Guests::new(CAPACITY), ok).await });
    address
}

#[tokio::test]
async fn one_request_a_connection() {
    let address = server().await;
    // The second request is not answered, and `ask` reads to the end of the connection.
    let twice = "GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(2);
    let reply = ask(address, &twice).await.unwrap();
    assert_eq!((reply.status, reply.body.as_str()), (200, "hello"));
    assert_eq!(reply.header("connection"), Some("close"));
    assert_eq!(reply.header("content-type"), Some(TEXT));
    assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
}

/// A24: names of header fields as kube-proxy writes them.
#[tokio::test]
async fn header_names_are_written_as_go_writes_them() {
    let mut stream = TcpStream::connect(server().await).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    for name in ["\r\nContent-Type: ", "\r\nX-Content-Type-Options: "] {
        assert!(answer.contains(name), "{answer}");
    }
}

/// Clients that hold connections open do not lock out others.
#[tokio::test]
async fn many_silent_clients_are_displaced() {
    let address = server().await;
    let mut silent = Vec::new();
    for _ in 0..CAPACITY * 4 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
        silent.push(stream);
    }
    for _ in 0..CAPACITY {
        assert_eq!(get(address, "/").await.unwrap().status, 200);
    }
    // The first connection was closed long before its time.
    let mut buffer = [0; 16];
    let read = tokio::time::timeout(HEAD / 2, silent[0].read(&mut buffer)).await;
    assert!(matches!(read, Ok(Ok(0) | Err(_))), "{read:?}");
}

#[tokio::test]
async fn huge_heads_are_refused() {
    let address = server().await;
    let long = format!(
        "GET / HTTP/1.1\r\nX: {}\r\n\r\n",
        "a".repeat(MAX_HEAD_BYTES * 4)
    );
    let many = format!(
        "GET / HTTP/1.1\r\n{}\r\n",
        "X: y\r\n".repeat(MAX_HEADERS + 1)
    );
    for request in [long, many] {
        let reply = ask(address, &request).await;
        // The connection may be reset before the answer is read.
        assert!(reply.is_none_or(|reply| reply.status == 431));
    }
    assert_eq!(get(address, "/").await.unwrap().status, 200);
}

/// The paused clock advances only when all tasks wait; then the server's patience ends first.
#[tokio::test(start_paused = true)]
async fn slow_clients_are_cut_off() {
    let address = server().await;
    let started = tokio::time::Instant::now();
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET / HT").await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(started.elapsed() <= CONNECTION);
}

/// G6: a port that is taken is tried again.
#[tokio::test(start_paused = true)]
async fn g6_a_port_is_taken_over_once_it_is_free() {
    let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port {
        what: "tests",
        flag: "test-address",
        address: other.local_addr().unwrap(),
    };
    let error = port.bind().await.unwrap_err().to_string();
    assert!(
        error.contains("for tests: Address already in use"),
        "{error}"
    );
    let how = format!(
        "`ss -ltnp 'sport = :{}'` names the program; ",
        port.address.port()
    );
    let how = how + "--test-address chooses another address";
    assert!(error.ends_with(&how), "{error}");
    let server = tokio::spawn(port.serve(None, ok));
    drop(other);
    let started = tokio::time::Instant::now();
    until(port.address, "/", |reply| reply.is_some()).await;
    assert!(started.elapsed() <= REBIND * 2);
    server.abort();
}
