//! Rules of other programs that stop packets which the node forwards.

use kplane_model::Family;
use kplane_netlink::{Attribute, Errno, Messages, NetlinkError, NfSocket, Request, nfproto};

use crate::backend::nftables::TABLE;
use crate::backend::nftables::uapi::{
    NFTA_CHAIN_HOOK, NFTA_CHAIN_NAME, NFTA_CHAIN_POLICY, NFTA_CHAIN_TABLE, NFTA_HOOK_HOOKNUM, msg,
};

/// Family of tables for both IPv4 and IPv6 (`NFPROTO_INET`).
const INET: u8 = 1;
/// Hook of forwarded packets (`NF_INET_FORWARD`, linux/netfilter.h).
const FORWARD: u32 = 2;
/// Policy of a chain that drops what no rule accepts (`NF_DROP`, linux/netfilter.h).
const DROP: u32 = 0;

/// The chains of nf_tables that drop forwarded packets of each family unless a rule accepts them, such as
/// `ip filter FORWARD`. Chains of iptables with x_tables are not among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DroppingChains {
    /// The generation of nf_tables in which they were read; `None` = never.
    generation: Option<u32>,
    /// Their names, by family.
    pub names: [Vec<String>; 2],
}

impl DroppingChains {
    /// Reads the chains again, unless no program has changed nf_tables since the last time.
    ///
    /// # Errors
    /// [`NetlinkError`]: the chains stay as they were last read.
    pub fn refresh(&mut self) -> Result<(), NetlinkError> {
        let generation = NfSocket::open()?.generation()?;
        if self.generation != Some(generation) {
            let [v4, v6] = Family::ALL;
            self.names = [dropping_chains(v4)?, dropping_chains(v6)?];
            self.generation = Some(generation);
        }
        Ok(())
    }
}

fn dropping_chains(family: Family) -> Result<Vec<String>, NetlinkError> {
    let word = match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    };
    let mut found = dropping(nfproto(family), word)?;
    found.extend(dropping(INET, "inet")?);
    Ok(found)
}

fn dropping(number: u8, word: &str) -> Result<Vec<String>, NetlinkError> {
    let request = Request::new("list chains", msg::GETCHAIN, number, |_| {});
    let chains = match NfSocket::open()?.dump(request) {
        // This kernel has no nf_tables.
        Err(error) if error.errno() == Some(Errno::EINVAL) => return Ok(Vec::new()),
        chains => chains?,
    };
    let found = Messages(&chains).filter_map(|message| {
        let get = |kind| message.attributes().get(kind);
        let hook = get(NFTA_CHAIN_HOOK)?
            .children()
            .get(NFTA_HOOK_HOOKNUM)?
            .as_u32()?;
        let policy = get(NFTA_CHAIN_POLICY)?.as_u32()?;
        let text = |kind| get(kind).and_then(Attribute::as_str);
        let (table, chain) = (text(NFTA_CHAIN_TABLE)?, text(NFTA_CHAIN_NAME)?);
        let drops = hook == FORWARD && policy == DROP && table != TABLE;
        drops.then(|| format!("{word} {table} {chain}"))
    });
    Ok(found.collect())
}
