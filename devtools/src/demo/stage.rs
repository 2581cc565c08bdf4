//! The state of the demo: a copy of the manifests, the network around them, and the processes on
//! it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use kplane_model::{Family, NodeFacts, ServiceName};
use kplane_proto::v1::Fleet;
use kplane_rig::netns::NetNs;
use serde_json::Value;
use tempfile::TempDir;

use super::cast::Cast;
use super::ledger::{Check, Ledger};
use super::manifests::Manifests;
use super::objects::Objects;
use super::programs::Programs;
use super::screen::{Screen, Tone};
use super::status::{Landing, Status};
use super::world::{CONTROL, World};

/// The screen, the results so far, and the current step.
#[derive(Debug)]
pub(crate) struct Show {
    /// The screen.
    pub(crate) screen: Screen,
    /// The results of checks.
    pub(crate) ledger: Ledger,
    /// Number of the current step.
    step: usize,
    /// Number of all steps.
    steps: usize,
}

/// Everything that exists between the first step and the last.
#[derive(Debug)]
pub(crate) struct Stage {
    /// The processes. They come first: fields drop in order, and the processes live in namespaces.
    pub(crate) cast: Cast,
    /// The control plane's status.
    pub(crate) status: Status,
    /// The network.
    pub(crate) world: World,
    /// The objects in the manifests at the moment.
    pub(crate) objects: Objects,
    manifests: Manifests,
    families: Vec<Family>,
    /// The Service whose endpoints are replaced, once it has been chosen.
    pub(crate) star: Option<ServiceName>,
    folder: TempDir,
}

impl Show {
    /// Starts before the first of `steps`.
    pub(crate) fn new(screen: Screen, steps: usize) -> Self {
        Self {
            screen,
            ledger: Ledger::default(),
            step: 0,
            steps,
        }
    }

    /// Begins the next step.
    pub(crate) fn heading(&mut self, title: &str) {
        self.step += 1;
        let number = format!("[{}/{}]", self.step, self.steps);
        let screen = &self.screen;
        screen.gap();
        let (number, title) = (
            screen.paint(Tone::Faint, &number),
            screen.paint(Tone::Strong, title),
        );
        screen.line(format!("{number} {title}"));
        screen.flush();
    }

    /// Begins the last step, even if steps have been left out.
    pub(crate) fn last_heading(&mut self, title: &str) {
        self.step = self.steps - 1;
        self.heading(title);
    }

    /// Records a check.
    pub(crate) fn check(
        &mut self,
        (what, expected): (&str, &str),
        seen: impl Into<String>,
        wrong: Vec<String>,
        began: Instant,
    ) {
        let check = Check {
            what: what.to_owned(),
            expected: expected.to_owned(),
            seen: seen.into(),
            wrong,
            took: began.elapsed(),
        };
        self.ledger.add(&self.screen, check);
    }
}

impl Stage {
    /// Builds the network, without processes.
    pub(crate) fn build(programs: Programs, manifests: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("kplane-demo-").tempdir();
        let folder = folder.context("create a folder for logs and manifests")?;
        let manifests = Manifests::copy(manifests, folder.path().join("manifests"))?;
        let families = families();
        let objects = Objects::read(manifests.objects(), &families)?;
        let world = World::build(&objects).context("build the network")?;
        let cast = Cast::new(programs, folder.path().join("logs"))?;
        let status = Status::connect(world.topology.host(CONTROL)?.ns())?;
        Ok(Self {
            cast,
            status,
            world,
            objects,
            manifests,
            families,
            star: None,
            folder,
        })
    }

    /// Starts all processes.
    pub(crate) fn start(&mut self) -> Result<()> {
        let control = self.world.topology.host(CONTROL)?;
        let address = control
            .ips()
            .first()
            .context("the control host has no address")?;
        let cluster_cidrs = &self.world.cluster_cidrs;
        let folder = self.manifests.folder();
        self.cast
            .start_control_plane(control.ns(), folder, (*address, cluster_cidrs))?;
        let nodes: Vec<String> = self
            .objects
            .nodes
            .iter()
            .map(|n| n.name.to_string())
            .collect();
        nodes.iter().try_for_each(|node| self.start_agent(node))
    }

    /// Starts the agent of a node.
    pub(crate) fn start_agent(&mut self, node: &str) -> Result<()> {
        let ns = self.world.topology.node(node)?.ns().clone();
        self.cast.start_agent(node, &ns)
    }

    /// Waits until every kernel holds everything.
    pub(crate) fn wait_in_sync(&mut self) -> Result<Fleet> {
        self.status
            .wait_in_sync(&mut self.cast, self.objects.nodes.len())
    }

    /// Changes the manifests and waits until every kernel holds the change.
    pub(crate) fn edit(&mut self, change: impl Fn(&mut Value) -> bool) -> Result<Vec<Landing>> {
        let fleet = self.status.fleet()?;
        let revision = fleet
            .control_plane
            .context("a fleet without a control plane")?
            .revision;
        let written = self.manifests.edit(change)?;
        self.status.wait_landed(&mut self.cast, written, revision)
    }

    /// Reads the manifests again, after an edit.
    pub(crate) fn reread(&mut self) -> Result<()> {
        self.objects = Objects::read(self.manifests.objects(), &self.families)?;
        Ok(())
    }

    /// Returns the control plane's namespace.
    pub(crate) fn control(&self) -> Result<&NetNs> {
        Ok(self.world.topology.host(CONTROL)?.ns())
    }

    /// Returns a node.
    pub(crate) fn node(&self, name: &str) -> Result<&NodeFacts> {
        let found = self.objects.nodes.iter().find(|node| *node.name == *name);
        found.ok_or_else(|| anyhow!("no Node {name}"))
    }

    /// Returns the folder of the manifests that the control plane watches.
    pub(crate) fn manifests(&self) -> &Path {
        self.manifests.folder()
    }

    /// Ends everything at once; `keep` leaves the folder and returns its path.
    pub(crate) fn strike(self, keep: bool) -> Option<PathBuf> {
        let Self {
            cast,
            status,
            world,
            folder,
            ..
        } = self;
        drop(cast);
        drop(status);
        drop(world);
        keep.then(|| folder.keep())
    }
}

/// Returns the families that this machine has.
fn families() -> Vec<Family> {
    let v6 = Path::new("/proc/net/if_inet6").exists();
    if v6 {
        Family::ALL.to_vec()
    } else {
        vec![Family::V4]
    }
}
