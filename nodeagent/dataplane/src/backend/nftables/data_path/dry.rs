//! A table that exists nowhere: it takes every transaction, and says how many bytes it has.

use kplane_model::Family;

use super::super::access::{Cost, FoundTable, Guard, TableAccess, batch_of};
use super::super::affinity::AffinityId;
use super::super::clients::Client;
use super::super::frontend::Ops;
use super::super::schema::TableSettings;
use super::super::watch::Meddling;
use super::NftDataPath;
use crate::backend::Side;
use crate::backend::driver::Driver;
use kplane_netlink::{CommitError, NetlinkError};

/// Element operations in one transaction, as on a node with the agent's usual socket buffer.
const CAPACITY: usize = 500_000;

/// See the module.
#[derive(Debug)]
struct Nowhere {
    family: Family,
    settings: TableSettings,
}

/// Returns a family's data path on such a table.
pub(in super::super) fn dry(family: Family, settings: TableSettings) -> Box<dyn Side> {
    let nowhere = Nowhere { family, settings };
    Box::new(Driver::new(NftDataPath::new(family, nowhere)))
}

impl TableAccess for Nowhere {
    fn read(&mut self) -> Result<FoundTable, NetlinkError> {
        Ok(FoundTable::Ours(Vec::new(), Vec::new()))
    }

    fn meddling(&mut self) -> Result<Option<Meddling>, NetlinkError> {
        Ok(None)
    }

    fn commit(&mut self, rebuild: bool, _: Guard, groups: &[Ops]) -> Result<Cost, CommitError> {
        let batch = batch_of(self.family, self.settings, rebuild, groups);
        Ok(Cost {
            bytes: batch.byte_len() as u64,
            ..Cost::default()
        })
    }

    fn clients(&mut self, _: AffinityId) -> Result<Vec<Client>, NetlinkError> {
        Ok(Vec::new())
    }

    fn forget(&mut self, _: AffinityId, _: &[Client]) -> Result<(), CommitError> {
        Ok(())
    }

    fn capacity(&self, _: bool) -> usize {
        CAPACITY
    }
}
