//! The bytes of hostile clients: the beginning of a handshake, and HTTP/2 streams that are opened and reset.
//!
//! Floods go to addresses of this machine only, and their senders bound them in number and time.

use std::sync::Arc;

use anyhow::Result;
use kplane_tls::{ClientConfig, greet};
use tokio::io::AsyncReadExt as _;

/// The connection preface of an HTTP/2 client, with empty SETTINGS (RFC 9113, section 3.4).
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// The type of the frame that opens a stream, and of that which begins its answer. It is the fourth byte of a frame,
/// after the length of what follows the frame's nine bytes.
pub const HEADERS: u8 = 1;

/// Most bytes of a ClientHello.
const CLIENT_HELLO: usize = 2_048;

/// Returns the bytes with which a client begins a handshake. They can be sent any number of times: a server answers
/// before it learns whether the client goes on.
///
/// # Errors
/// The client does not begin.
pub async fn client_hello(config: Arc<ClientConfig>) -> Result<Vec<u8>> {
    let (client, mut server) = tokio::io::duplex(CLIENT_HELLO);
    let mut hello = vec![0; CLIENT_HELLO];
    let length = tokio::select! {
        length = server.read(&mut hello) => length?,
        greeted = greet(client, Some(config), "localhost") => greeted.map(|_| 0)?,
    };
    hello.truncate(length);
    Ok(hello)
}

/// Returns the frame that opens a stream of an agent. The numbers of a client's streams are odd, and grow.
pub fn opened(stream: u32) -> Vec<u8> {
    const END_HEADERS: u8 = 4;
    frame(HEADERS, END_HEADERS, stream, &fields())
}

/// Returns the frames that open a stream of an agent and reset it at once.
pub fn opened_and_reset(stream: u32) -> Vec<u8> {
    const RST_STREAM: u8 = 3;
    const CANCEL: u32 = 8;
    let reset = frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes());
    [opened(stream), reset].concat()
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    // A length has three bytes.
    let length = (payload.len() as u64).to_be_bytes();
    [&length[5..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Returns the header fields of an agent's request (RFC 7541): names by their numbers where they have some.
fn fields() -> Vec<u8> {
    const POST: u8 = 0x83;
    const HTTPS: u8 = 0x87;
    let text = |text: &str| [&[text.len().to_le_bytes()[0]], text.as_bytes()].concat();
    [
        vec![POST, HTTPS],
        // :path, :authority, content-type
        [vec![0x04], text("/kplane.v1.AgentService/Sync")].concat(),
        [vec![0x01], text("localhost")].concat(),
        [vec![0x0f, 0x10], text("application/grpc")].concat(),
        [vec![0x00], text("te"), text("trailers")].concat(),
    ]
    .concat()
}
