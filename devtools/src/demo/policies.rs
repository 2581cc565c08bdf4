//! NetworkPolicies: a default deny, an exception by labels and a named port, a block of addresses that excepts one, and a
//! Pod that gets other labels while another one calls without a pause.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Cidr, Family, Protocol};
use kplane_rig::client::{self, Outcome, Probe};
use kplane_rig::link::Route;
use kplane_rig::load::{Load, Pace};
use owo_colors::OwoColorize as _;
use serde_json::{Value, json};

use super::show::{Show, aside, fit, mark, say};
use super::stage::Stage;
use super::world::{Caller, Role};

/// The Pod that policies protect.
const TARGET: &str = "shop/web-1";
/// Pods that call it: namespace, name and the label `app`.
const JOBS: [(&str, &str, &str); 3] = [
    ("blue", "job-0", "client"),
    ("green", "job-1", "client"),
    ("blue", "job-2", "other"),
];
/// The file with all of this, among the manifests.
const FILE: &str = "network-policies.yaml";
/// Time in which a call must get through.
const PATIENCE: Duration = Duration::from_millis(300);
const PACE: Pace = Pace {
    threads: 1,
    think: Duration::from_millis(1),
};

/// Callers and the Pod that they call.
struct Cast {
    jobs: Vec<Caller>,
    /// Clients outside of the cluster.
    outside: Vec<Caller>,
    to: SocketAddr,
}

impl Cast {
    fn of(stage: &Stage) -> Result<Self> {
        let of = |role| {
            stage
                .world
                .callers
                .iter()
                .filter(move |caller| caller.role == role)
                .filter(|caller| caller.ip(Family::V4).is_some())
                .cloned()
        };
        let (jobs, outside): (Vec<_>, Vec<_>) =
            (of(Role::Pod).collect(), of(Role::Client).collect());
        ensure!(
            jobs.len() >= JOBS.len() && outside.len() >= 2,
            "too few callers"
        );
        let target = stage
            .objects
            .pods
            .iter()
            .find(|pod| pod.name == TARGET)
            .context("the Pod to protect is not there")?;
        let ip = target.ips.iter().find(|ip| Family::of(**ip) == Family::V4);
        let port = target.listens.iter().find(|(protocol, _)| *protocol == Protocol::Tcp);
        let (ip, (_, port)) = ip.zip(port).context("it serves nothing")?;
        let to = SocketAddr::new(*ip, *port);
        let node = target.node.as_deref().context("it is on no node")?;
        let node = stage.world.topology.node(node)?.ip(Family::V4)?;
        for client in outside.iter().take(2) {
            // As a router outside that knows the way to the Pod.
            let route = Route::to(Cidr::single(*ip)).via(node);
            client.ns.netlink()?.add_route(&route)?;
        }
        Ok(Self { jobs, outside, to })
    }

    /// Returns the callers with their names: the Pods, then the clients.
    fn callers(&self) -> impl Iterator<Item = (String, &Caller)> {
        let jobs = JOBS
            .iter()
            .zip(&self.jobs)
            .map(|((namespace, name, _), caller)| (format!("{namespace}/{name}"), caller));
        let outside = self.outside.iter().take(2);
        jobs.chain(outside.map(|caller| (format!("a client at {}", caller.node), caller)))
    }

    fn probe(&self, caller: &Caller) -> Probe {
        let probe = Probe::new(client::Protocol::Tcp, self.to).timeout(PATIENCE);
        caller.ip(Family::V4).map_or(probe, |ip| probe.source(ip))
    }

    /// Lets all callers call once, and compares who gets through.
    fn check(&self, show: &mut Show, what: &str, expected: [bool; 5]) -> Result<()> {
        let (began, mut wrong, mut through) = (Instant::now(), Vec::new(), 0);
        for ((name, caller), expected) in self.callers().zip(expected) {
            let outcome = self.probe(caller).once(&caller.ns)?;
            let is_through = matches!(outcome, Outcome::Reply(_));
            through += usize::from(is_through);
            let word = if is_through { "gets through" } else { "does not" };
            say!(
                "      {}{} {}",
                mark(is_through == expected),
                fit(&name, 28),
                word.dimmed()
            );
            if is_through != expected {
                wrong.push(format!("{name}: {outcome}"));
            }
        }
        let wanted = expected.iter().filter(|of| **of).count();
        let (wanted, seen) = (
            format!("{wanted} of 5 get through"),
            format!("{through} of 5"),
        );
        show.check((what, &wanted), seen, wrong, began);
        Ok(())
    }

    /// Returns namespaces, Pods and policies. `app` is the label of the last job.
    fn objects(&self, stage: &Stage, policies: &[Value], app: &str) -> Vec<Value> {
        let namespace = |name: &str| {
            let metadata = json!({"name": name, "labels": {"team": name}});
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        };
        let pod = |(namespace, name, app): (&str, &str, &str), node: &str, ips: &[IpAddr]| {
            let ips: Vec<Value> = ips.iter().map(|ip| json!({"ip": ip.to_string()})).collect();
            let port = json!({"name": "http", "containerPort": self.to.port(), "protocol": "TCP"});
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": name, "namespace": namespace, "labels": {"app": app}},
                "spec": {"nodeName": node, "containers": [{"ports": [port]}]},
                "status": {"phase": "Running", "podIP": ips[0]["ip"], "podIPs": ips},
            })
        };
        let mut objects: Vec<Value> = ["shop", "blue", "green"].map(namespace).to_vec();
        for (at, (caller, job)) in self.jobs.iter().zip(JOBS).enumerate() {
            let (namespace, name, own) = job;
            let app = if at + 1 == JOBS.len() { app } else { own };
            objects.push(pod((namespace, name, app), &caller.node, &caller.ips));
        }
        // Policies cut off Pods that are not known.
        for known in &stage.objects.pods {
            let ips: Vec<IpAddr> = known.ips.iter().copied().collect();
            let placed = known.name.split_once('/').zip(known.node.as_deref());
            if let Some(((namespace, name), node)) = placed {
                let app = name.rsplit_once('-').map_or(name, |(app, _)| app);
                objects.push(pod((namespace, name, app), node, &ips));
            }
        }
        objects.extend_from_slice(policies);
        objects
    }
}

fn policy(name: &str, spec: &Value) -> Value {
    let metadata = json!({"name": name, "namespace": "shop"});
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec})
}

/// Returns a default deny, an exception for Pods, and one for clients outside except one of them.
fn policies(except: IpAddr) -> [Value; 3] {
    let deny = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
    let web = json!({"matchLabels": {"app": "web"}});
    let clients = json!({
        "namespaceSelector": {"matchLabels": {"team": "blue"}},
        "podSelector": {"matchLabels": {"app": "client"}},
    });
    let labels = json!({"from": [clients], "ports": [{"port": "http"}]});
    let block = json!({"cidr": "0.0.0.0/0", "except": [format!("{except}/32"), "10.0.0.0/8"]});
    [
        policy("default-deny", &deny),
        policy(
            "clients-of-blue",
            &json!({"podSelector": web, "ingress": [labels]}),
        ),
        policy(
            "outside",
            &json!({"podSelector": web, "ingress": [{"from": [{"ipBlock": block}]}]}),
        ),
    ]
}

/// Takes the walk, and removes everything again.
pub(crate) fn walk(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let cast = Cast::of(stage)?;
    aside!(
        "all call {TARGET}, at {}: Pods of other namespaces, and clients outside",
        cast.to
    );
    let except = cast
        .outside
        .get(1)
        .and_then(|client| client.ip(Family::V4))
        .context("there is no second client")?;
    let all = policies(except);
    let publish = |stage: &mut Stage, policies: usize, app: &str| {
        let objects = cast.objects(stage, &all[..policies], app);
        stage.publish(FILE, Some(&objects))
    };
    publish(stage, 1, "other")?;
    cast.check(show, "a default deny", [false; 5])?;
    publish(stage, 2, "other")?;
    let expected = [true, false, false, false, false];
    cast.check(show, "Pods app=client of team=blue, port http", expected)?;
    aside!("everybody outside of 10.0.0.0/8, except {except}");
    publish(stage, 3, "other")?;
    let expected = [true, false, false, true, false];
    cast.check(show, "a block of addresses that excepts one", expected)?;

    let began = Instant::now();
    let job = &cast.jobs[0];
    let probe = cast.probe(job).timeout(Duration::from_secs(1));
    let load = Load::start(&job.ns, probe, PACE)?;
    aside!("blue/job-2 gets the label app=client while blue/job-0 calls without a pause");
    publish(stage, 3, "client")?;
    cast.check(
        show,
        "a Pod with other labels",
        [true, false, true, true, false],
    )?;
    publish(stage, 3, "other")?;
    cast.check(show, "and with those that it had", expected)?;
    let report = load.stop();
    let failed = report.failed.iter().map(|(how, times)| format!("{how}, {times} times"));
    let seen = format!("{} of {}", report.lost(), report.ok() + report.lost());
    let what = ("blue/job-0, which may always call", "0 connects failed");
    show.check(what, seen, failed.collect(), began);
    drops(show, stage)?;
    stage.publish(FILE, None)?;
    cast.check(show, "no policy", [true; 5])
}

/// Asks which packets were dropped.
fn drops(show: &mut Show, stage: &Stage) -> Result<()> {
    let began = Instant::now();
    say!("      {}", "$ kpctl get drops".bold());
    let answer = stage.control()?.output(stage.kpctl(&["drops"]))?;
    for line in answer.lines() {
        say!("      {line}");
    }
    let wrong = if answer.contains(TARGET) {
        Vec::new()
    } else {
        vec![format!("{TARGET} is not in it")]
    };
    let seen = if wrong.is_empty() { TARGET } else { "nothing" };
    show.check(
        ("kpctl get drops names the Pod", TARGET),
        seen,
        wrong,
        began,
    );
    Ok(())
}
