//! Rounds: with each configuration both proxies program equal worlds, and all packets are played.

use std::collections::BTreeMap;
use std::env;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use kplane_model::Family;
use kplane_tests::privilege::need_tools;
use serde_json::{Value, json};

use crate::conformance::api::Api;
use crate::conformance::chains;
use crate::conformance::compare::{Compared, Verdict};
use crate::conformance::expected::{BY_CHANCE, DIFFERENCES, Difference};
use crate::conformance::proxy::{Configuration, Mode};
use crate::conformance::scenario::{Scenario, Step, admissible};
use crate::conformance::stand::{Kept, Stand};
use crate::conformance::{generated, text};
use kplane_tests::support::Setup;
use kplane_tests::support::cluster::node;
use kplane_tests::support::fate::{Ends, Packet};
use kplane_tests::support::objects::{ready_in, service, with_endpoints, with_pods};
use kplane_tests::support::play::{ALONE, QUICK, THOROUGH, play};
use kplane_tests::support::proxy::Proxy;

/// Set to play only scenarios whose names hold this.
pub(crate) const ONLY_VAR: &str = "KPLANE_SCENARIO";
/// Number of the first Service by which is seen that everything before is programmed.
const FIRST_SENTINEL: u16 = 2_000;
/// Number of the Service by which is seen that a node knows its zone.
const ZONE_SENTINEL: u16 = 1_999;
/// How often kube-proxy may be started until it does.
const STARTS: usize = 8;
/// How long a proxy may take to cut flows that a change made stale, on a busy machine.
const STALE: Duration = Duration::from_secs(30);
/// Differences that are told in full.
const REPORTED: usize = 40;

/// What came out so far.
struct Tally {
    scenarios: usize,
    packets: usize,
    equal: usize,
    /// By index of [`DIFFERENCES`].
    expected: BTreeMap<usize, usize>,
    unexpected: Vec<String>,
    sentinels: u16,
    /// Scenarios that are equal are only counted.
    quiet: bool,
    /// Of the differences those are told.
    mode: Mode,
}

/// The API server, for all rounds.
struct Bench {
    api: Api,
    mode: Mode,
    only: Option<String>,
}

/// kube-proxy and kplane are given the same, and every packet meets the same fate with both.
pub(crate) fn nftables() -> Result<()> {
    the_same_packets_meet_the_same_fate(Mode::Nftables)
}

/// The same.
pub(crate) fn iptables() -> Result<()> {
    need_tools(&["iptables-nft"])?;
    the_same_packets_meet_the_same_fate(Mode::Iptables)
}

fn the_same_packets_meet_the_same_fate(mode: Mode) -> Result<()> {
    mode.under_test().set();
    let start = Instant::now();
    let only = env::var(ONLY_VAR).ok();
    let is_wanted = |s: &Scenario| {
        let named = |only: &String| s.steps[0].name.contains(only);
        only.as_ref().is_none_or(named)
    };
    let mut all = generated::scenarios();
    all.extend(text::scenarios()?);
    all.retain(is_wanted);
    let (changes, all): (Vec<_>, Vec<_>) = all.into_iter().partition(Scenario::changes);
    let bench = Bench {
        api: Api::start()?,
        mode,
        only,
    };
    println!("API server ready after {:.1?}", start.elapsed());
    bench.prepare(&all)?;
    println!("objects written after {:.1?}", start.elapsed());
    let mut tally = Tally {
        scenarios: all.len() + changes.len(),
        quiet: bench.only.is_none(),
        ..Tally::new(mode)
    };
    for configuration in rounds(mode) {
        let setup = configuration.setup;
        let ours: Vec<&Scenario> = all.iter().filter(|s| s.is_played_with(setup)).collect();
        let ours = if configuration.compat {
            bench.remove(all.iter().filter(|s| s.steps[0].name == BY_CHANCE))?;
            ours.into_iter().filter(|s| s.is_always()).collect()
        } else {
            ours
        };
        let steps: Vec<&Step> = ours.iter().flat_map(|s| &s.steps).collect();
        bench.round(&configuration, &steps, &changes, &mut tally)?;
        let name = configuration.name();
        println!("{name} over after {:.1?}", start.elapsed());
    }
    tally.print();
    tally.judge(bench.only.is_none())
}

/// With iptables those settings that make other rules, and kube-proxy's own layout with the first.
fn rounds(mode: Mode) -> Vec<Configuration> {
    let setups = match mode {
        Mode::Nftables => &Setup::ALL[..],
        Mode::Iptables => &[
            Setup::PodRanges,
            Setup::NoPodRanges,
            Setup::MasqueradeAll,
            Setup::PodInterfaces,
        ],
    };
    let with = |setup, compat| Configuration {
        mode,
        setup,
        compat,
        node_port_addresses: Vec::new(),
    };
    let mut rounds: Vec<_> = setups.iter().map(|setup| with(*setup, false)).collect();
    if mode == Mode::Iptables {
        rounds.push(with(Setup::PodRanges, true));
    }
    rounds
}

impl Bench {
    /// Nodes and the objects of all scenarios.
    fn prepare(&self, scenarios: &[Scenario]) -> Result<()> {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "test"}});
        self.api.apply(&[namespace, node(1), node(2)])?;
        let in_each_zone = [("a", ready_in("zone-1")), ("c", ready_in("zone-2"))];
        let zoned = with_endpoints(service(ZONE_SENTINEL), &in_each_zone);
        self.write(zoned)?;
        let steps = scenarios.iter().flat_map(|s| &s.steps);
        let lists: Vec<&[Value]> = steps.map(|step| &*step.objects).collect();
        self.api.apply_lists(&lists)
    }

    fn write(&self, objects: Vec<Value>) -> Result<()> {
        let objects: Vec<Value> = objects.into_iter().map(admissible).collect();
        self.api.apply(&objects)
    }

    /// Deletes the objects of scenarios.
    fn remove<'a>(&self, scenarios: impl Iterator<Item = &'a Scenario>) -> Result<()> {
        let steps = scenarios.flat_map(|s| &s.steps);
        let objects: Vec<Value> = steps.flat_map(|step| step.objects.clone()).collect();
        self.api.delete(&objects)
    }

    /// Waits until both proxies have programmed everything written so far.
    fn synced(&self, stands: &mut [Stand], tally: &mut Tally) -> Result<()> {
        let number = FIRST_SENTINEL + tally.sentinels;
        tally.sentinels += 1;
        self.write(with_pods(service(number), &["a", "c"]))?;
        on_each(stands, |stand| stand.wait(number)).map(drop)
    }

    /// Starts kube-proxy again until it knows the zones of its nodes. It looks at the zone when it hears of
    /// its Node, and if that comes before the part that asks for zones has registered, it goes on without
    /// one until the label changes (B9, `NodeTopologyConfig` of v1.36).
    fn until_zones_are_known(
        &self,
        stands: &mut [Stand],
        configuration: &Configuration,
        tally: &mut Tally,
    ) -> Result<()> {
        for _ in 0..STARTS {
            let [kube_proxy, kplane] = stands else {
                bail!("two stands");
            };
            ensure!(kplane.knows_zones(ZONE_SENTINEL)?, "kplane knows no zones");
            if kube_proxy.knows_zones(ZONE_SENTINEL)? {
                return Ok(());
            }
            println!("kube-proxy missed the zone of its node and is started again");
            kube_proxy.stop()?;
            kube_proxy.start(Proxy::KubeProxy, &self.api, configuration)?;
            self.synced(stands, tally)?;
        }
        bail!("kube-proxy missed the zone of its node {STARTS} times")
    }

    fn round(
        &self,
        configuration: &Configuration,
        steps: &[&Step],
        changes: &[Scenario],
        tally: &mut Tally,
    ) -> Result<()> {
        let open = |proxy| Stand::open(proxy, &self.api, configuration);
        let mut stands = Proxy::BOTH.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        self.synced(&mut stands, tally)?;
        self.until_zones_are_known(&mut stands, configuration, tally)?;
        if configuration.compat {
            chains::c2_chains_are_those_of_a_running_kube_proxy(&stands)?;
        }
        let round = configuration.name();
        let all = packets(steps).into_iter();
        let (from_vip, usual): (Vec<_>, Vec<_>) = all.partition(|(_, p)| is_from_vip(p));
        let mut compared = compare(&mut stands, &usual)?;
        // Last, because with these addresses the node has others to masquerade to.
        let sources: Vec<Packet> = from_vip.iter().map(|(_, packet)| *packet).collect();
        for stand in &stands {
            stand.add_sources(&sources)?;
        }
        compared.extend(compare(&mut stands, &from_vip)?);
        tally.add(&round, steps, &compared);
        if configuration.setup == Setup::PodRanges && !configuration.compat {
            self.play(changes, &mut stands, &round, tally)?;
        }
        Ok(())
    }

    /// Plays what changes, one step of all at a time.
    fn play(
        &self,
        changes: &[Scenario],
        stands: &mut [Stand],
        round: &str,
        tally: &mut Tally,
    ) -> Result<()> {
        let most = changes.iter().map(|change| change.steps.len()).max();
        for index in 0..most.unwrap_or_default() {
            let steps: Vec<&Step> =
                changes.iter().filter_map(|change| change.steps.get(index)).collect();
            let gone: Vec<Value> = steps.iter().flat_map(|step| step.gone.clone()).collect();
            if !gone.is_empty() {
                self.api.delete(&gone)?;
            }
            let objects = steps.iter().flat_map(|step| step.objects.clone());
            self.api.apply(&objects.collect::<Vec<_>>())?;
            self.synced(stands, tally)?;
            on_each(stands, Stand::change_ports)?;
            let kept = steps.iter();
            let kept = kept.flat_map(|step| step.kept.iter().map(|kept| (*step, kept)));
            let mut compared = self.kept(stands, &kept.collect::<Vec<_>>())?;
            compared.extend(compare(stands, &packets(&steps))?);
            tally.add(round, &steps, &compared);
        }
        Ok(())
    }

    /// What becomes of sockets that stay open. What is stale goes soon after a change, on a busy machine
    /// later.
    fn kept<'a>(
        &self,
        stands: &mut [Stand],
        kept: &[(&'a Step, &Kept)],
    ) -> Result<Vec<Compared<'a>>> {
        let mut fates = |some: &[Kept]| two(on_each(stands, |stand| stand.ask_kept(some))?);
        let all: Vec<Kept> = kept.iter().map(|(_, kept)| **kept).collect();
        let [kube_proxy, kplane] = fates(&all)?;
        let first = kept.iter().zip(kube_proxy).zip(kplane);
        let mut compared: Vec<Compared<'a>> = first
            .map(|(((step, kept), kube_proxy), kplane)| Compared {
                mode: self.mode,
                step,
                packet: Packet::new(kept.question()),
                kube_proxy,
                kplane,
            })
            .collect();
        let begin = Instant::now();
        loop {
            let doubtful = doubtful(&compared);
            if doubtful.is_empty() || begin.elapsed() > STALE {
                return Ok(compared);
            }
            let some: Vec<Kept> = doubtful.iter().map(|n| all[*n]).collect();
            let [kube_proxy, kplane] = fates(&some)?;
            for ((n, kube_proxy), kplane) in doubtful.into_iter().zip(kube_proxy).zip(kplane) {
                (compared[n].kube_proxy, compared[n].kplane) = (kube_proxy, kplane);
            }
        }
    }
}

fn packets<'a>(steps: &[&'a Step]) -> Vec<(&'a Step, Packet)> {
    let of = |step: &&'a Step| {
        let step = *step;
        step.packets.iter().map(move |packet| (step, *packet))
    };
    steps.iter().flat_map(of).collect()
}

fn is_from_vip(packet: &Packet) -> bool {
    let question = packet.question;
    let usual = question.client.source(Family::of(question.source));
    question.source != usual && !question.source.is_loopback()
}

/// Plays packets in both worlds at once, and again where fates differ: once more together, and then
/// each alone.
fn compare<'a>(stands: &mut [Stand], packets: &[(&'a Step, Packet)]) -> Result<Vec<Compared<'a>>> {
    let mode = stands.first().context("two stands")?.mode;
    let mut both = |packets: &[Packet], effort| -> Result<[Vec<Ends>; 2]> {
        let fates = on_each(stands, |stand| play(&stand.scene(), packets, effort))?;
        two(fates)
    };
    let plain: Vec<Packet> = packets.iter().map(|(_, packet)| *packet).collect();
    let [kube_proxy, kplane] = both(&plain, QUICK)?;
    let first = packets.iter().zip(kube_proxy).zip(kplane);
    let mut all: Vec<Compared<'a>> = first
        .map(|(((step, packet), kube_proxy), kplane)| Compared {
            mode,
            step,
            packet: *packet,
            kube_proxy,
            kplane,
        })
        .collect();
    let again = doubtful(&all);
    let few: Vec<Packet> = again.iter().map(|n| plain[*n]).collect();
    let [kube_proxy, kplane] = both(&few, THOROUGH)?;
    for ((n, kube_proxy), kplane) in again.into_iter().zip(kube_proxy).zip(kplane) {
        (all[n].kube_proxy, all[n].kplane) = (kube_proxy, kplane);
    }
    for n in doubtful(&all).into_iter().take(REPORTED) {
        let [kube_proxy, kplane] = both(&[plain[n]], ALONE)?;
        let (one, other) = (kube_proxy.into_iter().next(), kplane.into_iter().next());
        (all[n].kube_proxy, all[n].kplane) = (one.unwrap_or_default(), other.unwrap_or_default());
    }
    Ok(all)
}

/// Which fates differ and should not.
fn doubtful(all: &[Compared<'_>]) -> Vec<usize> {
    let differs = |n: &usize| all[*n].verdict() == Verdict::Unexpected;
    (0..all.len()).filter(differs).collect()
}

/// Of kube-proxy and of kplane.
fn two<T>(both: Vec<T>) -> Result<[T; 2]> {
    both.try_into().map_err(|_| anyhow!("two proxies"))
}

/// Does something for all stands at the same time.
fn on_each<T: Send>(
    stands: &mut [Stand],
    act: impl Fn(&mut Stand) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    thread::scope(|scope| {
        let act = &act;
        let threads: Vec<_> = stands
            .iter_mut()
            .map(|stand| (stand.proxy, scope.spawn(move || act(stand))))
            .collect();
        let join = |(proxy, thread): (Proxy, thread::ScopedJoinHandle<'_, Result<T>>)| {
            let result = thread.join().map_err(|_| anyhow!("a thread panicked"))?;
            result.context(proxy.name())
        };
        threads.into_iter().map(join).collect()
    })
}

impl Tally {
    fn new(mode: Mode) -> Self {
        Self {
            scenarios: 0,
            packets: 0,
            equal: 0,
            expected: BTreeMap::new(),
            unexpected: Vec::new(),
            sentinels: 0,
            quiet: false,
            mode,
        }
    }

    /// The differences that are meant in this mode, with their indices.
    fn differences(&self) -> impl Iterator<Item = (usize, &'static Difference)> {
        let mode = self.mode;
        DIFFERENCES
            .iter()
            .enumerate()
            .filter(move |(_, difference)| difference.is_of(mode))
    }

    fn add(&mut self, round: &str, steps: &[&Step], compared: &[Compared<'_>]) {
        for step in steps {
            let ours: Vec<_> = compared.iter().filter(|c| c.step.name == step.name).collect();
            let mut ids: Vec<&str> = Vec::new();
            let mut wrong = 0;
            for one in &ours {
                self.packets += 1;
                match one.verdict() {
                    Verdict::Equal => self.equal += 1,
                    Verdict::Expected(index) => {
                        *self.expected.entry(index).or_default() += 1;
                        ids.push(DIFFERENCES[index].id);
                    }
                    Verdict::Unexpected => {
                        wrong += 1;
                        self.unexpected.push(one.tell(round));
                    }
                }
            }
            ids.dedup();
            let outcome = match wrong {
                // Hundreds of lines that all is well would hide the others.
                0 if ids.is_empty() && self.quiet => continue,
                0 if ids.is_empty() => "equal".to_owned(),
                0 => format!("differs as meant: {}", ids.join(", ")),
                _ => format!("{wrong} DIFFER"),
            };
            println!("{round}: {}: {} packets, {outcome}", step.name, ours.len());
        }
    }

    fn print(&self) {
        println!("\n{:<12}{:>8}", "scenarios", self.scenarios);
        println!("{:<12}{:>8}", "packets", self.packets);
        println!("{:<12}{:>8}", "equal", self.equal);
        for (index, difference) in self.differences() {
            let count = self.expected.get(&index).copied().unwrap_or_default();
            println!("{:<12}{count:>8}  {}", difference.id, difference.reason);
        }
        println!("{:<12}{:>8}", "unexpected", self.unexpected.len());
    }

    /// Fails when something differs that should not, or no longer differs though it is said to.
    fn judge(&self, complete: bool) -> Result<()> {
        let reported: Vec<&str> =
            self.unexpected.iter().take(REPORTED).map(String::as_str).collect();
        ensure!(
            reported.is_empty(),
            "{} packets meet another fate with kplane:\n{}",
            self.unexpected.len(),
            reported.join("\n")
        );
        for (index, difference) in self.differences() {
            let met = !complete || !difference.always || self.expected.contains_key(&index);
            ensure!(
                met,
                "{} no longer differs: {}",
                difference.id,
                difference.reason
            );
        }
        Ok(())
    }
}
