//! The driver's access to one family's tables.

use super::super::counting;
use super::super::name::ChainName;
use super::super::readback::{self, Listing};
use super::super::restore::Limits;
use super::super::tool::{Flavour, Tool};
use crate::process::RunError;
use kplane_netlink::{NetlinkError, NfSocket};

/// Access to tables.
pub(super) trait Tables: Send {
    /// Returns the kind of iptables.
    fn flavour(&self) -> Flavour;

    /// Returns how much may be written in one part.
    fn limits(&self) -> Limits {
        match self.flavour() {
            Flavour::Legacy => Limits::LEGACY,
            Flavour::Nft => Limits::NFT,
        }
    }

    /// Reads kplane's objects.
    fn read(&mut self) -> Result<Listing, RunError>;

    /// Creates the counters that rules use, if they are missing.
    fn make_counters(&mut self) -> Result<(), NetlinkError>;

    /// Executes a text, table by table.
    fn restore(&mut self, text: &str) -> Result<(), RunError>;

    /// Returns whether a text could be executed on empty tables; changes nothing.
    fn try_out(&mut self, text: &str) -> Result<(), RunError>;

    /// Returns a number that changes with each change by any program; `None` if there is none.
    fn generation(&mut self) -> Option<u32>;
}

/// Access to the real tables, through programs.
#[derive(Debug)]
pub(super) struct Programs {
    tool: Tool,
    /// Socket for the generation of nf_tables; legacy iptables has no generation.
    socket: Option<NfSocket>,
}

impl Programs {
    pub(super) fn new(tool: Tool) -> Self {
        let socket = match tool.flavour() {
            Flavour::Legacy => None,
            // Without the socket, everything is read each time.
            Flavour::Nft => NfSocket::open().ok(),
        };
        Self { tool, socket }
    }
}

impl Tables for Programs {
    fn flavour(&self) -> Flavour {
        self.tool.flavour()
    }

    fn read(&mut self) -> Result<Listing, RunError> {
        Ok(readback::parse(&self.tool.list()?, ChainName::parse))
    }

    fn make_counters(&mut self) -> Result<(), NetlinkError> {
        counting::make_all()
    }

    fn restore(&mut self, text: &str) -> Result<(), RunError> {
        self.tool.restore(text)
    }

    fn try_out(&mut self, text: &str) -> Result<(), RunError> {
        self.tool.try_out(text)
    }

    fn generation(&mut self) -> Option<u32> {
        self.socket.as_mut()?.generation().ok()
    }
}
