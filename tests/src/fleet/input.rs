//! The objects of a fleet, in a folder of manifests or an API server that all control planes read, and their changes.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context as _, Result};
use kplane_rig::cluster::{self, Api};
use serde_json::{Value, json};

/// The namespace of all Services.
const NAMESPACE: &str = "fleet";
/// Number of requests to an API server under way at a time.
const WRITERS: usize = 8;
/// Maximum number of Services whose endpoints change, one after the other.
const CHANGING: u32 = 100;
/// Second byte of the first endpoint whose address says which change made it: 10.64.0.0 and following ones.
const STAMPED: u8 = 64;
/// Number of bits of such an address that count.
pub const STAMP_BITS: u32 = 22;

/// Returns the number of the change that made an endpoint; 0 = none.
pub fn stamp_of(endpoint: Ipv4Addr) -> u64 {
    let [_, second, _, _] = endpoint.octets();
    if second & 0xc0 != STAMPED {
        return 0;
    }
    u64::from(endpoint.to_bits() & ((1 << STAMP_BITS) - 1))
}

/// Returns the names of so many nodes.
pub fn names(agents: u32) -> impl Iterator<Item = String> {
    (0..agents).map(|number| format!("n{number}"))
}

/// Where objects are written.
#[derive(Debug)]
enum Place {
    /// A folder of manifests.
    Folder(PathBuf),
    /// A Kubernetes API server.
    Api(Api),
}

/// The objects of a fleet, and their changes.
#[derive(Debug)]
pub struct Input {
    place: Place,
    /// Number of the last change.
    last: u32,
    /// Number of Services that change.
    changing: u32,
}

impl Input {
    /// Writes the objects to a folder, which is made.
    pub(super) fn new(folder: &Path, nodes: u32, services: u32) -> Result<Self> {
        fs::create_dir(folder)?;
        let mut text = String::from("apiVersion: v1\nkind: List\nitems: []\n");
        for object in objects(nodes, services) {
            text += &format!("---\n{object}\n");
        }
        fs::write(folder.join("objects.yaml"), text)?;
        Self::begin(Place::Folder(folder.to_owned()), services)
    }

    /// Writes the objects to an API server.
    ///
    /// # Errors
    /// The server's error.
    pub fn at(api: &Api, nodes: u32, services: u32) -> Result<Self> {
        api.create(
            &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        )?;
        let objects = Vec::from_iter(objects(nodes, services));
        let share = objects.len().div_ceil(WRITERS);
        thread::scope(|scope| {
            let write = |some| move || write(api, some);
            let writers = objects.chunks(share).map(|some| scope.spawn(write(some)));
            Vec::from_iter(writers)
                .into_iter()
                .try_for_each(|writer| writer.join().ok().context("a writer panicked")?)
        })?;
        Self::begin(Place::Api(api.clone()), services)
    }

    fn begin(place: Place, services: u32) -> Result<Self> {
        let mut input = Self {
            place,
            last: 0,
            changing: changing(services),
        };
        for _ in 0..input.changing {
            input.change()?;
        }
        Ok(input)
    }

    /// Changes the endpoint of the next Service.
    ///
    /// # Errors
    /// The folder's error, or the server's.
    pub fn change(&mut self) -> Result<()> {
        let change = self.last + 1;
        let number = self.last % self.changing;
        let bits = Ipv4Addr::new(10, STAMPED, 0, 0).to_bits() | change;
        let slice = slice(number, &[Ipv4Addr::from_bits(bits)]);
        match &self.place {
            Place::Folder(folder) => {
                let new = folder.join("slice.new");
                fs::write(&new, slice.to_string())?;
                fs::rename(new, folder.join(format!("slice-{number}.yaml")))?;
            }
            Place::Api(api) if change <= self.changing => drop(api.create(&slice)?),
            Place::Api(api) => drop(api.replace(&slice)?),
        }
        self.last = change;
        Ok(())
    }

    /// Returns the number of the last change.
    pub(super) fn last(&self) -> u64 {
        self.last.into()
    }

    /// Returns the number of changes after which the same Service changes again.
    pub(super) fn changing(&self) -> u64 {
        self.changing.into()
    }
}

fn write(api: &Api, objects: &[Value]) -> Result<()> {
    objects.iter().try_for_each(|object| api.create(object).map(drop))
}

/// Returns the number of Services that change.
fn changing(services: u32) -> u32 {
    services.clamp(1, CHANGING)
}

/// Returns Services, EndpointSlices and Nodes: some Services lack the endpoint that changes, the others have two that stay.
pub fn objects(nodes: u32, services: u32) -> impl Iterator<Item = Value> {
    let stay = (changing(services)..services).map(|number| {
        let [_, _, high, low] = number.to_be_bytes();
        let ips = [[10, 245, high, low], [10, 246, high, low]].map(Ipv4Addr::from);
        slice(number, &ips)
    });
    let node = |name| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
    (0..services.max(1)).map(service).chain(stay).chain(names(nodes).map(node))
}

fn service(number: u32) -> Value {
    let [_, _, high, low] = number.to_be_bytes();
    let ip = Ipv4Addr::new(10, 97, high, low);
    let spec = json!({"clusterIP": ip, "ports": [{"name": "http", "port": 80}]});
    cluster::objects::service(NAMESPACE, &format!("s{number}"), spec)
}

/// Returns the EndpointSlice of a Service.
pub fn slice(number: u32, endpoints: &[Ipv4Addr]) -> Value {
    let endpoints = endpoints.iter().map(|ip| json!({"addresses": [ip]}));
    let service = format!("s{number}");
    cluster::objects::slice(NAMESPACE, &format!("{service}-1"), &service, endpoints)
}
