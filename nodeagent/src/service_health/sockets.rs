//! The addresses on which health check node ports listen (A23): all addresses of a family, or those
//! of the node's own that `nodePortAddresses` selects.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use kplane_model::{Cidr, Family};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpSocket};

/// Most connections that wait to be accepted.
const BACKLOG: u32 = 128;

/// The choice of the node's addresses to listen on.
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    cidrs: Vec<Cidr>,
}

impl Addresses {
    /// Chooses the addresses in `nodeport_addresses`. A family without an entry listens on all
    /// addresses, as in kube-proxy.
    #[must_use]
    pub fn new(nodeport_addresses: &[Cidr]) -> Self {
        Self {
            cidrs: nodeport_addresses.to_vec(),
        }
    }

    fn of(&self, family: Family) -> impl Iterator<Item = &Cidr> {
        self.cidrs
            .iter()
            .filter(move |cidr| cidr.family() == family)
    }

    /// Returns whether one socket serves all addresses of the family.
    fn is_everything(&self, family: Family) -> bool {
        let mut of_family = self.of(family).peekable();
        of_family.peek().is_none() || of_family.any(|cidr| cidr.prefix_len() == 0)
    }

    /// Returns whether the choice follows the node's addresses as they come and go.
    pub(super) fn is_changing(&self) -> bool {
        Family::ALL
            .iter()
            .any(|family| !self.is_everything(*family))
    }

    /// Returns the addresses to listen on now, for each family.
    ///
    /// # Errors
    /// The node's addresses cannot be read.
    pub(super) fn current(&self) -> io::Result<[BTreeSet<IpAddr>; 2]> {
        let own = if self.is_changing() {
            own_addresses()?
        } else {
            Vec::new()
        };
        Ok(Family::ALL.map(|family| {
            if self.is_everything(family) {
                return BTreeSet::from([any(family)]);
            }
            let chosen = |ip: &&IpAddr| self.of(family).any(|cidr| cidr.contains(**ip));
            own.iter().filter(chosen).copied().collect()
        }))
    }
}

fn any(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Returns the addresses of the node's interfaces, without those that are valid only with an
/// interface.
fn own_addresses() -> io::Result<Vec<IpAddr>> {
    let is_plain = |ip: &IpAddr| match ip {
        IpAddr::V4(_) => true,
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    };
    let addresses = kplane_dataplane::own_addresses::<Vec<IpAddr>>()?
        .into_iter()
        .filter(is_plain);
    Ok(addresses.collect())
}

/// Opens a port on an address, for this family only: the other one has its own socket.
pub(super) fn listen(ip: IpAddr, port: u16) -> io::Result<TcpListener> {
    let socket = match ip {
        IpAddr::V4(_) => TcpSocket::new_v4()?,
        IpAddr::V6(_) => {
            let socket = TcpSocket::new_v6()?;
            setsockopt(&socket, sockopt::Ipv6V6Only, &true)?;
            socket
        }
    };
    // The port can be opened although old connections of a closed server remain.
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::new(ip, port))?;
    socket.listen(BACKLOG)
}

/// Returns what to do about a port that cannot be opened.
pub(super) fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EADDRINUSE) => {
            "another Service or program uses the port: free it, or choose another \
             healthCheckNodePort"
        }
        Some(Errno::EMFILE | Errno::ENFILE) => "raise the limit of open files",
        Some(Errno::EACCES | Errno::EPERM) => {
            "the agent lacks the privilege: run it as root, or choose a port from 1024 on"
        }
        _ => "check the node's network configuration",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(cidrs: &[&str], family: Family) -> BTreeSet<IpAddr> {
        let cidrs: Vec<Cidr> = cidrs.iter().map(|text| text.parse().unwrap()).collect();
        Addresses::new(&cidrs).current().unwrap()[family as usize].clone()
    }

    #[test]
    fn a23_node_port_addresses_choose_where_to_listen() {
        let any_v4 = BTreeSet::from(["0.0.0.0".parse().unwrap()]);
        let any_v6 = BTreeSet::from(["::".parse().unwrap()]);
        assert_eq!(chosen(&[], Family::V4), any_v4);
        assert_eq!(chosen(&[], Family::V6), any_v6);
        assert_eq!(chosen(&["192.0.2.0/24", "0.0.0.0/0"], Family::V4), any_v4);
        // Without an entry of a family, all its addresses are chosen, as for its node ports.
        assert_eq!(chosen(&["127.0.0.0/8"], Family::V6), any_v6);
        let loopback = BTreeSet::from(["127.0.0.1".parse().unwrap()]);
        assert_eq!(chosen(&["127.0.0.0/8"], Family::V4), loopback);
        assert!(chosen(&["240.1.2.0/24"], Family::V4).is_empty());
    }
}
