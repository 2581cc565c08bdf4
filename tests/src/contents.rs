//! What a table of kplane's holds, so that two can be compared.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};
use kplane_dataplane::backend::nftables::{Data, Element, Key, read_elements};
use kplane_model::{EndpointAddr, Family};
use kplane_netlink::NfSocket;
use kplane_rig::netns::NetNs;

/// Differences that are named; a message is read, not searched.
const SHOWN: usize = 8;

/// Most lists of one table. The kernel enlarges a set within milliseconds.
const LISTS: usize = 100;

/// What a table holds, without the order of endpoints.
#[derive(Debug, PartialEq, Eq)]
pub struct Contents {
    /// Everything but endpoints.
    pub elements: BTreeSet<Element>,
    /// Endpoints of each place: by set and key without the index.
    pub endpoints: BTreeMap<Element, BTreeSet<EndpointAddr>>,
}

/// Reads the elements until two lists are the same: while the kernel enlarges a set, it lists some twice or late.
///
/// # Errors
/// The table cannot be read, or all lists differ.
pub fn settled(ns: &NetNs, family: Family) -> Result<BTreeSet<Element>> {
    let list = || {
        let elements = ns.run(|| Ok(read_elements(&mut NfSocket::open()?, family)?))?;
        anyhow::Ok(elements.into_iter().collect::<BTreeSet<_>>())
    };
    let mut last = list()?;
    for _ in 0..LISTS {
        let now = list()?;
        if now == last {
            return Ok(now);
        }
        last = now;
    }
    bail!("{LISTS} lists of the {family} table all differ")
}

impl Contents {
    /// Reads the table of a family in a namespace; wants indices of endpoints to be without gaps.
    pub fn read(ns: &NetNs, family: Family) -> Result<Self> {
        let elements = settled(ns, family)?;
        let mut contents = Self {
            elements: BTreeSet::new(),
            endpoints: BTreeMap::new(),
        };
        let mut indices = BTreeMap::<Element, BTreeSet<u32>>::new();
        for element in elements {
            let (key, index) = match element.key {
                Key::ServiceSlot(destination, index) => (Key::Service(destination), index),
                Key::NodePortSlot(port, index) => (Key::NodePort(port), index),
                _ => {
                    contents.elements.insert(element);
                    continue;
                }
            };
            let place = Element {
                key,
                data: None,
                ..element
            };
            let data =
                element.data.and_then(Data::endpoint).context("an endpoint without address")?;
            let new = contents.endpoints.entry(place).or_default().insert(data);
            ensure!(new, "{data} twice in {place:?}");
            indices.entry(place).or_default().insert(index);
        }
        for (place, indices) in indices {
            let contiguous = indices.iter().copied().eq(0..u32::try_from(indices.len())?);
            ensure!(contiguous, "indices {indices:?} of {place:?}");
        }
        Ok(contents)
    }

    /// Wants both tables to hold the same; names what does not.
    pub fn ensure_same(&self, fresh: &Self) -> Result<()> {
        let mut differences = Vec::new();
        for element in &self.elements {
            if !fresh.elements.contains(element) {
                differences.push(format!("only here: {element:?}"));
            }
        }
        for element in &fresh.elements {
            if !self.elements.contains(element) {
                differences.push(format!("only fresh: {element:?}"));
            }
        }
        let places: BTreeSet<_> = self.endpoints.keys().chain(fresh.endpoints.keys()).collect();
        for place in places {
            let (here, there) = (self.endpoints.get(place), fresh.endpoints.get(place));
            if here != there {
                differences.push(format!("{place:?} has {here:?}, fresh {there:?}"));
            }
        }
        let (count, first) = (differences.len(), differences.iter().take(SHOWN));
        let first: Vec<_> = first.map(String::as_str).collect();
        ensure!(count == 0, "{count} differences: {}", first.join("; "));
        Ok(())
    }
}
