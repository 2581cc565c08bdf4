//! One family's tables, as the driver sees them.

use super::super::counting;
use super::super::name::ChainName;
use super::super::readback::{self, Listing};
use super::super::restore::Limits;
use super::super::tool::{Flavour, Tool};
use crate::process::RunError;
use kplane_netlink::{NetlinkError, NfSocket};

/// Reads and writes tables.
pub(super) trait Tables: Send {
    /// The kind of iptables.
    fn flavour(&self) -> Flavour;

    /// How much may be written at once.
    fn limits(&self) -> Limits {
        match self.flavour() {
            Flavour::Legacy => Limits::LEGACY,
            Flavour::Nft => Limits::NFT,
        }
    }

    /// Reads what is there of ours.
    fn read(&mut self) -> Result<Listing, RunError>;

    /// Sees to it that the counters are there which rules add to.
    fn make_counters(&mut self) -> Result<(), NetlinkError>;

    /// Carries a text out, table by table.
    fn restore(&mut self, text: &str) -> Result<(), RunError>;

    /// Whether it would be carried out on empty tables; changes nothing.
    fn try_out(&mut self, text: &str) -> Result<(), RunError>;

    /// A number that is another after each change by anybody; `None` if there is none.
    fn generation(&mut self) -> Option<u32>;
}

/// The real ones.
#[derive(Debug)]
pub(super) struct Programs {
    tool: Tool,
    /// Knows the generation of nf_tables; legacy iptables has none.
    socket: Option<NfSocket>,
}

impl Programs {
    pub(super) fn new(tool: Tool) -> Self {
        let socket = match tool.flavour() {
            Flavour::Legacy => None,
            // Without it everything is read each time.
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
