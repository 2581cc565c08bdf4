//! What each node must have: kube-proxy's rules once more, in plain words. Nothing here is the product's.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::{IpAddr, SocketAddr};

use kplane_dataplane::plan::{FrontendAddr, ServicePlan, Unserved};
use kplane_model::{EndpointAddr, Family, Protocol, ServiceKey};

use crate::truth::{
    Condition, Id, Object, Objects, Pod, SLICES, Service, is_followed, node_port, pod_ip,
    service_ip, slice_family, slice_of,
};

/// A port of a Service in one family: the Service's number, and the port's.
pub(crate) type Key = (u8, u8);

/// One family of a node's kernel.
pub(crate) type Side = BTreeMap<Key, Entry>;

/// A ServicePort in the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Entry {
    /// Sorted.
    pub(crate) places: Vec<(FrontendAddr, Place)>,
    /// The endpoints on the node, sorted.
    pub(crate) here: Vec<SocketAddr>,
    /// Endpoints on dead nodes to which no place leads, sorted.
    pub(crate) dead: Vec<SocketAddr>,
}

/// The nodes that a replica finds out of reach, by their bits.
#[derive(Clone, Debug, Default)]
pub(crate) struct Marks {
    suspected: u8,
    dead: u8,
    /// Addresses that only pods on dead nodes have had since these are dead.
    addresses: BTreeSet<IpAddr>,
    /// Pods that are being deleted, and whether only slices name them by now.
    ending: BTreeMap<(u8, u8), bool>,
}

impl Marks {
    pub(crate) fn change(&mut self, objects: &Objects, suspected: u8, dead: u8) {
        self.suspected = suspected;
        if self.dead == suspected & dead {
            return;
        }
        self.dead = suspected & dead;
        self.addresses.clear();
        let on_dead = |pod: &Pod| self.dead >> pod.node & 1 == 1;
        for (id, (_, object)) in objects {
            if let (Id::Slice(service, number), Object::Slice(pods)) = (id, &**object) {
                let family = slice_family(*number);
                let dead = pods.iter().filter(|pod| on_dead(pod));
                self.addresses.extend(dead.map(|pod| pod_ip(*service, pod.number, family)));
            }
        }
    }

    /// A pod is being deleted, or is gone, or a slice changed: those that are gone end with their slice.
    pub(crate) fn end(&mut self, objects: &Objects, id: Id) {
        if let Id::Ending(service, pod) = id {
            self.ending.insert((service, pod), !objects.contains_key(&id));
        }
        self.ending.retain(|(service, pod), is_gone| {
            let slice = objects.get(&slice_of(*service, *pod)).map(|(_, object)| &**object);
            let is_it = |of: &Pod| of.number == *pod;
            !*is_gone || matches!(slice, Some(Object::Slice(pods)) if pods.iter().any(is_it))
        });
    }

    /// A slice is written: what is elsewhere now does not come back as dead.
    pub(crate) fn note(&mut self, id: Id, object: &Object) {
        if let (Id::Slice(service, number), Object::Slice(pods)) = (id, object) {
            for pod in pods.iter().filter(|pod| self.dead >> pod.node & 1 == 0) {
                self.addresses.remove(&pod_ip(service, pod.number, slice_family(number)));
            }
        }
    }

    /// Returns a pod as the replica takes it.
    fn seen(&self, service: u8, pod: &Pod) -> Pod {
        let ends = is_followed(pod.number) && self.ending.contains_key(&(service, pod.number));
        let is_suspected = self.suspected >> pod.node & 1 == 1;
        let is_lost = (is_suspected || ends) && pod.condition == Condition::Ready;
        Pod {
            condition: if is_lost { Condition::Draining } else { pod.condition },
            ..*pod
        }
    }
}

/// What happens to packets that arrive at a place.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// Sorted.
    pub(crate) endpoints: Vec<SocketAddr>,
    /// Endpoints for clients inside the cluster, where these differ.
    inside: Option<Vec<SocketAddr>>,
    unserved: Option<Unserved>,
}

impl Place {
    /// Returns whether packets may reach an endpoint.
    pub(crate) fn leads_to(&self, endpoint: &SocketAddr) -> bool {
        [Some(&self.endpoints), self.inside.as_ref()]
            .into_iter()
            .flatten()
            .any(|list| list.contains(endpoint))
    }
}

impl Entry {
    /// Returns whether packets reach an endpoint somewhere.
    pub(crate) fn serves(&self) -> bool {
        self.places.iter().any(|(_, place)| {
            !place.endpoints.is_empty() || place.inside.as_ref().is_some_and(|i| !i.is_empty())
        })
    }

    /// Returns whether the endpoints are those of another entry, or some of them. A place may have gone, and a policy may
    /// lead to the endpoints on the node now.
    pub(crate) fn keeps_endpoints(&self, other: &Self) -> bool {
        let places = |entry: &Self| -> BTreeSet<SocketAddr> {
            entry
                .places
                .iter()
                .flat_map(|(_, place)| place.endpoints.iter().chain(place.inside.iter().flatten()))
                .copied()
                .collect()
        };
        let mut all = places(other);
        all.extend(&other.here);
        places(self).is_subset(&all)
    }
}

/// Returns the fingerprint of a family's content.
pub(crate) fn hash(side: &Side) -> u64 {
    let mut hasher = DefaultHasher::new();
    side.hash(&mut hasher);
    hasher.finish()
}

/// Returns the name of a ServicePort as a pair of numbers.
pub(crate) fn key(key: &ServiceKey) -> Key {
    let number = key.service.name.trim_start_matches('s');
    let port = u8::from(&*key.port_name == "b");
    (number.parse().unwrap_or(u8::MAX), port)
}

/// Returns a plan of the agent as an entry.
pub(crate) fn planned(plan: &ServicePlan) -> Entry {
    let all = |endpoints: &[EndpointAddr]| {
        let mut all: Vec<_> = endpoints.iter().map(|e| SocketAddr::new(e.ip, e.port)).collect();
        all.sort_unstable();
        all
    };
    let mut places: Vec<_> = plan
        .frontends
        .iter()
        .map(|frontend| {
            let place = Place {
                endpoints: all(&frontend.endpoints),
                inside: frontend.inside.as_deref().map(all),
                unserved: frontend.unserved,
            };
            (frontend.at, place)
        })
        .collect();
    places.sort_unstable_by_key(|(at, _)| *at);
    Entry {
        here: all(&plan.local),
        dead: unled(all(&plan.dead), &places),
        places,
    }
}

/// Returns the endpoints to which no place leads.
fn unled(mut endpoints: Vec<SocketAddr>, places: &[(FrontendAddr, Place)]) -> Vec<SocketAddr> {
    endpoints.retain(|endpoint| !places.iter().any(|(_, place)| place.leads_to(endpoint)));
    endpoints
}

/// Returns what a node must have in a family, if these are all objects, and some nodes are out of reach.
pub(crate) fn expected(objects: &Objects, marks: &Marks, node: u8, family: Family) -> Side {
    let zone = match objects.get(&Id::Node(node)).map(|(_, object)| &**object) {
        Some(Object::Node { zone, .. }) => Some(*zone),
        _ => None,
    };
    let mut side = Side::new();
    for (id, (_, object)) in objects {
        let (Id::Service(number), Object::Service(service)) = (id, &**object) else {
            continue;
        };
        if !service.families().contains(&family) {
            continue;
        }
        let pods = pods_of(objects, *number, family);
        let pods: Vec<Pod> = pods.iter().map(|pod| marks.seen(*number, pod)).collect();
        for index in 0..service.ports().len() {
            let port = Port {
                number: *number,
                index,
                service: *service,
                family,
            };
            let entry = port.entry(&pods, marks, node, zone);
            side.insert((*number, u8::from(index > 0)), entry);
        }
    }
    side
}

fn pods_of(objects: &Objects, service: u8, family: Family) -> Vec<Pod> {
    (0..SLICES)
        .filter(|number| slice_family(*number) == family)
        .filter_map(|number| objects.get(&Id::Slice(service, number)))
        .flat_map(|(_, object)| match &**object {
            Object::Slice(pods) => pods.clone(),
            _ => Vec::new(),
        })
        .collect()
}

/// A port of a Service.
struct Port {
    number: u8,
    index: usize,
    service: Service,
    family: Family,
}

impl Port {
    fn entry(&self, pods: &[Pod], marks: &Marks, node: u8, zone: Option<u8>) -> Entry {
        let usable = |pod: &&Pod| pod.condition != Condition::Starting;
        let here: Vec<Pod> =
            pods.iter().filter(usable).filter(|pod| pod.node == node).copied().collect();
        let cluster = self.addresses(&cluster(pods, zone));
        let local = self.addresses(&preferred(&here));
        let has_any = pods.iter().any(|pod| usable(&pod));
        let place = |is_local: bool, inside: bool| {
            let endpoints = if is_local { local.clone() } else { cluster.clone() };
            let unserved = match (endpoints.is_empty(), has_any) {
                (false, _) => None,
                (true, true) => Some(Unserved::Drop),
                (true, false) => Some(Unserved::Reject),
            };
            Place {
                endpoints,
                inside: (is_local && inside).then(|| cluster.clone()),
                unserved,
            }
        };
        let (_, number, _) = self.service.ports()[self.index];
        let at = FrontendAddr::Address {
            ip: service_ip(self.number, self.family),
            protocol: Protocol::Tcp,
            port: number,
        };
        let mut places = vec![(at, place(self.service.local[0], false))];
        if self.service.node_ports {
            let at = FrontendAddr::NodePort {
                protocol: Protocol::Tcp,
                port: node_port(self.number, self.index),
            };
            places.push((at, place(self.service.local[1], true)));
        }
        let is_dead = |pod: &&Pod| {
            let ip = pod_ip(self.number, pod.number, self.family);
            marks.dead >> pod.node & 1 == 1 && marks.addresses.contains(&ip) && !here.contains(pod)
        };
        let dead: Vec<Pod> = pods.iter().filter(is_dead).copied().collect();
        Entry {
            dead: unled(self.addresses(&dead), &places),
            here: self.addresses(&here),
            places,
        }
    }

    fn addresses(&self, pods: &[Pod]) -> Vec<SocketAddr> {
        let (_, _, target) = self.service.ports()[self.index];
        let ip = |pod: &Pod| pod_ip(self.number, pod.number, self.family);
        let mut all: Vec<_> = pods.iter().map(|pod| SocketAddr::new(ip(pod), target)).collect();
        all.sort_unstable();
        all
    }
}

/// Returns the ready pods, or those that drain if none is ready.
fn preferred(pods: &[Pod]) -> Vec<Pod> {
    let of = |condition| {
        pods.iter()
            .filter(move |pod| pod.condition == condition)
            .copied()
            .collect::<Vec<_>>()
    };
    let ready = of(Condition::Ready);
    if ready.is_empty() { of(Condition::Draining) } else { ready }
}

/// Returns the pods that a node of a zone uses. Hints count if all ready pods have one, and one of them is for the zone.
fn cluster(pods: &[Pod], zone: Option<u8>) -> Vec<Pod> {
    let pods = preferred(pods);
    let ready = pods.iter().all(|pod| pod.condition == Condition::Ready);
    let hinted = ready && pods.iter().all(|pod| pod.zone.is_some());
    let ours: Vec<Pod> =
        pods.iter().filter(|pod| zone.is_some() && pod.zone == zone).copied().collect();
    if hinted && !ours.is_empty() { ours } else { pods }
}
