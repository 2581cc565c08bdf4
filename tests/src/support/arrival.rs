//! Packets whose answers take another way back than they came, so that no connection comes about:
//! what is seen of them is their arrival.

use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context as _, Result, bail};
use kplane_model::Protocol;
use kplane_rig::capture::Capture;
use kplane_rig::wait::eventually;
use socket2::{Domain, Socket, Type};

use super::ask::{Question, Seen};
use super::world::Net;

/// A look at what arrives at some pods by TCP and UDP.
pub struct Arrivals(Vec<Capture>);

impl Arrivals {
    /// Begins to look.
    pub fn open(net: &Net, pods: &[&str]) -> Result<Self> {
        let capture = |pod: &&str| Capture::open(net.pod(pod)?);
        Ok(Self(pods.iter().map(capture).collect::<Result<_>>()?))
    }

    /// Asks once. Where the packet arrives with another source port it counts as lost: use it where
    /// no source is changed.
    pub fn ask(&self, net: &Net, question: &Question) -> Result<Seen> {
        let (to, source) = (question.to, SocketAddr::new(question.source, 0));
        self.drain()?;
        // Kept until the end: a closed socket's port may be another's.
        let (_socket, from) = net.ns(question.client)?.run(|| match question.protocol {
            Protocol::Tcp => {
                let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
                socket.set_nonblocking(true)?;
                socket.bind(&source.into())?;
                // In progress; if it is not, nothing arrives.
                let _ = socket.connect(&to.into());
                let from = socket.local_addr()?.as_socket().context("no address")?;
                Ok((Box::new(socket) as Box<dyn Send>, from))
            }
            Protocol::Udp => {
                let socket = UdpSocket::bind(source)?;
                socket.send_to(b"?", to)?;
                let from = socket.local_addr()?;
                Ok((Box::new(socket) as Box<dyn Send>, from))
            }
            Protocol::Sctp => bail!("SCTP is seen by its own watch"),
        })?;
        let number = question.protocol.number();
        let arrived = eventually(question.timeout, "arrival", || {
            let packets = self.drain().map_err(|error| error.to_string())?;
            let ours = |packet: &&Arrived| packet.protocol == number && packet.source == from;
            let found = packets.iter().find(ours).map(|packet| packet.endpoint);
            found.ok_or_else(|| "nothing".to_owned())
        });
        Ok(match arrived {
            Ok(endpoint) => Seen::Hit {
                endpoint,
                source: from.ip(),
            },
            Err(_) => Seen::Silent,
        })
    }

    fn drain(&self) -> Result<Vec<Arrived>> {
        let mut arrived = Vec::new();
        for capture in &self.0 {
            let packets = capture.drain()?.into_iter().filter(|p| !p.outgoing);
            arrived.extend(packets.map(|packet| Arrived {
                protocol: packet.protocol,
                source: packet.src,
                endpoint: packet.dst,
            }));
        }
        Ok(arrived)
    }
}

/// One packet that reached a pod.
struct Arrived {
    protocol: u8,
    source: SocketAddr,
    endpoint: SocketAddr,
}
