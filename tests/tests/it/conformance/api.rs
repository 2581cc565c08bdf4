//! The API server that both proxies read, on a small network with a link to every node.

use std::cell::Cell;
use std::fs::File;
use std::iter;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, Result, anyhow};
use kplane_tests::cluster::api::key_of;
use kplane_tests::cluster::{self, Cluster, Options};
use kplane_tests::link::Netlink;
use kplane_tests::netns::NetNs;
use serde_json::Value;

/// Address of the API server; nodes are beside it.
const SERVER: [u8; 4] = [192, 168, 100, 1];
const PREFIX_LEN: u8 = 24;
const BRIDGE: &str = "management";
/// A node's link to it.
const LINK: &str = "mgmt0";

/// Lists of objects that are written at a time.
const WRITERS: usize = 8;

/// A running API server; dropped = gone, with all it stored.
pub(crate) struct Api {
    cluster: Cluster,
    netlink: Netlink,
    /// Number of nodes connected so far.
    links: Cell<u8>,
}

impl Api {
    /// Starts it and waits until it is ready.
    pub(crate) fn start() -> Result<Self> {
        let ns = NetNs::new("api")?;
        let netlink = ns.netlink()?;
        netlink.bridge(BRIDGE)?;
        netlink.add_address(BRIDGE, IpAddr::from(SERVER), PREFIX_LEN)?;
        let cluster = Cluster::start(&Options {
            at: Some((ns, IpAddr::from(SERVER))),
            service_ranges: "10.96.0.0/16,fd96::/64".to_owned(),
            ..Options::default()
        })?;
        Ok(Self {
            cluster,
            netlink,
            links: Cell::new(0),
        })
    }

    /// The cluster behind it.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Gives a node a link to the API server.
    pub(crate) fn connect(&self, node: &NetNs) -> Result<()> {
        let number = self.links.get() + 1;
        self.links.set(number);
        let near = format!("node{number}");
        self.netlink.veth(&near, node, LINK)?;
        self.netlink.attach(&near, BRIDGE)?;
        let inside = node.netlink()?;
        inside.up(LINK)?;
        let [a, b, c, server] = SERVER;
        let ip = IpAddr::from([a, b, c, server + number]);
        inside.add_address(LINK, ip, PREFIX_LEN)
    }

    /// Creates or changes objects, their status included, one after the other.
    pub(crate) fn apply(&self, objects: &[Value]) -> Result<()> {
        write(self.cluster.api(), objects)
    }

    /// Creates or changes lists of objects, several lists at a time.
    pub(crate) fn apply_lists(&self, lists: &[&[Value]]) -> Result<()> {
        let api = self.cluster.api();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut mine = iter::from_fn(|| lists.get(next.fetch_add(1, Ordering::Relaxed)));
            mine.try_for_each(|objects| write(api, objects))
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..WRITERS).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| {
                let written = thread.join();
                written.map_err(|_| anyhow!("a thread panicked"))?
            })
        })
    }

    /// Deletes objects.
    pub(crate) fn delete(&self, objects: &[Value]) -> Result<()> {
        for object in objects {
            let kind = object["kind"].as_str().context("an object without kind")?;
            self.cluster.api().delete(kind, &key_of(object)?)?;
        }
        Ok(())
    }
}

fn write(api: &cluster::Api, objects: &[Value]) -> Result<()> {
    for object in objects {
        let mut object = object.clone();
        without_nulls(&mut object);
        let status = object["status"].take();
        without_nulls(&mut object);
        api.apply(&object)?;
        if !status.is_null() {
            let kind = object["kind"].as_str().context("an object without kind")?;
            api.patch_status(kind, &key_of(&object)?, &status)?;
        }
    }
    Ok(())
}

/// A new file for what a program says.
pub(crate) fn log(folder: &Path, name: &str) -> Result<(PathBuf, File)> {
    let path = folder.join(format!("{name}.log"));
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    Ok((path, file))
}

/// In a manifest null is the same as nothing; as a claim of a field it is not.
fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(without_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        _ => {}
    }
}
