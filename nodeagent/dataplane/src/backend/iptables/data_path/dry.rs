//! Tables that exist nowhere: they take every text.

use kplane_model::Family;

use super::super::name::ChainName;
use super::super::readback::{self, Listing};
use super::super::ruleset::RuleSettings;
use super::super::tool::Flavour;
use super::IptablesDataPath;
use super::tables::Tables;
use crate::backend::driver::Driver;
use crate::backend::{Settings, Side};
use crate::process::RunError;
use kplane_netlink::NetlinkError;

/// See the module.
#[derive(Debug)]
struct Nowhere;

/// Returns a family's data path on such tables, with the rules of most nodes.
pub(in super::super) fn dry(family: Family, settings: &Settings) -> Box<dyn Side> {
    let rules = RuleSettings {
        family,
        masquerade_bit: settings.masquerade_bit,
        own_mark: settings.own_mark,
        random_fully: true,
        // The setting of this machine's kernel that goes with it must not change.
        localhost_nodeports: false,
        tcp_be_liberal: false,
        counters: false,
        pod_interface: settings.pod_interface,
        layout: settings.iptables_layout,
    };
    let path = IptablesDataPath::new(Nowhere, rules, settings.probe_interval);
    Box::new(Driver::new(path))
}

impl Tables for Nowhere {
    fn flavour(&self) -> Flavour {
        Flavour::Nft
    }

    fn read(&mut self) -> Result<Listing, RunError> {
        Ok(readback::parse("", ChainName::parse))
    }

    fn make_counters(&mut self) -> Result<(), NetlinkError> {
        Ok(())
    }

    fn restore(&mut self, _: &str) -> Result<(), RunError> {
        Ok(())
    }

    fn try_out(&mut self, _: &str) -> Result<(), RunError> {
        Ok(())
    }

    fn generation(&mut self) -> Option<u32> {
        None
    }
}
