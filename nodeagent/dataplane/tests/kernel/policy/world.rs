//! Two nodes with Pods: policies are enforced on the first, which has a and b; the second has c and d.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kplane_dataplane::backend::nftables::PolicyTables;
use kplane_dataplane::conntrack::{AnyFlow, ConntrackCounts, Sweeper};
use kplane_dataplane::policy::{Enforcer, PolicyApplied, PolicyChange};
use kplane_model::{
    Block, Cidr, Family, GroupPart, LocalPod, NamedPort, Peer, PeerClass, PeerId, Peers, Policy,
    PolicyKey, PolicyName, PolicyObject, PolicyPort, PolicyRule, Protocol,
};
use kplane_rig::client::{self, Outcome, Probe};
use kplane_rig::kernel::nft;
use kplane_rig::netns::NetNs;
use kplane_rig::privilege::available;
use kplane_rig::topology::Topology;

/// A probe is denied if nothing came back by then.
const PATIENCE: Duration = Duration::from_millis(150);

/// Pod, last part of its addresses, class, number of its port `web`.
const PODS: [(&str, u8, u8, u8, u16); 4] = [
    ("a", 1, 10, 4, 81),
    ("b", 1, 11, 3, 80),
    ("c", 2, 10, 1, 81),
    ("d", 2, 11, 2, 80),
];

type Change<'a> = [(PolicyKey, Option<&'a PolicyObject>)];

pub(crate) struct World {
    topology: Topology,
    pub(crate) enforcer: Enforcer,
    objects: BTreeMap<PolicyKey, PolicyObject>,
    flows: Option<Receiver<Vec<AnyFlow>>>,
}

pub(crate) fn id(number: u8) -> PeerId {
    PeerId([number; 16])
}

fn name(name: &str) -> PolicyName {
    PolicyName::new("ns", name)
}

pub(crate) fn policy(
    called: &str,
    ingress: Option<Vec<PolicyRule>>,
    egress: Option<Vec<PolicyRule>>,
) -> Policy {
    Policy {
        name: name(called),
        ingress,
        egress,
    }
}

/// Returns a rule of the group of [`group`], or none, and of blocks.
pub(crate) fn rule(grouped: bool, blocks: &[Block], ports: Option<Vec<PolicyPort>>) -> PolicyRule {
    let groups = grouped.then_some(id(99)).into_iter().collect();
    let blocks = blocks.to_vec();
    let peers = Some(Peers { groups, blocks });
    PolicyRule { peers, ports }
}

pub(crate) fn block(range: &str, except: &[&str]) -> Block {
    let except = except.iter().map(|range| range.parse().unwrap());
    Block {
        range: range.parse().unwrap(),
        except: except.collect(),
    }
}

pub(crate) fn group(members: &[PeerId]) -> PolicyObject {
    PolicyObject::Group(GroupPart {
        group: id(99),
        part: 0,
        members: members.to_vec(),
    })
}

pub(crate) fn peer(address: IpAddr, class: u8) -> PolicyObject {
    let class = id(class);
    let tier = None;
    PolicyObject::Peer(Peer {
        address,
        class,
        tier,
    })
}

fn web(port: u16) -> NamedPort {
    NamedPort {
        name: "web".into(),
        protocol: Protocol::Tcp,
        port,
    }
}

fn class(number: u8, namespace: u8, port: u16) -> PolicyObject {
    PolicyObject::Class(PeerClass {
        id: id(number),
        parent: id(namespace),
        namespace: "ns".into(),
        ports: vec![web(port)],
    })
}

fn addresses(node: u8, last: u8) -> [IpAddr; 2] {
    let v6 = format!("fd44:0:0:{node}::{last}").parse().unwrap();
    [IpAddr::from([10, 244, node, last]), v6]
}

/// Returns tables that other programs may change.
pub(crate) fn own_tables() -> PolicyTables {
    PolicyTables::own(false).without_owner()
}

fn ranges() -> [Cidr; 2] {
    ["10.244.1.0/24", "fd44:0:0:1::/64"].map(|range| range.parse().unwrap())
}

pub(crate) fn apply(
    enforcer: &mut Enforcer,
    family: Family,
    objects: &Change<'_>,
    complete: bool,
) -> PolicyApplied {
    let change = PolicyChange {
        objects,
        complete,
        closed: false,
        pod_ranges: &ranges(),
    };
    enforcer.apply(family, change).unwrap()
}

impl World {
    pub(crate) fn new() -> Option<Self> {
        let mut topology = available(Topology::standard(2)).unwrap()?;
        for (pod, node, last, ..) in PODS {
            let node = format!("node-{node}");
            let ips = addresses(node.as_bytes()[5] - b'0', last);
            let pod = topology.add_pod(&node, pod, &ips).unwrap();
            for port in [80, 81] {
                pod.serve(client::Protocol::Tcp, port).unwrap();
            }
            pod.serve(client::Protocol::Udp, 80).unwrap();
        }
        let client = topology.host("client").unwrap();
        for node in topology.nodes() {
            for cidr in node.pod_cidrs() {
                client.route(*cidr, node).unwrap();
            }
        }
        Some(Self {
            topology,
            enforcer: Enforcer::new(own_tables()),
            objects: BTreeMap::new(),
            flows: None,
        })
    }

    pub(crate) fn tables(&self) -> PolicyTables {
        own_tables()
    }

    /// Begins with all Pods, and policy "p" of Pod a in view, but no policy yet.
    pub(crate) fn start(&mut self) {
        for (pod, node, last, number, port) in PODS {
            let namespace = if pod == "d" { 11 } else { 10 };
            let mut objects = vec![class(number, namespace, port)];
            objects.extend(addresses(node, last).map(|address| peer(address, number)));
            self.objects.extend(objects.into_iter().map(|o| (o.key(), o)));
        }
        for pod in ["a", "b"] {
            let pod = self.local(pod, if pod == "a" { &["p"] } else { &[] });
            self.objects.insert(pod.key(), pod);
        }
        self.whole();
    }

    fn local(&self, pod: &str, policies: &[&str]) -> PolicyObject {
        let (_, node, last, _, port) = *PODS.iter().find(|(name, ..)| *name == pod).unwrap();
        PolicyObject::Pod(LocalPod {
            name: name(pod),
            addresses: addresses(node, last).to_vec(),
            ports: vec![web(port)],
            policies: policies.iter().map(|policy| name(policy)).collect(),
            tier: None,
        })
    }

    /// Ends the agent, and begins the next one.
    pub(crate) fn succeed(&mut self, tables: PolicyTables) {
        self.enforcer = Enforcer::new(tables);
        self.whole();
    }

    /// Has a second agent apply everything, and returns its error.
    pub(crate) fn refusal(&self, second: &mut Enforcer) -> String {
        let objects: Vec<_> = self.objects.iter().map(|(key, o)| (key.clone(), Some(o))).collect();
        let change = PolicyChange {
            objects: &objects,
            complete: true,
            closed: false,
            pod_ranges: &ranges(),
        };
        let applied = self.on_node(|| second.apply(Family::V4, change));
        applied.unwrap_err().source.to_string()
    }

    /// Applies everything.
    pub(crate) fn whole(&mut self) -> [PolicyApplied; 2] {
        let objects: Vec<_> = self.objects.iter().map(|(key, o)| (key.clone(), Some(o))).collect();
        Self::apply(&self.topology, &mut self.enforcer, &objects, true)
    }

    fn apply(
        topology: &Topology,
        enforcer: &mut Enforcer,
        objects: &Change<'_>,
        complete: bool,
    ) -> [PolicyApplied; 2] {
        let ns = topology.node("node-1").unwrap().ns();
        ns.run(|| Ok(Family::ALL.map(|family| apply(enforcer, family, objects, complete))))
            .unwrap()
    }

    fn change(&mut self, key: PolicyKey, object: Option<PolicyObject>) -> [PolicyApplied; 2] {
        let change = [(key.clone(), object.as_ref())];
        let applied = Self::apply(&self.topology, &mut self.enforcer, &change, false);
        match object {
            Some(object) => self.objects.insert(key, object),
            None => self.objects.remove(&key),
        };
        applied
    }

    /// Begins a change in IPv4, and returns what came of it.
    pub(crate) fn begin(&mut self, object: &PolicyObject) -> PolicyApplied {
        let objects = [(object.key(), Some(object))];
        let change = PolicyChange {
            objects: &objects,
            complete: false,
            closed: false,
            pod_ranges: &ranges(),
        };
        let (enforcer, ns) = self.parts();
        let begun = ns.run(|| Ok(enforcer.begin(Family::V4, change).unwrap()));
        self.objects.insert(object.key(), object.clone());
        begun.unwrap()
    }

    /// Sends the next part of the change.
    pub(crate) fn go_on(&mut self, applied: &mut PolicyApplied) {
        let (enforcer, ns) = self.parts();
        let sent = ns.run(|| Ok(enforcer.go_on(Family::V4, applied)));
        sent.unwrap().unwrap();
    }

    fn parts(&mut self) -> (&mut Enforcer, &NetNs) {
        (
            &mut self.enforcer,
            self.topology.node("node-1").unwrap().ns(),
        )
    }

    pub(crate) fn set(&mut self, object: PolicyObject) {
        self.change(object.key(), Some(object));
    }

    pub(crate) fn set_policy(&mut self, policy: Policy) {
        self.set(PolicyObject::Policy(policy));
    }

    pub(crate) fn unset_policy(&mut self, policy: &str) {
        self.change(PolicyKey::Policy(name(policy)), None);
    }

    pub(crate) fn set_pod(&mut self, pod: &str, policies: &[&str]) {
        self.set(self.local(pod, policies));
    }

    pub(crate) fn unset_pod(&mut self, pod: &str) {
        self.change(PolicyKey::Pod(name(pod)), None);
    }

    pub(crate) fn set_peer(&mut self, pod: &str, class: u8) -> [PolicyApplied; 2] {
        let (_, node, last, ..) = *PODS.iter().find(|(name, ..)| *name == pod).unwrap();
        // Both addresses in one change.
        let peers = addresses(node, last).map(|address| peer(address, class));
        let change: Vec<_> = peers.iter().map(|peer| (peer.key(), Some(peer))).collect();
        let applied = Self::apply(&self.topology, &mut self.enforcer, &change, false);
        self.objects.extend(peers.into_iter().map(|peer| (peer.key(), peer)));
        applied
    }

    /// Begins anew, without a policy.
    pub(crate) fn reset(&mut self) {
        self.objects.clear();
        self.flows = None;
        self.enforcer = Enforcer::new(own_tables());
        self.whole();
    }

    pub(crate) fn cut_connections(&mut self) {
        let (sender, receiver) = channel();
        self.flows = Some(receiver);
        let hand = Box::new(move |flows| drop(sender.send(flows)));
        let ns = self.topology.node("node-1").unwrap().ns();
        let start = || Ok(Sweeper::start(ConntrackCounts::default(), hand)?);
        self.enforcer.cut_connections(ns.run(start).unwrap());
    }

    pub(crate) fn judge(&mut self) {
        let flows = self.flows.as_ref().unwrap();
        flows.try_iter().for_each(|flows| self.enforcer.judge_flows(flows));
    }

    pub(crate) fn ns(&self, at: &str) -> &NetNs {
        let host = self.topology.node(at).or_else(|_| self.topology.host(at));
        host.map_or_else(|_| self.topology.pod(at).unwrap().ns(), |host| host.ns())
    }

    pub(crate) fn address(&self, family: Family, pod: &str, port: u16) -> SocketAddr {
        self.topology.pod(pod).unwrap().address(family, port).unwrap()
    }

    /// Connects two Pods. Returns the ends of the client and of the server, which wait half a second for data.
    pub(crate) fn streams(&self, family: Family, from: &str, to: &str) -> (TcpStream, TcpStream) {
        let at = self.address(family, to, 0);
        let listener = self.ns(to).run(|| Ok(TcpListener::bind(at)?)).unwrap();
        let at = listener.local_addr().unwrap();
        let client = self.ns(from).run(|| Ok(TcpStream::connect(at)?)).unwrap();
        let (server, _) = listener.accept().unwrap();
        for end in [&client, &server] {
            end.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        }
        (client, server)
    }

    fn reaches(&self, protocol: client::Protocol, from: &str, to: SocketAddr) -> bool {
        let probe = Probe::new(protocol, to).timeout(PATIENCE);
        matches!(probe.once(self.ns(from)).unwrap(), Outcome::Reply(_))
    }

    pub(crate) fn tcp(&self, family: Family, from: &str, to: &str, port: u16) -> bool {
        self.reaches(client::Protocol::Tcp, from, self.address(family, to, port))
    }

    pub(crate) fn udp(&self, family: Family, from: &str, to: &str, port: u16) -> bool {
        self.reaches(client::Protocol::Udp, from, self.address(family, to, port))
    }

    pub(crate) fn on_node<T: Send>(&self, run: impl FnOnce() -> T + Send) -> T {
        let node = self.topology.node("node-1").unwrap();
        node.ns().run(|| Ok(run())).unwrap()
    }

    /// Returns the lines of the tables, sorted.
    pub(crate) fn listing(&self) -> Vec<String> {
        let text = self.on_node(|| nft(&["list", "ruleset"], ""));
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    }
}
