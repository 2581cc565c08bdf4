//! What changes while packets flow.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kplane_dataplane::backend::Settings;
use kplane_model::Family;
use kplane_tests::client::Probe;
use kplane_tests::load::{Load, Pace};
use kplane_tests::ping::Ping;
use kplane_tests::support::Setup;
use kplane_tests::support::cluster::{delete, node};
use kplane_tests::support::nft::nft;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::wait::{DEADLINE, eventually};
use serde_json::json;

use super::{SILENCE, Stage, WEB, destination, namespace, pod, policy};

/// Pods of namespace `x` may be reached by Pods with the label `app=client` of any namespace.
pub(super) const CLIENTS: &str = "in x: podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: client}}}]}]";

pub(crate) fn np17_labels_of_pods_and_namespaces_change() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy("clients", CLIENTS))?;
    stage.check("at first", "here>a; there>a; b>a no; c>a no")?;
    let (mut b, mut here) = (pod("b")?, pod("here")?);
    b["metadata"]["labels"] = json!({"app": "client", "new": "label"});
    here["metadata"]["labels"] = json!({});
    stage.cluster.apply(&[b.clone(), here])?;
    stage.check("other labels", "b>a; here>a no; there>a; a>b no")?;
    stage.apply(&policy(
        "clients",
        "in x: podSelector: {matchLabels: {new: label}}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: green}}}]}]",
    ))?;
    stage.check("another policy", "b>a; here>a; here>b no; there>b no")?;
    stage.cluster.apply(&[namespace("z", "team: green")?])?;
    stage.check("a namespace with another label", "there>b; here>b no")?;
    stage.cluster.apply(&[namespace("z", "team: red")?, pod("b")?])?;
    stage.check(
        "a Pod that is not selected any more",
        "there>b; here>b; b>a",
    )
}

/// NP19: a Pod that nobody has told of yet is cut off, once there is a policy. It is not when there is none.
pub(crate) fn np19_unknown_pods_are_cut_off() -> Result<()> {
    let mut stage = Stage::open()?;
    let b = pod("b")?;
    stage.cluster.change(vec![delete(&b)?])?;
    stage.check("no policy", "a>b; b>c; here>b")?;
    stage.apply(&policy(
        "other",
        "in z: podSelector: {matchLabels: {app: nobody}}",
    ))?;
    stage.check(
        "a policy of another namespace",
        "a>b no; b>c no; here>b/udp no; a>here; c>a; node1>b",
    )?;
    stage.cluster.apply(&[b])?;
    stage.check("it is known", "a>b; b>c; here>b/udp")
}

/// NP19: nodes close their unknown Pods until the control plane has read policies, and open them if there are none.
pub(crate) fn np19_nodes_open_when_there_are_no_policies() -> Result<()> {
    let mut stage = Stage::unread()?;
    stage.check("nobody knows", "a>b no; b>c no; here>b/udp no; node1>b")?;
    stage.cluster.read_policies()?;
    // That there is nothing is no revision for which the cluster could wait.
    eventually(DEADLINE, "they are open", || {
        stage.check("there are none", "a>b; b>c; here>b/udp")
    })
}

/// NP19: a node's ranges follow its Node object, whatever else changes.
pub(crate) fn np19_a_new_range_is_closed_at_once() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.cluster.change(vec![delete(&pod("b")?)?])?;
    let nobody = "in z: podSelector: {matchLabels: {app: nobody}}";
    stage.apply(&policy("other", nobody))?;
    let (here, mut moved) = (node(1), node(1));
    moved["spec"] = json!({"podCIDRs": ["10.99.0.0/24", "fd99::/64"]});
    for (node, lines) in [
        (&moved, "a>b; here>b/udp"),
        (&here, "a>b no; here>b/udp no"),
    ] {
        stage.cluster.apply(std::slice::from_ref(node))?;
        stage.check("the node's ranges changed", lines)?;
    }
    Ok(())
}

/// NP18: of two Pods with one address the live one counts, and a finished one is nobody.
pub(crate) fn np18_addresses_pass_to_other_pods() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy("clients", CLIENTS))?;
    let here = pod("here")?;
    let mut done = here.clone();
    done["status"]["phase"] = json!("Succeeded");
    let mut heir = pod("here")?;
    heir["metadata"]["name"] = json!("heir");
    heir["metadata"]["labels"] = json!({"app": "heir"});
    stage.check("at first", "here>a")?;
    stage.cluster.apply(&[done.clone(), heir.clone()])?;
    stage.check("its address is another Pod's", "here>a no; there>a")?;
    stage.cluster.change(vec![delete(&done)?])?;
    stage.check("the old Pod is gone", "here>a no; there>a")?;
    stage.cluster.apply(&[here])?;
    stage.cluster.change(vec![delete(&heir)?])?;
    stage.check("the new Pod is gone", "here>a; there>a")
}

/// A connection on which one end asks and the other answers within a time.
pub(super) type Held = Box<dyn FnMut(Duration) -> Result<()>>;

pub(super) fn session(stage: &Stage, from: &str, to: &str, family: Family) -> Result<Held> {
    let mut session = Probe::tcp(destination(to, WEB, family)?).open(stage.ns(from)?)?;
    Ok(Box::new(move |timeout| session.echo(timeout)))
}

fn ping(stage: &Stage, from: &str, to: &str, family: Family) -> Result<Held> {
    let mut ping = Ping::open(stage.ns(from)?, destination(to, WEB, family)?.ip())?;
    ping.echo(DEADLINE)?;
    Ok(Box::new(move |timeout| ping.echo(timeout)))
}

/// Waits until a connection is cut; the cut follows the commit.
fn is_cut(what: &str, held: &mut Held) -> Result<()> {
    let started = Instant::now();
    while held(SILENCE).is_ok() {
        ensure!(started.elapsed() < DEADLINE, "{what} goes on");
    }
    ensure!(held(SILENCE).is_err(), "{what} goes on later");
    Ok(())
}

/// NP13: what is denied now is cut, from both sides and for good; everything else goes on.
pub(crate) fn np13_connections_that_are_denied_now_are_cut() -> Result<()> {
    let mut stage = Stage::open()?;
    let mut sessions = Vec::new();
    for family in Family::ALL {
        for (from, to, goes_on) in [
            ("here", "a", true),
            ("there", "svc1", true),
            ("c", "a", false),
            ("b", "svc1", false),
            ("a", "c", true),
            ("node1", "a", true),
        ] {
            sessions.push((from, to, goes_on, session(&stage, from, to, family)?));
        }
        for (from, to, goes_on) in [("here", "a", true), ("c", "a", false), ("a", "c", true)] {
            sessions.push((from, to, goes_on, ping(&stage, from, to, family)?));
        }
    }
    stage.apply(&policy("clients", CLIENTS))?;
    for (from, to, goes_on, session) in &mut sessions {
        if *goes_on {
            session(DEADLINE)?;
        } else {
            is_cut(&format!("{from} to {to}"), session)?;
        }
    }
    stage.delete(&policy("clients", CLIENTS))?;
    stage.check("without the policy", "c>a; b>a")
}

/// NP13, NP18: a connection does not pass to the Pod that gets its peer's address, however much later.
pub(crate) fn np13_connections_do_not_pass_to_heirs() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy("clients", CLIENTS))?;
    let mut held = Vec::new();
    for family in Family::ALL {
        held.push(("connection", session(&stage, "there", "a", family)?));
        held.push(("ping", ping(&stage, "there", "a", family)?));
    }
    let there = pod("there")?;
    stage.cluster.change(vec![delete(&there)?])?;
    stage.check("its address is nobody's", "there>a no; here>a")?;
    let mut heir = there;
    heir["metadata"]["name"] = json!("heir");
    heir["metadata"]["labels"] = json!({"app": "heir"});
    stage.cluster.apply(&[heir])?;
    for (what, held) in &mut held {
        is_cut(what, held)?;
    }
    stage.check("another Pod has its address", "there>a no; here>a")
}

/// What others do to the tables is repaired, and a table that is deleted comes back.
pub(crate) fn other_programs_change_the_tables() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy("clients", CLIENTS))?;
    let node = stage.ns("node1")?.clone();
    for damage in [
        "flush set ip kplane-policy isolated-ingress; flush set ip6 kplane-policy isolated-ingress",
        "delete table ip kplane-policy; delete table ip6 kplane-policy",
        "flush chain ip kplane-policy forward; flush chain ip6 kplane-policy forward",
        "flush ruleset",
    ] {
        for command in damage.split("; ") {
            // From Linux 6.9 on, the kernel lets nobody but the agent change its tables.
            if let Err(refused) = nft(&node, command) {
                let refused = format!("{refused:#}");
                ensure!(refused.contains("not permitted"), "{command}: {refused}");
            }
        }
        eventually(DEADLINE, damage, || {
            let wrong = stage.wrong("b>a no; here>a; c>b no; a>here; here>svc1")?;
            ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
            Ok::<_, anyhow::Error>(())
        })?;
    }
    Ok(())
}

/// No verdict is wrong while an agent restarts, policies, labels and Pods change.
pub(crate) fn no_verdict_is_wrong_while_everything_changes() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy("clients", CLIENTS))?;
    let pace = Pace {
        threads: 1,
        think: Duration::from_millis(1),
    };
    let start = |from: &str, family| {
        let probe = Probe::tcp(destination("a", WEB, family)?);
        Load::start(stage.ns(from)?, probe, pace)
    };
    let allowed = [start("here", Family::V4)?, start("there", Family::V6)?];
    let denied = Family::ALL.map(|family| {
        let probe = Probe::udp(destination("a", WEB, family)?).timeout(Duration::from_millis(2));
        stage.ns("c").and_then(|ns| Flood::start(ns, probe))
    });
    let [v4, v6] = denied;
    let denied = [v4?, v6?];
    for round in 0..60 {
        let others = format!(
            "in x: podSelector: {{}}, ingress: [{{from: [{{podSelector: {{matchLabels: {{round: '{round}'}}}}}}, \
             {{ipBlock: {{cidr: 198.51.100.{round}/32}}}}], ports: [{{port: {}, endPort: 9000}}]}}]",
            8000 + round
        );
        stage.apply(&policy("others", &others))?;
        let mut b = pod("b")?;
        b["metadata"]["labels"] = json!({"app": "db", "round": round.to_string()});
        stage.cluster.apply(&[b.clone()])?;
        stage.cluster.change(vec![delete(&b)?])?;
        stage.cluster.apply(&[namespace("z", &format!("team: t{round}"))?])?;
        if round % 10 == 9 {
            stage.cluster.restart(&Setup::PodRanges.settings()?, &Settings::default())?;
        }
    }
    for load in allowed {
        let report = load.stop();
        ensure!(report.failed.is_empty() && report.ok() > 100, "{report}");
    }
    for flood in denied {
        let (asked, through) = flood.stop();
        ensure!(
            through == 0 && asked > 10,
            "{through} of {asked} denied probes got through"
        );
    }
    Ok(())
}

/// Reports say how many Pods of a node policies isolate.
pub(crate) fn what_nodes_enforce_is_counted() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy("clients", CLIENTS))?;
    ensure!(stage.cluster.failures().is_empty());
    let reports = stage.cluster.reports();
    let isolated: Vec<u64> = reports.iter().map(|report| report.policies[0].isolated).collect();
    ensure!(
        isolated == [2, 0],
        "{isolated:?} in {:?}",
        UnderTest::current()?
    );
    Ok(())
}

/// Probes that must not get through, one after the other.
struct Flood {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: std::thread::JoinHandle<(u64, u64)>,
}

impl Flood {
    fn start(ns: &kplane_tests::netns::NetNs, probe: Probe) -> Result<Self> {
        let stop = std::sync::Arc::<std::sync::atomic::AtomicBool>::default();
        let until = stop.clone();
        let ns = ns.clone();
        let thread = std::thread::spawn(move || {
            let (mut asked, mut through) = (0, 0);
            while !until.load(std::sync::atomic::Ordering::Relaxed) {
                asked += 1;
                let reply = matches!(probe.once(&ns), Ok(kplane_tests::client::Outcome::Reply(_)));
                through += u64::from(reply);
            }
            (asked, through)
        });
        Ok(Self { stop, thread })
    }

    fn stop(self) -> (u64, u64) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.thread.join().unwrap_or((0, 1))
    }
}
