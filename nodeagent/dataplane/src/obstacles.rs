//! Rules of other programs that change or stop packets of Services.

use std::collections::BTreeSet;

use kplane_model::Family;
use kplane_netlink::{
    Attribute, Attributes, Errno, Messages, NetlinkError, NfSocket, Request, nfproto,
};

use crate::backend::nftables::TABLE;
use crate::backend::nftables::uapi::{
    NFTA_CHAIN_HOOK, NFTA_CHAIN_NAME, NFTA_CHAIN_POLICY, NFTA_CHAIN_TABLE, NFTA_CHAIN_USE,
    NFTA_HOOK_HOOKNUM, msg,
};

/// Family of tables for both IPv4 and IPv6 (`NFPROTO_INET`).
const INET: u8 = 1;
/// Hook of forwarded packets (`NF_INET_FORWARD`, linux/netfilter.h).
const FORWARD: u32 = 2;
/// Policy of a chain that drops what no rule accepts (`NF_DROP`, linux/netfilter.h).
const DROP: u32 = 0;

/// A table that kube-proxy makes in mode nftables, for each family.
const KUBE_PROXY: &str = "kube-proxy";
/// A chain that kube-proxy makes in table `nat` in modes iptables and ipvs.
const KUBE_SERVICES: &str = "KUBE-SERVICES";
/// The table of firewalld.
const FIREWALLD: &str = "firewalld";

/// What other programs have in nf_tables. What they have in x_tables (`iptables-legacy`) is not seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Obstacles {
    /// The generation of nf_tables in which they were read; `None` = never.
    generation: Option<u32>,
    /// Chains that drop forwarded packets of each family unless a rule accepts them, such as `ip filter FORWARD`.
    pub dropping: [Vec<String>; 2],
    /// Those of them that have no rule, so that they drop all.
    pub closed: [Vec<String>; 2],
    /// Tables that kube-proxy has made in mode nftables, such as `ip kube-proxy`.
    pub kube_proxy_tables: BTreeSet<String>,
    /// Chains that kube-proxy makes in its other modes, such as `ip nat KUBE-SERVICES`. kplane's backend iptables makes
    /// the same ones.
    pub kube_proxy_chains: BTreeSet<String>,
    /// Whether firewalld has a table.
    pub firewalld: bool,
}

impl Obstacles {
    /// Reads the chains again, unless no program has changed nf_tables since the last time.
    ///
    /// # Errors
    /// [`NetlinkError`]: everything stays as it was last read.
    pub fn refresh(&mut self) -> Result<(), NetlinkError> {
        let generation = NfSocket::open()?.generation()?;
        if self.generation != Some(generation) {
            let mut read = Self {
                generation: Some(generation),
                ..Self::default()
            };
            let [v4, v6] = Family::ALL;
            read.add(nfproto(v4), "ip", &[v4])?;
            read.add(nfproto(v6), "ip6", &[v6])?;
            read.add(INET, "inet", &Family::ALL)?;
            *self = read;
        }
        Ok(())
    }

    /// Adds the chains of tables of one kind, which get packets of these families.
    fn add(&mut self, number: u8, word: &str, families: &[Family]) -> Result<(), NetlinkError> {
        let request = Request::new("list chains", msg::GETCHAIN, number, |_| {});
        let chains = match NfSocket::open()?.dump(request) {
            // This kernel has no nf_tables.
            Err(error) if error.errno() == Some(Errno::EINVAL) => return Ok(()),
            chains => chains?,
        };
        for message in Messages(&chains) {
            let attributes = message.attributes();
            let text = |kind| attributes.get(kind).and_then(Attribute::as_str);
            let (Some(table), Some(chain)) = (text(NFTA_CHAIN_TABLE), text(NFTA_CHAIN_NAME)) else {
                continue;
            };
            match (table, chain) {
                (TABLE, _) => {}
                (KUBE_PROXY, _) => drop(self.kube_proxy_tables.insert(format!("{word} {table}"))),
                (_, KUBE_SERVICES) => {
                    let name = format!("{word} {table} {chain}");
                    self.kube_proxy_chains.insert(name);
                }
                (FIREWALLD, _) => self.firewalld = true,
                _ => {}
            }
            if table != TABLE && drops_forwarded(&attributes).unwrap_or_default() {
                let rules = attributes.get(NFTA_CHAIN_USE).and_then(Attribute::as_u32);
                for family in families {
                    let name = format!("{word} {table} {chain}");
                    if rules == Some(0) {
                        self.closed[*family as usize].push(name.clone());
                    }
                    self.dropping[*family as usize].push(name);
                }
            }
        }
        Ok(())
    }
}

/// Returns whether a chain gets forwarded packets, and drops those that no rule accepts; `None` if it is not a base chain.
fn drops_forwarded(chain: &Attributes<'_>) -> Option<bool> {
    let hook = chain.get(NFTA_CHAIN_HOOK)?.children().get(NFTA_HOOK_HOOKNUM)?.as_u32()?;
    let policy = chain.get(NFTA_CHAIN_POLICY)?.as_u32()?;
    Some(hook == FORWARD && policy == DROP)
}
