//! Interprets the elements and groups of a table that was found in the kernel.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use kplane_model::{Cidr, EndpointAddr};

use super::affinity::Group;
use super::affinity_id::AffinityId;
use super::element::{Data, Destination, Element, Key};
use super::frontend::{Entry, Sticky, elements, place_of};
use super::schema::{Balancer, Set};
use super::table::Table;
use super::word::Word;
use crate::plan::{FrontendAddr, NodePlan};

/// Returns the table that holds exactly these elements. Elements that belong to no valid entry become strays,
/// which the next complete change deletes.
pub(super) fn adopt(groups: &[Group], found: &[Element]) -> Table {
    let mut frontends: HashMap<FrontendAddr, BTreeSet<Element>> = HashMap::new();
    let mut cluster_ips: BTreeSet<IpAddr> = BTreeSet::new();
    let mut hairpin: BTreeSet<Destination> = BTreeSet::new();
    let mut node = NodePlan::default();
    let mut draws = BTreeSet::new();
    let mut strays = Vec::new();
    for element in found {
        match (element.key, place_of(element.key)) {
            (_, Some(at)) => drop(frontends.entry(at).or_default().insert(*element)),
            (Key::Number(_), None) => drop(draws.insert(*element)),
            (Key::Ip(ip), None) => drop(cluster_ips.insert(ip)),
            (Key::Hairpin(endpoint), None) => drop(hairpin.insert(endpoint)),
            (Key::Range(range), None) => match element.set {
                Set::PodCidrs => node.pod_sources.push(range),
                Set::UnmasqueradedSources => node.unmasqueraded_sources.push(range),
                Set::NodeportIps => node.nodeport_ips.push(range),
                Set::ServiceCidrs => node.service_cidrs.push(range),
                _ => strays.push(*element),
            },
            (_, None) => strays.push(*element),
        }
    }
    let is_lone =
        |range: &mut Cidr| range.first() == range.last() && cluster_ips.contains(&range.first());
    let lone_ips = node.service_cidrs.extract_if(.., is_lone).map(Cidr::first).collect();
    let mut entries = Vec::with_capacity(frontends.len());
    for (at, found) in frontends {
        let entry = interpret(&found);
        let made: BTreeSet<Element> = elements(at, &entry).into_iter().collect();
        if made == found {
            entries.push((at, entry));
        } else {
            strays.extend(found);
        }
    }
    let mut table = Table::adopt(entries.into_iter(), cluster_ips, hairpin, node, strays);
    table.draws = draws;
    table.lone_ips = lone_ips;
    table.adopt_groups(groups);
    table
}

/// Returns whether some of these elements belong to Services.
pub(super) fn serves(found: &[Element]) -> bool {
    found.iter().any(|element| place_of(element.key).is_some())
}

/// Returns the entry for which a frontend's elements most likely stand.
fn interpret(found: &BTreeSet<Element>) -> Entry {
    let word = found.iter().find_map(|element| match (element.set, element.data) {
        (Set::Places | Set::Nodeports, Some(Data::Number(word))) => Some(Word(word)),
        _ => None,
    });
    let has = |bit| word.is_some_and(|word| word.has(bit));
    let inside = slots(found, [Balancer::InsideService, Balancer::InsideNodeport]);
    Entry {
        slots: slots(found, [Balancer::Service, Balancer::Nodeport]),
        inside: (!inside.is_empty()).then_some(inside),
        masquerade: has(Word::MASQUERADE),
        cluster_ip: !has(Word::EXTERNAL) || has(Word::CLUSTER_IP),
        unserved: word.and_then(Word::unserved),
        ranges: found.iter().filter_map(range).collect(),
        sticky: sticky(found),
    }
}

fn sticky(found: &BTreeSet<Element>) -> Option<Sticky> {
    let group = found.iter().find_map(|element| match element.data {
        Some(Data::Keep(id) | Data::Split(id)) => Some(id),
        _ => None,
    })?;
    let picked_inside = |element: &Element| -> Option<AffinityId> {
        match (element.set, element.data) {
            (
                Set::Sticky(Balancer::InsideService | Balancer::InsideNodeport),
                Some(Data::Pick(id)),
            ) => Some(id),
            _ => None,
        }
    };
    let inside = found.iter().find_map(picked_inside);
    Some(Sticky { group, inside })
}

fn slots(found: &BTreeSet<Element>, balancers: [Balancer; 2]) -> Vec<EndpointAddr> {
    let sets = balancers.map(Set::Endpoints);
    let of_sets = found.iter().filter(|element| sets.contains(&element.set));
    let by_index: BTreeMap<u32, EndpointAddr> = of_sets
        .filter_map(|element| match element.key {
            Key::ServiceSlot(_, index) | Key::NodePortSlot(_, index) => {
                Some((index, element.data?.endpoint()?))
            }
            _ => None,
        })
        .collect();
    by_index.into_values().collect()
}

fn range(element: &Element) -> Option<Cidr> {
    match element.key {
        Key::FirewallSource(_, range) => Some(range),
        _ => None,
    }
}
