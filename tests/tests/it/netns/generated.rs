//! Thousands of generated cases, from Kubernetes objects to packets, compared with a plain model of
//! the rules (sections (a) and (b) of kube-proxy's behaviours).
//!
//! All cases of one set of settings are Services of one world at the same time. Each had a previous
//! life, another case under the same name, so that what counts is reached by a change.

use std::collections::BTreeSet;
use std::env;
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use kplane_dataplane::backend::Kind;
use kplane_model::Severity;
use kplane_tests::client;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use kplane_tests::support::cluster::{Cluster, apply, delete, id};
use kplane_tests::support::fate::{self, End, Ends, Packet, Source};
use kplane_tests::support::model::{Asker, Case, Choice, Place, SECOND_TARGET};
use kplane_tests::support::model_fate::{Expected, Fate, expect};
use kplane_tests::support::model_objects::objects;
use kplane_tests::support::model_pairs::{any, choices};
use kplane_tests::support::play::{self as player, ALONE, QUICK, Scene, THOROUGH};
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{Question, Setup, World, take_address};

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
            let plays: Vec<Play> = (1..)
                .zip(batch)
                .map(|(number, choice)| Play {
                    number,
                    before: any(&mut rng),
                    choice: *choice,
                })
                .collect();
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
    text.map(|text| text.parse().ok().with_context(|| format!("{name}={text}")))
        .transpose()
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
    let mut wrong = observe(&world, &usual)?;
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
    wrong.extend(observe(&world, &from_vip)?);
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
    let state = world.look_up(case.asker.client().node(), at, case.protocol)?;
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
        plays
            .iter()
            .map(move |p| objects(&choice(p).case(), p.number))
            .collect::<Vec<_>>()
            .concat()
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

/// Plays the packets of all cases, and again with more effort where another fate was seen; returns what went wrong.
fn observe(world: &World, plays: &[(Play, Expected)]) -> Result<Vec<String>> {
    let scene = Scene {
        net: &world.net,
        fabric: world.topology.fabric(),
    };
    let mut all: Vec<Asked<'_>> =
        plays.iter().map(|(play, expected)| Asked::new(*play, expected)).collect();
    for effort in [QUICK, THOROUGH, ALONE] {
        let effort = if UnderTest::current()?.refuses_late() {
            effort
        } else {
            effort.refused_at_once()
        };
        all.iter_mut().for_each(|asked| asked.seen.clear());
        // A client has chosen at the one address before it asks at the other.
        for turn in [0, 1] {
            let asking = |asked: &&mut Asked<'_>| asked.packets.len() > turn;
            let asking: Vec<_> = all.iter_mut().filter(asking).collect();
            let packets: Vec<Packet> = asking.iter().map(|asked| asked.packets[turn]).collect();
            let seen = player::play(&scene, &packets, effort)?;
            for (asked, seen) in asking.into_iter().zip(seen) {
                asked.seen.push(seen);
            }
        }
        all.retain(|asked| !asked.is_as_expected());
    }
    Ok(all.iter().map(Asked::tell).collect())
}

/// The packets of a case, and what became of them.
struct Asked<'a> {
    play: Play,
    case: Case,
    expected: &'a Expected,
    /// The case's own, and for affinity one to another address.
    packets: Vec<Packet>,
    seen: Vec<Ends>,
}

impl<'a> Asked<'a> {
    fn new(play: Play, expected: &'a Expected) -> Self {
        let case = play.choice.case();
        let packet = |case: &Case| {
            let (client, to) = (case.asker.client(), case.address(play.number));
            let question = Question::new(client, case.protocol, to);
            Packet::new(question.source(case.source(play.number)))
        };
        let other = shared(&case, expected).map(|other| packet(&other));
        Self {
            packets: [packet(&case)].into_iter().chain(other).collect(),
            play,
            case,
            expected,
            seen: Vec::new(),
        }
    }

    fn is_as_expected(&self) -> bool {
        let is_own = self.seen.first().is_some_and(|seen| self.fits(seen));
        // A11: another address leads the client to the same endpoint.
        is_own && self.seen.windows(2).all(|seen| endpoints(&seen[0]) == endpoints(&seen[1]))
    }

    fn fits(&self, seen: &Ends) -> bool {
        let refused = |end: &End| matches!(end, End::Refused | End::RefusedLate | End::Denied);
        match &self.expected.fate {
            Fate::Refused => seen.iter().all(refused),
            Fate::Dropped => seen.iter().all(|end| matches!(end, End::Silent | End::Denied)),
            Fate::Untouched => endpoints(seen).is_empty(),
            Fate::Reach {
                endpoints: wanted,
                source,
                sticky,
            } => {
                let own = self.case.source(self.play.number);
                let is_right = |end: &End| {
                    let End::Hit {
                        endpoint,
                        source: by,
                    } = end
                    else {
                        return false;
                    };
                    // A15: hairpin.
                    let is_itself = endpoint.ip() == own;
                    *by == if is_itself { Source::Node } else { *source }
                };
                let reached = endpoints(seen);
                let all = if *sticky { reached.len() == 1 } else { reached == *wanted };
                all && reached.is_subset(wanted) && seen.iter().all(is_right)
            }
        }
    }

    fn tell(&self) -> String {
        let Play { before, choice, .. } = self.play;
        let seen: Vec<String> = self.seen.iter().map(fate::reported).collect();
        format!(
            "* {case}\n  expected: {expected}\n  seen: {seen}\n  before: {life}\n  only this: \
             {CASE_VAR}={before}then{choice} cargo test -p kplane-tests --test it -- netns generated",
            case = self.case,
            expected = reported(self.expected),
            seen = seen.join(", and at another address "),
            life = before.case(),
        )
    }
}

/// The endpoints that were reached.
fn endpoints(seen: &Ends) -> BTreeSet<SocketAddr> {
    let hit = |end: &End| match end {
        End::Hit { endpoint, .. } => Some(*endpoint),
        _ => None,
    };
    seen.iter().filter_map(hit).collect()
}

/// A11: the same case at another address that must lead the client to the same endpoint, because all that may answer at the
/// one may answer at the other. (Where only some may, kube-proxy leads to those as well.)
fn shared(case: &Case, expected: &Expected) -> Option<Case> {
    let Fate::Reach {
        endpoints,
        sticky: true,
        ..
    } = &expected.fate
    else {
        return None;
    };
    let mut other = *case;
    other.place = case.place.elsewhere()?;
    match expect(&other).fate {
        // A node's answers to its load-balancer IP do not come back but through a node that masqueraded.
        Fate::Reach {
            endpoints: others, ..
        } if case.asker != Asker::NodeFromVip => endpoints.is_subset(&others).then_some(other),
        _ => None,
    }
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
                Source::Node | Source::Other(_) => "as the node",
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
