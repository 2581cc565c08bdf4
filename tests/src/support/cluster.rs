//! The whole way from Kubernetes objects to the kernel in one process: index, selection and
//! publishing of the control plane, then the engine of each node. Only gRPC is left out.

use anyhow::{Context as _, Result, anyhow, ensure};
use kp_nodeagent::cache::{Cache, MemoryFile};
use kp_nodeagent::denials::Denials;
use kp_nodeagent::desired::Position;
use kp_nodeagent::engine::{CheckpointSettings, Engine};
use kp_nodeagent::report::{Failure, Report};
use kplane_dataplane::backend::{self, Inspection, Settings};
use kplane_dataplane::plan::NodeSettings;
use kplane_desired_state::admission::{Admission, Enforce};
use kplane_desired_state::index::Index;
use kplane_desired_state::k8s::{Kind, Object, ObjectId};
use kplane_desired_state::publish::{Cursor, Store};
use kplane_desired_state::source::{Event, Located};
use kplane_model::{Family, Issue, ServiceName};
use kplane_rig::cluster::objects;
use kplane_rig::netns::NetNs;
use kplane_rig::wait::DEADLINE;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use super::service::{node_ip, node_name};
use super::under_test::UnderTest;
use super::world::{NODES, SERVICE_RANGES, Setup, World, pod_cidrs};
use crate::plane::{EPOCH, collect, engine, happen, recalling};

/// A control plane and the agents of all nodes of a world.
pub struct Cluster {
    index: Index,
    store: Store,
    kind: backend::Kind,
    members: Vec<Member>,
    runtime: Runtime,
}

/// An agent, and what the control plane knows of it.
struct Member {
    name: String,
    ns: NetNs,
    engine: Engine,
    cursor: Cursor,
    /// The agent's cache file.
    memory: MemoryFile,
}

impl Member {
    /// How its next process remembers what it serves.
    fn restore(&self) -> CheckpointSettings {
        let cache = Cache::in_memory(self.memory.clone(), self.name.as_str().into());
        CheckpointSettings {
            cache: Some(cache),
            ..CheckpointSettings::default()
        }
    }
}

impl Cluster {
    /// Agents on all nodes of a world without agents; Node objects and ServiceCIDRs, no Services.
    pub fn open(world: &World, setup: Setup) -> Result<Self> {
        Self::begin(world, setup, Index::default(), &Kind::ALL)
    }

    /// The same, with nodes that enforce NetworkPolicies, before the control plane has read these, Pods and Namespaces.
    pub fn with_policies_unread(world: &World, setup: Setup) -> Result<Self> {
        let index = Index::new(Admission {
            network_policies: Some(Enforce::On),
            ..Admission::default()
        });
        Self::begin(world, setup, index, &Kind::ALL)
    }

    /// The control plane reads policies, Pods and Namespaces, of which there are none.
    pub fn read_policies(&mut self) -> Result<()> {
        let kinds = Kind::WITH_POLICIES;
        let kinds = kinds.iter().filter(|kind| !Kind::ALL.contains(kind));
        let events = kinds.flat_map(|kind| [Event::Init(*kind), Event::InitDone(*kind)]);
        self.change(events.collect())
    }

    fn begin(world: &World, setup: Setup, index: Index, kinds: &[Kind]) -> Result<Self> {
        let kind = UnderTest::current()?.kind();
        let (settings, backend) = (&setup.settings()?, &setup.backend_settings());
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let member = |number| {
            let ns = world.node(number)?;
            Ok(Member {
                name: node_name(number),
                ns: ns.clone(),
                engine: runtime.block_on(engine(
                    kind,
                    ns.clone(),
                    settings.clone(),
                    backend.clone(),
                ))?,
                cursor: Cursor::at(0),
                memory: MemoryFile::default(),
            })
        };
        let members = (1..=NODES).map(member).collect::<Result<_>>()?;
        let mut cluster = Self {
            index,
            store: Store::new(EPOCH),
            kind,
            members,
            runtime,
        };
        let mut events: Vec<Event> = kinds.iter().copied().map(Event::Init).collect();
        for object in (1..=NODES).map(node).chain([service_cidr(&SERVICE_RANGES)]) {
            events.push(Event::InitApply(Box::new(located(&object)?)));
        }
        events.extend(kinds.iter().copied().map(Event::InitDone));
        cluster.change(events)?;
        Ok(cluster)
    }

    /// Says what changed, and waits until the kernels of all nodes hold it.
    pub fn change(&mut self, events: Vec<Event>) -> Result<()> {
        self.offer(events)?;
        self.settle()
    }

    /// Applies objects, given as they are written in manifests.
    pub fn apply(&mut self, objects: &[Value]) -> Result<()> {
        self.change(objects.iter().map(apply).collect::<Result<_>>()?)
    }

    /// Says what changed; the engines may still be at work when this returns.
    pub fn offer(&mut self, events: Vec<Event>) -> Result<()> {
        happen(&mut self.index, &self.store, events);
        self.send()
    }

    /// Sends every agent what it lacks.
    fn send(&mut self) -> Result<()> {
        for member in &mut self.members {
            let (update, _) = collect(&self.store, &member.name, &mut member.cursor)?;
            self.runtime.block_on(member.engine.submit(update))??;
        }
        Ok(())
    }

    /// Waits until the kernels of all nodes hold everything that was said.
    pub fn settle(&self) -> Result<()> {
        let wanted = Position {
            epoch: EPOCH,
            revision: self.store.head().borrow().revision,
        };
        for member in &self.members {
            let mut reports = member.engine.reports();
            let applied = |report: &Report| report.applied == Some(wanted);
            let settled = self.runtime.block_on(async {
                let settled = tokio::time::timeout(DEADLINE, reports.wait_for(applied)).await;
                settled.is_ok_and(|report| report.is_ok())
            });
            let report = member.engine.reports().borrow().clone();
            ensure!(settled, "{} does not get there: {report:?}", member.name);
        }
        Ok(())
    }

    /// The latest report of every agent.
    pub fn reports(&self) -> Vec<Report> {
        self.members
            .iter()
            .map(|member| member.engine.reports())
            .map(|report| report.borrow().clone())
            .collect()
    }

    /// What there is for a Service on a node, in backends with virtual servers.
    pub fn inspect(&self, number: u8, service: &ServiceName) -> Result<Inspection> {
        let member = self
            .members
            .get(usize::from(number) - 1)
            .with_context(|| format!("no node {number}"))?;
        let reported = self.runtime.block_on(member.engine.inspect(service.clone()))?;
        reported.context("its backend has no virtual servers")
    }

    /// The packets that policies deny on a node.
    pub fn denials(&self, number: u8) -> Result<Denials> {
        let member = self
            .members
            .get(usize::from(number) - 1)
            .with_context(|| format!("no node {number}"))?;
        Ok(member.engine.denials())
    }

    /// What is not in a kernel as desired, on any node.
    pub fn failures(&self) -> Vec<Failure> {
        self.members
            .iter()
            .map(|member| member.engine.reports())
            .map(|report| report.borrow().failures.clone())
            .collect::<Vec<_>>()
            .concat()
    }

    /// What is wrong with the objects.
    pub fn issues(&self) -> Vec<Issue> {
        self.index.issues()
    }

    /// New processes take the agents' places, with these settings.
    pub fn restart(&mut self, settings: &NodeSettings, backend: &Settings) -> Result<()> {
        for member in &mut self.members {
            let engine = engine(
                self.kind,
                member.ns.clone(),
                settings.clone(),
                backend.clone(),
            );
            member.engine = self.runtime.block_on(engine)?;
            member.cursor = Cursor::at(0);
        }
        self.send()?;
        self.settle()
    }

    /// The same, with processes that remember in a cache file what they serve. The first ones find none.
    pub fn restart_with_memory(&mut self, settings: &NodeSettings) -> Result<()> {
        let backend = Settings::default();
        for member in std::mem::take(&mut self.members) {
            let restore = member.restore();
            let mut reports = member.engine.reports();
            drop(member.engine);
            let next = self.runtime.block_on(async {
                // The file is written at the end.
                while reports.changed().await.is_ok() {}
                let (ns, settings) = (member.ns.clone(), settings.clone());
                recalling(self.kind, ns, settings, backend.clone(), restore).await
            });
            self.members.push(Member {
                engine: next?,
                cursor: Cursor::at(0),
                ..member
            });
        }
        self.send()?;
        self.settle()
    }
}

/// An object as it is written in a manifest is new or changed.
pub fn apply(object: &Value) -> Result<Event> {
    Ok(Event::Apply(Box::new(located(object)?)))
}

/// The same object is gone.
pub fn delete(object: &Value) -> Result<Event> {
    Ok(Event::Delete(id(object)?))
}

pub fn id(object: &Value) -> Result<ObjectId> {
    Ok(located(object)?.object.id())
}

fn located(value: &Value) -> Result<Located> {
    let copy = value.clone();
    let object = match value["kind"].as_str() {
        Some("Service") => serde_json::from_value(copy).map(Object::Service),
        Some("EndpointSlice") => serde_json::from_value(copy).map(Object::EndpointSlice),
        Some("Node") => serde_json::from_value(copy).map(Object::Node),
        Some("ServiceCIDR") => serde_json::from_value(copy).map(Object::ServiceCidr),
        Some("ClusterNetworkPolicy") => {
            serde_json::from_value(copy).map(Object::ClusterNetworkPolicy)
        }
        Some("NetworkPolicy") => serde_json::from_value(copy).map(Object::NetworkPolicy),
        Some("Namespace") => serde_json::from_value(copy).map(Object::Namespace),
        Some("Pod") => serde_json::from_value(copy).map(Object::Pod),
        other => return Err(anyhow!("kind {other:?}")),
    };
    Ok(Located {
        object: object.with_context(|| value.to_string())?,
        location: "test".into(),
    })
}

/// The zone of a node: each is in one of its own.
pub fn zone_name(number: u8) -> String {
    format!("zone-{number}")
}

/// A node's object, in a zone of its own.
pub fn node(number: u8) -> Value {
    node_in(number, &zone_name(number))
}

/// A node's object in a zone.
pub fn node_in(number: u8, zone: &str) -> Value {
    let mut node = objects::node(&node_name(number), &pod_cidrs(number), zone);
    node["status"] = objects::node_status(&Family::ALL.map(|family| node_ip(number, family)));
    node
}

/// The ranges that ClusterIPs come from.
pub fn service_cidr(cidrs: &[&str]) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"}, "spec": {"cidrs": cidrs},
    })
}
