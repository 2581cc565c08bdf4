//! Whole control planes and agents in this process, each in a namespace of its own, and manifests for them.

use std::fmt::Display;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser as _;
use kp_controlplane::app as control_plane;
use kp_nodeagent::app;
use kp_nodeagent::config::{Config, Flags, Task};
use kp_nodeagent::report::Report;
use kplane_agents::hub::Hub;
use kplane_tests::cluster::objects;
use kplane_tests::netns::NetNs;
use kplane_tests::support::node_name;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::wait::{DEADLINE, eventually};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// The host of control planes, and their port.
pub(crate) const CONTROL: [&str; 2] = ["172.30.0.2", "fd30::2"];
pub(crate) const CONTROL_PORT: u16 = 7465;

/// A control plane; its connections break when it is dropped.
pub(crate) struct ControlPlane {
    runtime: Runtime,
    pub(crate) hub: Arc<Hub>,
}

impl ControlPlane {
    /// Starts with the manifests of a folder.
    pub(crate) fn start(ns: &NetNs, folder: &Path) -> Result<Self> {
        Self::start_with(ns, folder, |_| {})
    }

    /// Starts with a changed configuration.
    pub(crate) fn start_with(
        ns: &NetNs,
        folder: &Path,
        change: impl FnOnce(&mut control_plane::Config),
    ) -> Result<Self> {
        let origin = control_plane::Origin::Manifests(folder.to_owned());
        let mut config = control_plane::Config {
            agent_listen: Some(SocketAddr::from(([0, 0, 0, 0], CONTROL_PORT))),
            protection: control_plane::Protection::PlainText { exposed: true },
            ..control_plane::Config::new(origin)
        };
        change(&mut config);
        let _inside = ns.enter()?;
        let runtime = Runtime::new()?;
        let bound = runtime.block_on(control_plane::build(config))?;
        let hub = Arc::clone(bound.hub());
        runtime.spawn(bound.wait());
        Ok(Self { runtime, hub })
    }

    /// Ends as on SIGTERM, and takes so long for its farewell at most.
    pub(crate) fn end(self, drain: Duration) {
        self.runtime.block_on(self.hub.streams().draining.begin(drain));
    }
}

/// An agent.
pub(crate) struct NodeAgent {
    ns: NetNs,
    runtime: Runtime,
    pub(crate) bound: app::Bound,
}

impl NodeAgent {
    pub(crate) fn start(ns: &NetNs, config: &Config) -> Result<Self> {
        let _inside = ns.enter()?;
        let runtime = Runtime::new()?;
        let bound = runtime.block_on(app::build(config.clone()))?;
        Ok(Self {
            ns: ns.clone(),
            runtime,
            bound,
        })
    }

    pub(crate) fn report(&self) -> Report {
        self.bound.reports().borrow().clone()
    }

    /// Waits until the report is as it should be.
    pub(crate) fn reports(&self, wanted: impl Fn(&Report) -> bool) -> Result<()> {
        eventually(DEADLINE, "the report", || {
            let report = self.report();
            if wanted(&report) { Ok(()) } else { Err(format!("{report:?}")) }
        })
    }

    /// Ends as on SIGTERM.
    pub(crate) fn stop(self) -> Result<()> {
        let _inside = self.ns.enter()?;
        self.bound.shutdown_token().cancel();
        self.runtime.block_on(self.bound.wait())?;
        Ok(())
    }
}

/// Wants the kernel to hold all that the agent has.
pub(crate) fn applied(report: &Report) -> bool {
    report.held.is_some() && report.applied == report.held
}

/// Returns the configuration of the agent of a node, with these flags, the backend under test, and neither metrics nor
/// health checks.
pub(crate) fn agent_config(node: u8, cache: &Path, flags: &[&str]) -> Result<Config> {
    let node = format!("--node-name={}", node_name(node));
    let cache = format!("--cache-dir={}", cache.display());
    let own = ["--healthz-bind-address=", "--metrics-bind-address="];
    let line = ["kp-nodeagent", &node, &cache];
    let flags = Flags::try_parse_from(line.iter().chain(&own).chain(flags))?;
    match flags.check()?.task {
        Task::Run(config) => Ok(Config {
            backend: UnderTest::current()?.kind(),
            ..*config
        }),
        _ => bail!("not an agent"),
    }
}

/// Returns the configuration of an agent that knows these control planes.
pub(crate) fn connected(
    node: u8,
    cache: &Path,
    planes: impl IntoIterator<Item = String>,
) -> Result<Config> {
    let planes = planes
        .into_iter()
        .map(|at| format!("http://{at}"))
        .collect::<Vec<_>>()
        .join(",");
    let planes = format!("--control-plane={planes}");
    agent_config(node, cache, &["--insecure", &planes])
}

/// Returns the configuration of an agent with the control plane on its usual host.
pub(crate) fn usual(node: u8, cache: &Path) -> Result<Config> {
    connected(node, cache, [format!("{}:{CONTROL_PORT}", CONTROL[0])])
}

/// Returns the configuration of an agent that reads manifests itself.
pub(crate) fn standalone(
    node: u8,
    cache: &Path,
    manifests: &Path,
    flags: &[&str],
) -> Result<Config> {
    let manifests = format!("--manifests={}", manifests.display());
    let source = ["--standalone", "--status-bind-address=", &manifests];
    Ok(Config {
        inside: Some(kp_controlplane::app::inside),
        ..agent_config(node, cache, &[&source[..], flags].concat())?
    })
}

/// Writes objects into a file of a folder in one step.
pub(crate) fn write(folder: &Path, name: &str, objects: &[Value]) -> Result<()> {
    // JSON is YAML, and what begins with a separator is not taken for one object of JSON.
    let texts = objects.iter().map(|object| format!("---\n{object}\n"));
    let new = folder.join("new");
    fs::write(&new, texts.collect::<String>())?;
    Ok(fs::rename(new, folder.join(format!("{name}.yaml")))?)
}

/// Returns a Service at `10.96.7.NUMBER`, port 80 of TCP, with these Pods.
pub(crate) fn numbered(number: impl Display, pods: &[IpAddr]) -> Vec<Value> {
    let (name, ip) = (format!("s{number}"), format!("10.96.7.{number}"));
    let spec = json!({"clusterIP": ip, "clusterIPs": [ip]});
    let endpoints = pods
        .iter()
        .map(|pod| json!({"addresses": [pod], "conditions": {"ready": true}}));
    vec![
        objects::service("shop", &name, spec),
        objects::slice("shop", &format!("{name}-1"), &name, endpoints),
    ]
}

/// Returns where such a Service is reached.
pub(crate) fn place(number: u8) -> SocketAddr {
    SocketAddr::from(([10, 96, 7, number], 80))
}
