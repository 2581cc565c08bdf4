//! The addresses on which health check node ports listen (A23): those of the node's own that serve node ports (A21), or
//! all addresses of a family.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};

use kplane_dataplane::plan::{NodePlan, loopback};
use kplane_model::{Cidr, Family};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpSocket};

/// Most connections that wait to be accepted.
const BACKLOG: u32 = 128;

/// The ranges of node ports of each family, of which the node's own addresses are chosen. None before the engine has
/// programmed the family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Addresses([Vec<Cidr>; 2]);

impl Addresses {
    /// Chooses the addresses that serve node ports of a family; returns whether that is news.
    pub(super) fn choose(&mut self, family: Family, node: &NodePlan) -> bool {
        let mut ranges = node.nodeport_ips.clone();
        ranges.extend(node.nodeport_localhost.then(|| loopback(family)));
        let is_new = self.0[family as usize] != ranges;
        self.0[family as usize] = ranges;
        is_new
    }

    fn of(&self, family: Family) -> &[Cidr] {
        &self.0[family as usize]
    }

    /// Returns whether one socket serves all addresses of the family.
    fn is_everything(&self, family: Family) -> bool {
        self.of(family).iter().any(|cidr| cidr.prefix_len() == 0)
    }

    /// Returns whether the choice follows the node's addresses as they come and go.
    pub(super) fn is_changing(&self) -> bool {
        let chooses = |family| !self.of(family).is_empty() && !self.is_everything(family);
        Family::ALL.into_iter().any(chooses)
    }

    /// Returns the addresses to listen on now, for each family.
    ///
    /// # Errors
    /// The node's addresses cannot be read.
    pub(super) fn current(&self) -> io::Result<[BTreeSet<IpAddr>; 2]> {
        let own = if self.is_changing() { own_addresses()? } else { Vec::new() };
        Ok(Family::ALL.map(|family| {
            if self.is_everything(family) {
                return BTreeSet::from([family.unspecified()]);
            }
            let chosen = |ip: &&IpAddr| self.of(family).iter().any(|cidr| cidr.contains(**ip));
            own.iter().filter(chosen).copied().collect()
        }))
    }
}

/// Returns the addresses of the node's interfaces, without those that are valid only with an
/// interface.
fn own_addresses() -> io::Result<Vec<IpAddr>> {
    let is_plain = |ip: &IpAddr| match ip {
        IpAddr::V4(_) => true,
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    };
    Ok(kplane_dataplane::own_addresses::<Vec<IpAddr>>()?
        .into_iter()
        .filter(is_plain)
        .collect())
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

    fn chosen(cidrs: &[&str], localhost: bool, family: Family) -> BTreeSet<IpAddr> {
        let node = NodePlan {
            nodeport_ips: cidrs.iter().map(|text| text.parse().unwrap()).collect(),
            nodeport_localhost: localhost,
            ..NodePlan::default()
        };
        let mut addresses = Addresses::default();
        addresses.choose(family, &node);
        assert!(!addresses.choose(family, &node), "no news");
        addresses.current().unwrap()[family as usize].clone()
    }

    #[test]
    fn a23_node_port_addresses_choose_where_to_listen() {
        let [any_v4, any_v6, loopback] =
            ["0.0.0.0", "::", "127.0.0.1"].map(|text| BTreeSet::from([text.parse().unwrap()]));
        assert_eq!(chosen(&["0.0.0.0/0"], false, Family::V4), any_v4);
        assert_eq!(chosen(&["192.0.2.0/24", "::/0"], true, Family::V6), any_v6);
        assert_eq!(chosen(&["127.0.0.0/8"], false, Family::V4), loopback);
        assert_eq!(chosen(&["240.1.2.3/32"], true, Family::V4), loopback);
        assert!(chosen(&["240.1.2.3/32"], false, Family::V4).is_empty());
        assert!(
            chosen(&[], false, Family::V4).is_empty(),
            "a fact is missing"
        );
    }
}
