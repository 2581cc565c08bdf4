//! NetworkPolicies from objects to packets, in all modes: a truth table of their semantics (NP1 to NP20), and what changes
//! while packets flow.
//!
//! ```text
//! node-1: a (x: app=web)  b (x: app=db)      here  (y: app=client)     namespaces x: team=red
//! node-2: c (y: app=web, tier=back)          there (z: app=client)                y: team=blue   z: none
//! ```
//!
//! Each Pod serves 8080 (named `web`) and 8081 (named `admin`; at `c`, `web` is 8081 and `admin` 8080) in TCP and UDP.

mod attacks;
mod changes;
mod denied;
mod fates;
mod readings;
mod reported;
mod table;
mod tiers;

pub(super) use attacks::*;
pub(super) use changes::*;
pub(super) use denied::*;
pub(super) use fates::*;
pub(super) use readings::*;
pub(super) use reported::*;
pub(super) use table::*;
pub(super) use tiers::*;

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Cidr, Family, Protocol};
use kplane_tests::client::{self, Outcome, Probe};
use kplane_tests::netns::NetNs;
use kplane_tests::sctp;
use kplane_tests::support::cluster::Cluster;
use kplane_tests::support::objects::{load_balancer, with_pods};
use kplane_tests::support::{At, Setup, World, node_ip, node_name, pod_ips, svc};
use serde_json::{Value, json};

/// The further port of each Pod.
const ADMIN: u16 = 8081;
const WEB: u16 = 8080;
/// How long a probe that must not get through listens.
const SILENCE: Duration = Duration::from_millis(300);
/// How long a probe that must get through waits, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(3);

/// Name, node, number on the node, namespace and labels of each Pod.
const PODS: [(&str, u8, u8, &str, &str); 5] = [
    ("a", 1, 1, "x", "app: web"),
    ("b", 1, 2, "x", "app: db"),
    ("c", 2, 1, "y", "app: web, tier: back"),
    ("here", 1, 9, "y", "app: client"),
    ("there", 2, 9, "z", "app: client"),
];

/// Two nodes whose kernels enforce policies.
struct Stage {
    world: World,
    cluster: Cluster,
}

impl Stage {
    /// Namespaces, Pods, and Service 1 with the Pod `a` and Service 2 with the Pod `c`; no policy.
    fn open() -> Result<Self> {
        let mut stage = Self::unread()?;
        stage.cluster.read_policies()?;
        stage.cluster.apply(&everything()?)?;
        Ok(stage)
    }

    /// The same without objects, before the control plane has read policies, Pods and Namespaces.
    fn unread() -> Result<Self> {
        let mut world = World::without_agents()?;
        for (pod, ..) in PODS {
            let pod = world.topology.pod_mut(pod)?;
            for protocol in [client::Protocol::Tcp, client::Protocol::Udp] {
                pod.serve(protocol, ADMIN)?;
            }
        }
        let (client, node) = (
            world.topology.host("client")?,
            world.topology.node("node-1")?,
        );
        for range in ["10.244.0.0/16", "fd44::/32"] {
            client.route(range.parse::<Cidr>()?, node)?;
        }
        let cluster = Cluster::with_policies_unread(&world, Setup::PodRanges)?;
        Ok(Self { world, cluster })
    }

    /// The namespace of a network from which or to which a line of a table asks.
    fn ns(&self, name: &str) -> Result<&NetNs> {
        match name {
            "outside" => Ok(self.world.topology.host("client")?.ns()),
            "node1" => Ok(self.world.topology.node("node-1")?.ns()),
            "node2" => Ok(self.world.topology.node("node-2")?.ns()),
            pod => self.world.net.pod(pod),
        }
    }

    /// Asks all questions of some lines at once; returns those whose answer is not the expected one.
    fn wrong(&self, lines: &str) -> Result<Vec<String>> {
        let questions = Question::all(lines)?;
        thread::scope(|scope| {
            let asked: Vec<_> = questions
                .iter()
                .map(|question| {
                    let ns = self.ns(&question.from)?.clone();
                    let watch = &self.world.net.watch;
                    Ok(scope.spawn(move || question.ask(&ns, watch)))
                })
                .collect::<Result<_>>()?;
            let mut wrong = Vec::new();
            for thread in asked {
                wrong.extend(thread.join().map_err(|_| anyhow::anyhow!("a probe panicked"))??);
            }
            Ok(wrong)
        })
    }

    /// Wants the answers of these lines.
    fn check(&self, what: &str, lines: &str) -> Result<()> {
        let wrong = self.wrong(lines)?;
        ensure!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
        Ok(())
    }

    /// Applies objects in YAML.
    fn apply(&mut self, text: &str) -> Result<()> {
        self.cluster.apply(&objects(text)?)
    }

    /// Deletes objects in YAML.
    fn delete(&mut self, text: &str) -> Result<()> {
        let gone = objects(text)?;
        let gone = gone.iter().map(kplane_tests::support::cluster::delete);
        self.cluster.change(gone.collect::<Result<_>>()?)
    }

    /// Plays a case: its policies come, the answers are right, the policies go.
    fn play(&mut self, case: &Case) -> Result<()> {
        let text = case.policies();
        self.apply(&text).with_context(|| case.name.clone())?;
        let failures = self.cluster.failures();
        ensure!(failures.is_empty(), "{}: {failures:?}", case.name);
        self.check(&case.name, &case.lines)?;
        self.delete(&text).with_context(|| case.name.clone())
    }
}

/// Namespaces, Pods and both Services.
fn everything() -> Result<Vec<Value>> {
    let pods = PODS.iter().map(|(name, ..)| pod(name));
    let mut objects: Vec<Value> = pods.collect::<Result<_>>()?;
    objects.extend([namespace("x", "team: red")?, namespace("y", "team: blue")?]);
    objects.push(namespace("z", "")?);
    objects.extend(with_pods(load_balancer(1), &["a"]));
    objects.extend(with_pods(load_balancer(2), &["c"]));
    Ok(objects)
}

/// A case of the truth table.
#[derive(Debug, Default)]
struct Case {
    /// With its line in `cases.txt`.
    name: String,
    /// Policies for [`policy`].
    policies: Vec<&'static str>,
    /// What gets through: see [`Question::parse`].
    lines: String,
}

impl Case {
    fn policies(&self) -> String {
        (0..)
            .zip(&self.policies)
            .map(|(at, text)| policy(&format!("p{at}"), text))
            .collect()
    }
}

/// The sections of `cases.txt` that are about NetworkPolicies alone.
const NETWORK_POLICIES: [&str; 6] = [
    "isolation",
    "selectors",
    "blocks",
    "ports",
    "nodes",
    "services",
];

/// Returns the cases of some sections of `cases.txt`. Under `== NAME` stand policies, a line each, and behind `?` what gets
/// through.
fn cases(sections: &[&str]) -> Vec<Case> {
    let (mut section, mut cases) = ("", Vec::<Case>::new());
    let lines = include_str!("network_policies/cases.txt").lines();
    let lines = (1..).zip(lines).filter(|(_, line)| !line.is_empty());
    for (number, line) in lines {
        let (mark, rest) = line.split_once(' ').unwrap_or((line, ""));
        if mark == "#" {
            section = rest.split(':').next().unwrap_or_default();
        } else if sections.contains(&section) {
            match (mark, cases.last_mut()) {
                ("==", _) => cases.push(Case {
                    name: format!("{rest} (cases.txt:{number})"),
                    ..Case::default()
                }),
                ("?", Some(case)) => case.lines += &format!("{rest}\n"),
                (_, Some(case)) => case.policies.push(line),
                (_, None) => {}
            }
        }
    }
    cases
}

/// Plays the cases of a section one after the other in one world.
fn play(section: &str) -> Result<()> {
    let cases = cases(&[section]);
    ensure!(!cases.is_empty(), "no section {section}");
    let mut stage = Stage::open()?;
    stage.check(
        "without policies",
        "a>b; b>a; here>a; there>c; node1>a; outside>a; here>svc1; outside>port1",
    )?;
    cases.iter().try_for_each(|case| stage.play(case))?;
    stage.check(
        "after the last policy",
        "a>b; b>a; here>a; there>c; outside>a",
    )
}

/// Splits `in NAMESPACE: SPEC`, with the `spec` in YAML of one line. A ClusterNetworkPolicy is its `spec` alone.
fn namespace_and_spec(policy: &str) -> (&str, &str) {
    let rest = policy.strip_prefix("in ");
    rest.and_then(|rest| rest.split_once(": ")).unwrap_or(("", policy))
}

/// Returns the YAML of a policy that is written as [`namespace_and_spec`] says.
fn policy(name: &str, text: &str) -> String {
    let (namespace, spec) = namespace_and_spec(text);
    if namespace.is_empty() {
        return format!(
            "---\napiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {{name: '{name}'}}\n\
             spec: {{{spec}}}\n"
        );
    }
    format!(
        "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: '{name}', namespace: '{namespace}'}}\n\
         spec: {{{spec}}}\n"
    )
}

fn objects(text: &str) -> Result<Vec<Value>> {
    text.split("---\n")
        .filter(|text| !text.trim().is_empty())
        .map(|text| serde_saphyr::from_str(text).with_context(|| text.to_owned()))
        .collect()
}

fn namespace(name: &str, labels: &str) -> Result<Value> {
    let text = format!(
        "{{apiVersion: v1, kind: Namespace, metadata: {{name: '{name}', labels: {{{labels}}}}}}}"
    );
    Ok(serde_saphyr::from_str(&text)?)
}

/// A Pod's object, as kubelet leaves it.
fn pod(name: &str) -> Result<Value> {
    let known = PODS.iter().find(|(pod, ..)| *pod == name);
    let (_, node, number, namespace, labels) = known.with_context(|| format!("no Pod {name}"))?;
    let labels: Value = serde_saphyr::from_str(&format!("{{{labels}}}"))?;
    let (web, admin) = if name == "c" { (ADMIN, WEB) } else { (WEB, ADMIN) };
    let ports: Vec<Value> = ["TCP", "UDP"]
        .iter()
        .flat_map(|protocol| {
            [("web", web), ("admin", admin)].map(
                |(name, port)| json!({"name": name, "containerPort": port, "protocol": protocol}),
            )
        })
        .collect();
    let ips = pod_ips(*node, *number).map(|ip| json!({"ip": ip.to_string()}));
    Ok(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"nodeName": node_name(*node), "containers": [{"ports": ports}]},
        "status": {"phase": "Running", "podIPs": ips, "podIP": ips[0]["ip"]},
    }))
}

/// One probe, and whether it must get through.
#[derive(Clone, Debug)]
struct Question {
    from: String,
    line: String,
    protocol: Protocol,
    to: SocketAddr,
    through: bool,
}

impl Question {
    /// Reads the questions of some lines.
    fn all(lines: &str) -> Result<Vec<Self>> {
        Ok(lines
            .lines()
            .flat_map(|line| line.split(';'))
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .map(Self::parse)
            .collect::<Result<Vec<_>>>()?
            .concat())
    }

    /// Reads `FROM>TO[:PORT][/udp][/sctp][/4][/6] [no]`. FROM and TO are Pods, `node1`, `node2` and `outside`; TO may also be
    /// `svc1` or `svc2` (ClusterIPs), `port1` or `port2` (node ports of node-1) and `far1` or `far2` (of node-2). Without a family, both are asked.
    fn parse(line: &str) -> Result<Vec<Self>> {
        let (question, expected) = line.split_once(' ').unwrap_or((line, ""));
        let mut parts = question.split('/');
        let (from, to) =
            parts.next().and_then(|ends| ends.split_once('>')).context(line.to_owned())?;
        let (to, port) = to.split_once(':').unwrap_or((to, "8080"));
        let (mut protocol, mut families) = (Protocol::Tcp, Family::ALL.to_vec());
        for option in parts {
            match option {
                "udp" => protocol = Protocol::Udp,
                "sctp" => protocol = Protocol::Sctp,
                "4" => families = vec![Family::V4],
                "6" => families = vec![Family::V6],
                other => anyhow::bail!("{line}: what is {other}?"),
            }
        }
        let through = match expected.trim() {
            "" => true,
            "no" => false,
            other => anyhow::bail!("{line}: what is {other}?"),
        };
        let port = port.parse()?;
        families
            .into_iter()
            .map(|family| {
                Ok(Self {
                    from: from.to_owned(),
                    line: line.to_owned(),
                    protocol,
                    to: destination(to, port, family)?,
                    through,
                })
            })
            .collect()
    }

    /// Asks; returns a line if the answer is not the expected one.
    fn ask(&self, ns: &NetNs, watch: &sctp::Watch) -> Result<Option<String>> {
        let timeout = if self.through { PATIENCE } else { SILENCE };
        // Dropped, and not refused: an ICMP error would say that somebody is there.
        let (through, outcome) = match client::Protocol::of(self.protocol) {
            Some(protocol) => {
                let probe = Probe::new(protocol, self.to).timeout(timeout);
                let outcome = probe.once(ns)?;
                let through = match &outcome {
                    Outcome::Reply(_) => Some(true),
                    Outcome::TimedOut => Some(false),
                    _ => None,
                };
                (through, outcome.to_string())
            }
            None => {
                let outcome = watch.probe(ns, self.to, timeout)?;
                let through = match &outcome {
                    sctp::Outcome::Arrived(_) => Some(true),
                    sctp::Outcome::TimedOut => Some(false),
                    _ => None,
                };
                (through, format!("{outcome:?}"))
            }
        };
        Ok((through != Some(self.through)).then(|| {
            format!(
                "  {} ({} {:?}): {outcome}",
                self.line, self.to, self.protocol
            )
        }))
    }
}

fn destination(name: &str, port: u16, family: Family) -> Result<SocketAddr> {
    let ip: IpAddr = match name {
        "svc1" => return Ok(svc(1).address(At::ClusterIp, family, 1)),
        "svc2" => return Ok(svc(2).address(At::ClusterIp, family, 1)),
        "port1" => return Ok(svc(1).address(At::NodePort, family, 1)),
        "port2" => return Ok(svc(2).address(At::NodePort, family, 1)),
        "far1" => return Ok(svc(1).address(At::NodePort, family, 2)),
        "far2" => return Ok(svc(2).address(At::NodePort, family, 2)),
        "node1" => node_ip(1, family),
        "node2" => node_ip(2, family),
        pod => {
            let pod = PODS.iter().find(|(name, ..)| *name == pod);
            let (_, node, number, ..) = pod.with_context(|| format!("no Pod {name}"))?;
            pod_ips(*node, *number)[family as usize]
        }
    };
    Ok(SocketAddr::new(ip, port))
}
