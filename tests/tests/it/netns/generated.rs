//! Thousands of generated cases, from Kubernetes objects to packets, compared with a plain model of
//! the rules (sections (a) and (b) of kube-proxy's behaviours).
//!
//! All cases of one set of settings are Services of one world at the same time. Each had a previous
//! life, another case under the same name, so that what counts is reached by a change.

use std::collections::BTreeSet;
use std::env;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use kplane_dataplane::backend::{Kind, PacketTarget};
use kplane_model::{Cidr, Family, Protocol, Severity};
use kplane_tests::client;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use kplane_tests::support::arrival::Arrivals;
use kplane_tests::support::cluster::{Cluster, apply, delete, id};
use kplane_tests::support::model::{Asker, Case, Choice, Place, SECOND_TARGET};
use kplane_tests::support::model_fate::{Expected, Fate, Source, expect};
use kplane_tests::support::model_objects::objects;
use kplane_tests::support::model_pairs::{any, choices};
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{
    Client, Net, PATIENCE, Question, SILENCE, Seen, Setup, World, second_ip, take_address,
};

/// Set for more (or fewer) cases than [`CASES`].
const CASES_VAR: &str = "KPLANE_CASES";
/// Set to play the same cases again.
const SEED_VAR: &str = "KPLANE_SEED";
/// Set to play one case only, as a failure prints it.
const CASE_VAR: &str = "KPLANE_CASE";
/// Cases of an ordinary run.
const CASES: usize = 2_000;
/// Services of one world: addresses and node ports are made from their numbers.
const BATCH: usize = 1_000;

/// Connections made to find every endpoint: with 3 of them one stays unseen once in 10^26 times.
const MOST_TRIES: usize = 150;
/// Connections made although every endpoint has been seen, to find one that must not be reached.
const LEAST_TRIES: usize = 4;
/// Number of further connections after a lost one, none of which may be lost. All namespaces of a machine
/// share a small table of neighbours, from which another test may push an entry. And the kernel drops a
/// packet (`EPERM`) if another packet gets the same translated source port at the same moment.
const TRIES_AFTER_A_LOSS: usize = 12;
/// Packets that wait for nothing, at the same time.
const SILENT_THREADS: usize = 48;
/// Cases of a world about which a kernel that lists everything is asked.
const LISTED: usize = 40;
/// Failures that are told in full.
const REPORTED: usize = 12;

/// A case in a world.
#[derive(Clone, Copy, Debug)]
struct Play {
    /// Makes its addresses; the position in the batch, from 1.
    number: u16,
    before: Choice,
    choice: Choice,
}

pub(crate) fn generated_cases_meet_the_fate_that_the_rules_say() -> Result<()> {
    if let Ok(text) = env::var(CASE_VAR) {
        return one(&text).with_context(|| format!("{CASE_VAR}={text}"));
    }
    let seed: u64 = from_env(SEED_VAR)?.unwrap_or_else(rand::random);
    let cases = from_env(CASES_VAR)?.unwrap_or(CASES);
    let again = format!("{SEED_VAR}={seed} {CASES_VAR}={cases}");
    println!("generated: {again}");
    let mut rng = StdRng::seed_from_u64(seed ^ 1);
    let all = choices(seed, cases);
    let mut wrong = Vec::new();
    for setup in Setup::ALL {
        let ours: Vec<Choice> = all.iter().copied().filter(|c| c.case().setup == setup).collect();
        for batch in ours.chunks(BATCH) {
            let plays = (1..).zip(batch).map(|(number, choice)| Play {
                number,
                before: any(&mut rng),
                choice: *choice,
            });
            let plays: Vec<Play> = plays.collect();
            let seen = play(setup, &plays);
            wrong.extend(seen.with_context(|| format!("{setup:?}, {again}"))?);
        }
    }
    report(&wrong, all.len(), &again)
}

/// One case, written as its previous life and itself.
fn one(text: &str) -> Result<()> {
    let (before, choice) = text.split_once("then").context("it is two choices")?;
    let play_it = Play {
        number: 1,
        before: before.parse()?,
        choice: choice.parse()?,
    };
    let case = play_it.choice.case();
    println!("{case}\nexpected: {}", reported(&expect(&case)));
    let wrong = play(case.setup, &[play_it])?;
    report(&wrong, 1, "")
}

fn from_env<T: std::str::FromStr>(name: &str) -> Result<Option<T>> {
    let text = env::var(name).ok();
    let parsed = text.map(|text| text.parse().ok().with_context(|| format!("{name}={text}")));
    parsed.transpose()
}

fn report(wrong: &[String], cases: usize, seed: &str) -> Result<()> {
    ensure!(
        wrong.is_empty(),
        "{} of {cases} cases ({seed}) met another fate:\n{}",
        wrong.len(),
        wrong.iter().take(REPORTED).cloned().collect::<Vec<_>>().join("\n")
    );
    Ok(())
}

/// Plays cases of one set of settings in one world; returns what went wrong.
fn play(setup: Setup, plays: &[Play]) -> Result<Vec<String>> {
    let mut world = World::without_agents()?;
    let second = world.topology.pod_mut("c")?;
    second.serve(client::Protocol::Tcp, SECOND_TARGET)?;
    second.serve(client::Protocol::Udp, SECOND_TARGET)?;
    let mut cluster = Cluster::open(&world, setup)?;
    program(&mut cluster, plays)?;

    let expected = |play: &Play| (*play, expect(&play.choice.case()));
    let all: Vec<(Play, Expected)> = plays.iter().map(expected).collect();
    let (from_vip, usual): (Vec<_>, Vec<_>) = all
        .into_iter()
        .partition(|(play, _)| play.choice.case().asker == Asker::NodeFromVip);
    let mut wrong = observe(&world.net, &usual)?;
    // Only nftables answers at once; the other backends list everything for each question.
    let every = match UnderTest::current()?.kind() {
        Kind::Nftables => 1,
        _ => usual.len().div_ceil(LISTED),
    };
    for (play, expected) in usual.iter().step_by(every.max(1)) {
        let asked = ask_kernel(&world, *play, &expected.fate);
        wrong.extend(asked.err().map(|error| format!("{error:#}")));
    }
    // Last, because with these addresses the node has others to masquerade to.
    let node = world.topology.node("node-1")?;
    for (play, _) in &from_vip {
        let vip = play.choice.case().address(play.number).ip();
        take_address(node, vip)?;
    }
    wrong.extend(observe(&world.net, &from_vip)?);
    Ok(wrong)
}

/// Asks the kernel of the node that handles the case's packets what it does with them, as `kpctl why` does.
fn ask_kernel(world: &World, play: Play, fate: &Fate) -> Result<()> {
    let case = play.choice.case();
    if matches!(
        case.place,
        Place::LoadBalancerProxy | Place::NodePortNotAllocated | Place::UnusedPort
    ) {
        return Ok(());
    }
    let at = case.address(play.number);
    let node = world.topology.node(&format!("node-{}", case.asker.client().node()))?;
    let protocol = case.protocol;
    let target = match node.ips().contains(&at.ip()) {
        true => PacketTarget::NodePort {
            family: Family::of(at.ip()),
            protocol,
            port: at.port(),
        },
        false => PacketTarget::Address { at, protocol },
    };
    let kind = UnderTest::current()?.kind();
    let state = node.ns().run(|| kind.look_up(target).map_err(|error| anyhow!("{error}")))?;
    let inside = match case.asker {
        Asker::Outside => false,
        Asker::Node | Asker::NodeFromVip => true,
        Asker::PodHere | Asker::PodThere | Asker::Endpoint => case.setup.knows_pods(),
    };
    let listed = match &state.inside {
        Some(own) if inside => own,
        _ => &state.endpoints,
    };
    let held: BTreeSet<SocketAddr> =
        listed.iter().map(|to| SocketAddr::new(to.ip, to.port)).collect();
    let same = match fate {
        Fate::Reach { endpoints, .. } => held == *endpoints,
        Fate::Refused => held.is_empty() && state.refuses,
        Fate::Untouched => return Ok(()),
        Fate::Dropped => state.guarded || (held.is_empty() && state.drops),
    };
    ensure!(same, "{case}: the kernel says {state:?}, expected {fate:?}");
    Ok(())
}

/// All previous lives in one change, then all cases in another.
fn program(cluster: &mut Cluster, plays: &[Play]) -> Result<()> {
    let lives = |choice: fn(&Play) -> Choice| {
        let objects = plays.iter().map(move |p| objects(&choice(p).case(), p.number));
        objects.collect::<Vec<_>>().concat()
    };
    let (before, now) = (lives(|p| p.before), lives(|p| p.choice));
    cluster.apply(&before)?;
    let kept: BTreeSet<_> = now.iter().map(id).collect::<Result<_>>()?;
    let mut events = Vec::new();
    for object in &before {
        if !kept.contains(&id(object)?) {
            events.push(delete(object)?);
        }
    }
    events.extend(now.iter().map(apply).collect::<Result<Vec<_>>>()?);
    cluster.change(events)?;
    let issues = cluster.issues();
    let error = issues.iter().find(|i| i.severity == Severity::Error);
    ensure!(error.is_none(), "{error:?}");
    let failures = cluster.failures();
    ensure!(failures.is_empty(), "{failures:?}");
    Ok(())
}

/// Asks for all cases; those that can disturb each other one after the other.
fn observe(net: &Net, plays: &[(Play, Expected)]) -> Result<Vec<String>> {
    let wrong = Mutex::new(Vec::new());
    let check = |(play, expected): &(Play, Expected), arrivals: Option<&Arrivals>| {
        let watcher = Watcher {
            net,
            arrivals,
            play: *play,
            case: play.choice.case(),
            expected,
        };
        if let Err(error) = watcher.check() {
            let text = watcher.tell(&error);
            wrong.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        }
    };
    let (backend, check) = (UnderTest::current()?, &check);
    let is_quiet = |(_, expected): &&(Play, Expected)| {
        matches!(expected.fate, Fate::Dropped | Fate::Untouched)
    };
    let (quiet, loud): (Vec<_>, Vec<_>) = plays.iter().partition(is_quiet);
    let (one_way, loud): (Vec<_>, Vec<_>) = loud
        .into_iter()
        .partition(|(play, expected)| is_one_way(&play.choice.case(), expected));
    // SCTP is seen by captures, which must not overflow with other packets.
    for sctp in [false, true] {
        thread::scope(|scope| {
            for client in Client::ALL {
                let ours = loud.iter().filter(move |(play, _)| {
                    let case = play.choice.case();
                    case.asker.client() == client && (case.protocol == Protocol::Sctp) == sctp
                });
                scope.spawn(move || {
                    backend.set();
                    ours.for_each(|play| check(play, None));
                });
            }
        });
    }
    for some in quiet.chunks(SILENT_THREADS) {
        thread::scope(|scope| {
            for play in some {
                scope.spawn(move || {
                    backend.set();
                    check(play, None);
                });
            }
        });
    }
    let arrivals = Arrivals::open(net, &["a", "b", "c"])?;
    for play in one_way {
        check(play, Some(&arrivals));
    }
    Ok(wrong.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Answers of endpoints on the other node to a client outside, whose address they see, do not come
/// back by the node that chose them.
fn is_one_way(case: &Case, expected: &Expected) -> bool {
    let Fate::Reach {
        endpoints,
        source: Source::Client,
        ..
    } = &expected.fate
    else {
        return false;
    };
    let remote = |pod: &SocketAddr| {
        case.pods().iter().any(|p| p.node == 2 && p.address(case.family) == *pod)
    };
    case.asker == Asker::Outside && case.protocol != Protocol::Sctp && endpoints.iter().any(remote)
}

/// One case that is looked at.
struct Watcher<'a> {
    net: &'a Net,
    /// For packets that are not answered.
    arrivals: Option<&'a Arrivals>,
    play: Play,
    case: Case,
    expected: &'a Expected,
}

impl Watcher<'_> {
    fn check(&self) -> Result<()> {
        match &self.expected.fate {
            Fate::Refused => self.check_silence(PATIENCE, "refused", Seen::is_refused),
            Fate::Dropped => self.check_silence(SILENCE, "dropped", Seen::is_dropped),
            Fate::Untouched => {
                let missed = |seen: &Seen| !matches!(seen, Seen::Hit { .. });
                self.check_silence(SILENCE, "left alone", missed)
            }
            Fate::Reach {
                endpoints,
                source,
                sticky,
            } => self.check_reach(endpoints, *source, *sticky),
        }
    }

    fn check_silence(&self, timeout: Duration, wanted: &str, is: fn(&Seen) -> bool) -> Result<()> {
        let question = self.question(&self.case);
        let mut seen = question.timeout(timeout).ask(self.net)?;
        if !is(&seen) && seen == Seen::Silent {
            // A refusal may be late on a busy machine, an answer to another packet is not.
            seen = question.ask(self.net)?;
        }
        ensure!(is(&seen), "{question}: {seen}, not {wanted}");
        Ok(())
    }

    fn check_reach(
        &self,
        wanted: &BTreeSet<SocketAddr>,
        source: Source,
        sticky: bool,
    ) -> Result<()> {
        let mut missing = wanted.clone();
        let mut hit = BTreeSet::new();
        let mut wrong = None;
        let (mut tries, mut least) = (0, LEAST_TRIES);
        let question = self.question(&self.case);
        self.repeat(&question, |seen| {
            tries += 1;
            if seen.is_dropped() && least == LEAST_TRIES {
                least += TRIES_AFTER_A_LOSS;
                return true;
            }
            wrong = self.complaint(&seen, wanted, source);
            if let Seen::Hit { endpoint, .. } = seen {
                missing.remove(&endpoint);
                hit.insert(endpoint);
            }
            let enough = tries >= least && (sticky || missing.is_empty());
            wrong.is_none() && !enough && tries < MOST_TRIES
        })?;
        ensure!(wrong.is_none(), "{question}: {}", wrong.unwrap_or_default());
        if sticky {
            ensure!(hit.len() == 1, "{question}: A11: reached {hit:?}, not one");
            return self.check_shared(wanted, &hit);
        }
        ensure!(missing.is_empty(), "{question}: never reached {missing:?}");
        Ok(())
    }

    /// A11: another address of the ServicePort leads a client to the same endpoint, if all that may
    /// answer here may answer there. (Where only some may, kube-proxy leads to those as well.)
    fn check_shared(
        &self,
        wanted: &BTreeSet<SocketAddr>,
        hit: &BTreeSet<SocketAddr>,
    ) -> Result<()> {
        let mut other = self.case;
        let Some(place) = other.place.elsewhere() else {
            return Ok(());
        };
        other.place = place;
        let expected = expect(&other);
        let shared = match &expected.fate {
            Fate::Reach { endpoints, .. } => wanted.is_subset(endpoints),
            _ => false,
        };
        // Answers to load-balancer IPs do not come back but through a node that masqueraded.
        let answered = self.case.asker != Asker::NodeFromVip && !is_one_way(&other, &expected);
        if !shared || !answered || self.arrivals.is_some() {
            return Ok(());
        }
        let question = self.question(&other);
        let seen = question.ask(self.net)?;
        let good = matches!(seen, Seen::Hit { endpoint, .. } if hit.contains(&endpoint));
        ensure!(
            good,
            "{question}: A11: {seen}, not {hit:?} as at another address"
        );
        Ok(())
    }

    fn question(&self, case: &Case) -> Question {
        let to = case.address(self.play.number);
        let question = Question::new(case.asker.client(), case.protocol, to);
        question.source(self.case.source(self.play.number))
    }

    fn repeat(
        &self,
        question: &Question,
        mut go_on: impl FnMut(Seen) -> bool + Send,
    ) -> Result<()> {
        match self.arrivals {
            None => question.repeat(self.net, go_on),
            Some(arrivals) => {
                while go_on(arrivals.ask(self.net, question)?) {}
                Ok(())
            }
        }
    }

    /// What is wrong with one outcome.
    fn complaint(
        &self,
        seen: &Seen,
        wanted: &BTreeSet<SocketAddr>,
        source: Source,
    ) -> Option<String> {
        let Seen::Hit {
            endpoint,
            source: ip,
        } = seen
        else {
            return Some(format!("{seen}, not one of {wanted:?}"));
        };
        if !wanted.contains(endpoint) {
            return Some(format!("{seen}, not one of {wanted:?}"));
        }
        let own = self.case.source(self.play.number);
        // A15: hairpin.
        let masqueraded = source == Source::Node || endpoint.ip() == own;
        let right = match (masqueraded, self.case.asker) {
            (true, Asker::NodeFromVip) => is_node_1(*ip),
            (true, asker) => asker.client().is_masqueraded(*ip),
            (false, _) => *ip == own,
        };
        let verb = if masqueraded { "masqueraded" } else { "kept" };
        (!right).then(|| format!("{seen}, source not {verb}"))
    }

    fn tell(&self, error: &anyhow::Error) -> String {
        let Play { before, choice, .. } = self.play;
        format!(
            "* {case}\n  expected: {expected}\n  seen: {error:#}\n  before: {life}\n  only this: \
             {CASE_VAR}={before}then{choice} cargo test -p kplane-tests --test it -- netns generated",
            case = self.case,
            expected = reported(self.expected),
            life = before.case(),
        )
    }
}

/// Whether it is an address of node-1's, load-balancer addresses included.
fn is_node_1(ip: IpAddr) -> bool {
    let family = Family::of(ip);
    let vips = ["198.19.0.0/16", "fd96:0:0:2::/64"][family as usize];
    let vip = vips.parse().is_ok_and(|vips: Cidr| vips.contains(ip));
    vip || ip == second_ip(family) || ip == kplane_tests::support::node_ip(1, family)
}

fn reported(expected: &Expected) -> String {
    let fate = match &expected.fate {
        Fate::Reach {
            endpoints,
            source,
            sticky,
        } => {
            let whom = match source {
                Source::Client => "as the client",
                Source::Node => "as the node",
            };
            let stays = if *sticky { ", always the same" } else { "" };
            format!("{endpoints:?} reached {whom}{stays}")
        }
        Fate::Refused => "refused".to_owned(),
        Fate::Dropped => "dropped".to_owned(),
        Fate::Untouched => "left alone".to_owned(),
    };
    format!("{fate} ({})", expected.ids.join(", "))
}

/// The cases are the same for a seed, all pairs are there, and no two cases are the same.
pub(crate) fn cases_are_the_same_for_a_seed_and_hold_every_pair() -> Result<()> {
    let rows = choices(7, 0);
    ensure!(rows == choices(7, 0), "not the same");
    println!("{} cases hold every pair", rows.len());
    let largest = Choice::SIZES.iter().max().copied().unwrap_or(0);
    ensure!(rows.len() >= largest * largest / 2, "{}", rows.len());
    for one in 0..Choice::PARAMETERS {
        for other in one + 1..Choice::PARAMETERS {
            for (a, b) in
                (0..Choice::SIZES[one]).flat_map(|a| (0..Choice::SIZES[other]).map(move |b| (a, b)))
            {
                let possible = Choice::may_go_together((one, a), (other, b));
                let held = rows.iter().any(|row| row.0[one] == a && row.0[other] == b);
                ensure!(held == possible, "{one}={a} {other}={b}: {held}");
            }
        }
    }
    let many = choices(7, 1_000);
    let different: BTreeSet<Choice> = many.iter().copied().collect();
    ensure!(many.len() == 1_000 && different.len() == 1_000);
    let text = many[0].to_string();
    ensure!(text.parse::<Choice>()? == many[0], "{text}");
    Ok(())
}
