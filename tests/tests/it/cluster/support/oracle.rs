//! What a kernel must hold, worked out by a fresh start from what the API lists.
//!
//! A standalone agent in a namespace of its own reads the objects as a file: nothing of how the
//! control planes under test read the API is in it.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;
use kplane_tests::cluster::Api;
use kplane_tests::cluster::guard::{Guard, command};
use kplane_tests::netns::NetNs;
use kplane_tests::product::Product;
use kplane_tests::status::Status;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use kplane_tests::contents::Contents;

/// What a proxy reads.
const KINDS: [&str; 4] = ["Service", "EndpointSlice", "Node", "ServiceCIDR"];
/// A start from nothing, on a busy machine.
const START: Duration = Duration::from_secs(30);
/// Where a standalone agent serves its status.
const STATUS: &str = "127.0.0.1:7466";

/// Both tables of a node.
#[derive(Debug)]
pub(crate) struct Tables([Contents; 2]);

impl Tables {
    /// Reads them.
    pub(crate) fn read(ns: &NetNs) -> Result<Self> {
        let [v4, v6] = Family::ALL.map(|family| Contents::read(ns, family));
        Ok(Self([v4?, v6?]))
    }

    /// The table of a family.
    pub(crate) fn of(&self, family: Family) -> &Contents {
        match family {
            Family::V4 => &self.0[0],
            Family::V6 => &self.0[1],
        }
    }

    /// Wants both to be the same; says what is not.
    pub(crate) fn ensure_same(&self, expected: &Self) -> Result<()> {
        for family in Family::ALL {
            let (is, should) = (self.of(family), expected.of(family));
            is.ensure_same(should).with_context(|| family.to_string())?;
        }
        Ok(())
    }
}

/// Everything that a proxy reads, as one `List`.
pub(crate) fn listing(api: &Api) -> Result<Value> {
    let mut items = Vec::new();
    for kind in KINDS {
        items.extend(api.list(kind, None)?);
    }
    Ok(json!({ "apiVersion": "v1", "kind": "List", "items": items }))
}

/// The tables that a node must have with these objects.
pub(crate) fn expected(
    product: &Product,
    folder: &Path,
    (node, flags): (&str, &[String]),
    objects: &Value,
) -> Result<Tables> {
    let ns = NetNs::new("oracle")?;
    let file = folder.join("objects.json");
    fs::write(&file, serde_json::to_vec(objects)?)?;
    let guard = Guard::new(&ns)?;
    let mut agent = command(&product.node_agent);
    agent
        .args([
            "--standalone",
            "--status-bind-address",
            STATUS,
            "--cache-dir=",
        ])
        .arg("--manifests")
        .arg(&file)
        .arg(format!("--node-name={node}"))
        .args(flags)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(folder.join("oracle.log"))?);
    let _agent = guard.start(agent)?;
    let status = Status::at(&ns, STATUS.parse()?)?;
    eventually(START, "a fresh agent has applied everything", || {
        let fleet = status.fleet()?;
        let plane = fleet.control_plane.context("no control plane")?;
        ensure!(plane.synced, "not synced");
        let own = fleet
            .nodes
            .iter()
            .find(|status| status.name == node)
            .context("the agent is not connected")?;
        let report = own.report.as_ref().context("no report")?;
        ensure!(report.applied_revision >= own.wanted_revision, "{own:?}");
        ensure!(report.applied_revision >= 1, "{own:?}");
        Ok::<_, anyhow::Error>(())
    })?;
    Tables::read(&ns)
}
