//! A node goes from kube-proxy to kplane and back, under way of traffic: nobody notices (I4), and of
//! the one before nothing stays that is in the way.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Family, Protocol};
use kplane_tests::client::{Probe, Session};
use kplane_tests::load::{Load, Pace};
use kplane_tests::privilege::need_tools;
use serde_json::{Value, json};

use crate::conformance::api::Api;
use crate::conformance::chains;
use crate::conformance::proxy::{Configuration, Mode, node_agent};
use crate::conformance::scenario::{admissible, everywhere};
use crate::conformance::stand::Stand;
use kplane_tests::support::cluster::node;
use kplane_tests::support::objects::{service, with_pods};
use kplane_tests::support::proxy::Proxy;
use kplane_tests::support::{At, Client, Question, Seen, Setup, svc};
use kplane_tests::wait::DEADLINE;

/// A new connection every few milliseconds, of each of [`EVERYBODY`].
const PACE: Pace = Pace {
    threads: 1,
    think: Duration::from_millis(6),
};
/// The Service that everybody uses all the time.
const SERVED: u16 = 820;
/// Services that go: while nobody programs the node, and while somebody does.
const DOOMED: [u16; 4] = [830, 831, 832, 833];
/// Number of the first Service by which is seen that everything before is programmed.
const FIRST_SENTINEL: u16 = 2_100;
const EVERYBODY: [(Client, At, Family); 6] = [
    (Client::PodHere, At::ClusterIp, Family::V4),
    (Client::PodThere, At::ClusterIp, Family::V6),
    (Client::Outside, At::NodePort, Family::V4),
    (Client::Outside, At::LoadBalancer, Family::V6),
    (Client::Node, At::ClusterIp, Family::V6),
    (Client::Node, At::NodePort, Family::V4),
];

/// What must not break.
struct Traffic {
    loads: Vec<(String, Load)>,
    sessions: Vec<(String, Session)>,
}

/// The node, and how it goes on.
struct Journey {
    api: Api,
    stand: Stand,
    configuration: Configuration,
    sentinels: u16,
}

pub(crate) fn i4_nobody_notices_the_way_from_kube_proxy_to_kplane_and_back() -> Result<()> {
    need_tools(&["iptables-nft"])?;
    let mut journey = Journey::begin(Mode::Iptables, Proxy::KubeProxy)?;
    let mut traffic = Traffic::begin(&journey.stand)?;
    traffic.goes_on(20)?;

    let begin = Instant::now();
    for (proxy, [meanwhile, later]) in [
        (Proxy::Kplane, [DOOMED[0], DOOMED[1]]),
        (Proxy::KubeProxy, [DOOMED[2], DOOMED[3]]),
    ] {
        journey.stand.stop()?;
        traffic.goes_on(20)?;
        journey.delete(meanwhile)?;
        journey.start(proxy)?;
        traffic.goes_on(20)?;
        journey.delete(later)?;
        journey.programmed()?;
        traffic.goes_on(20)?;
        journey.is_as_if_alone(proxy)?;
        let took = begin.elapsed();
        println!("{} after {took:.1?}: {}", proxy.name(), traffic.reported());
    }
    traffic.none_lost()
}

/// As docs/migrate-from-kube-proxy.md describes it: stop the agents, start kube-proxy, clean up. What people do in
/// another order than that is refused.
pub(crate) fn i4_the_way_back_is_safe() -> Result<()> {
    let mut journey = Journey::begin(Mode::Nftables, Proxy::Kplane)?;
    let mut traffic = Traffic::begin(&journey.stand)?;
    traffic.goes_on(20)?;
    let beside_an_agent = journey.clean_up("--cleanup")?;
    beside_an_agent.is(1, "", "while a kp-nodeagent runs")?;
    journey.stand.stop()?;
    traffic.goes_on(20)?;
    journey.start(Proxy::KubeProxy)?;
    traffic.goes_on(20)?;

    let theirs = journey.clean_up("--cleanup-kube-proxy")?;
    theirs.is(1, "", "is a kube-proxy in this network namespace")?;
    let dry = journey.clean_up("--cleanup --dry-run")?;
    dry.is(0, "would remove: kplane's nftables table ip kplane", "")?;
    let ours = journey.clean_up("--cleanup --after-kube-proxy")?;
    ours.is(0, "removed: kplane's nftables table ip kplane", "")?;
    let again = journey.clean_up("--cleanup")?;
    again.is(0, "there was nothing to remove", "")?;
    // kube-proxy alone serves, and goes on programming.
    traffic.goes_on(20)?;
    journey.delete(DOOMED[0])?;
    journey.programmed()?;
    traffic.none_lost()
}

/// What a clean-up said.
struct Cleaned(Output);

impl Cleaned {
    fn is(&self, code: i32, stdout: &str, stderr: &str) -> Result<()> {
        let Self(output) = self;
        let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        let as_it_must = output.status.code() == Some(code)
            && texts[0].contains(stdout)
            && texts[1].contains(stderr);
        ensure!(as_it_must, "{}: {texts:#?}", output.status);
        Ok(())
    }
}

impl Journey {
    /// Runs the agent's program with these flags on the first node.
    fn clean_up(&self, flags: &str) -> Result<Cleaned> {
        let node = self.stand.world.node(1)?;
        let mut agent = Command::new(node_agent()?);
        agent.args(flags.split(' ')).env_remove("RUST_LOG");
        node.run(|| Ok(Cleaned(agent.output()?)))
    }

    /// One of the proxies serves.
    fn begin(mode: Mode, proxy: Proxy) -> Result<Self> {
        mode.under_test().set();
        let api = Api::start()?;
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "test"}});
        api.apply(&[namespace, node(1), node(2)])?;
        api.apply(&objects())?;
        let configuration = Configuration {
            mode,
            setup: Setup::PodRanges,
            compat: false,
            node_port_addresses: Vec::new(),
        };
        let mut journey = Self {
            stand: Stand::open(proxy, &api, &configuration)?,
            api,
            configuration,
            sentinels: 0,
        };
        journey.programmed()?;
        Ok(journey)
    }

    fn start(&mut self, proxy: Proxy) -> Result<()> {
        self.stand.start(proxy, &self.api, &self.configuration)?;
        self.programmed()
    }

    fn delete(&self, number: u16) -> Result<()> {
        self.api.delete(&doomed(number))
    }

    /// Waits until both nodes have programmed everything so far.
    fn programmed(&mut self) -> Result<()> {
        let number = FIRST_SENTINEL + self.sentinels;
        self.sentinels += 1;
        let sentinel: Vec<Value> =
            with_pods(service(number), &["a", "c"]).into_iter().map(admissible).collect();
        self.api.apply(&sentinel)?;
        self.stand.wait(number)
    }

    /// The chains are those of nodes on which nobody was before, and nobody is served who is gone.
    fn is_as_if_alone(&self, proxy: Proxy) -> Result<()> {
        let fresh = Stand::open(proxy, &self.api, &self.configuration)?;
        fresh.wait(FIRST_SENTINEL + self.sentinels - 1)?;
        chains::are_the_same(&fresh, &self.stand)
    }
}

impl Traffic {
    fn begin(stand: &Stand) -> Result<Self> {
        let mut traffic = Self {
            loads: Vec::new(),
            sessions: Vec::new(),
        };
        for (client, at, family) in EVERYBODY {
            let to = svc(SERVED).address(at, family, client.node());
            let name = format!("{client:?} to {at:?} {to}");
            let seen = Question::new(client, Protocol::Tcp, to).ask(&stand.world.net)?;
            ensure!(matches!(seen, Seen::Hit { .. }), "{name}: {seen}");
            let ns = stand.world.net.ns(client)?;
            let session = Probe::tcp(to).open(ns)?;
            traffic.sessions.push((name.clone(), session));
            let load = Load::start(ns, Probe::tcp(to), PACE)?;
            traffic.loads.push((name, load));
        }
        Ok(traffic)
    }

    /// Waits until everybody has connected `more` times again; all connections still work.
    fn goes_on(&mut self, more: u64) -> Result<()> {
        for (name, load) in &self.loads {
            load.goes_on(more, DEADLINE).context(name.clone())?;
            let report = load.report();
            ensure!(report.lost() == 0, "{name}: {report}");
        }
        for (name, session) in &mut self.sessions {
            session.echo(DEADLINE).with_context(|| name.clone())?;
        }
        Ok(())
    }

    fn reported(&self) -> String {
        let reports = self.loads.iter().map(|(_, load)| load.report());
        let (ok, lost) = reports.fold((0, 0), |(ok, lost), r| (ok + r.ok(), lost + r.lost()));
        format!("{ok} connections so far, {lost} failed")
    }

    fn none_lost(mut self) -> Result<()> {
        self.goes_on(1)?;
        self.loads
            .into_iter()
            .try_for_each(|(name, load)| load.unharmed().context(name))
    }
}

/// Services of all kinds of chains.
fn objects() -> Vec<Value> {
    let mut sticky = everywhere(821);
    sticky["spec"]["sessionAffinity"] = json!("ClientIP");
    let mut local = everywhere(822);
    local["spec"]["externalTrafficPolicy"] = json!("Local");
    local["spec"]["internalTrafficPolicy"] = json!("Local");
    let mut ranged = everywhere(823);
    ranged["spec"]["loadBalancerSourceRanges"] = json!(["172.30.0.0/16", "fd30::/64"]);
    let mut all = vec![
        with_pods(everywhere(SERVED), &["a", "b", "c"]),
        with_pods(sticky, &["a", "c"]),
        with_pods(local, &["a", "c"]),
        with_pods(ranged, &["b", "c"]),
        with_pods(everywhere(824), &[]),
    ];
    all.extend((840..890).map(|number| with_pods(service(number), &["a", "c"])));
    all.extend(DOOMED.map(doomed));
    all.concat().into_iter().map(admissible).collect()
}

/// A Service with chains of its own.
fn doomed(number: u16) -> Vec<Value> {
    with_pods(everywhere(number), &["a", "b"])
}
