//! `--pod-starts`: the time from a Pod's address in the API to its NetworkPolicies in the kernel of its node.
//!
//! `kubectl get -w` says when a watcher learns of the address, `nft monitor` on each node when the kernel takes the address.
//! Both are read on this machine, by one clock.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::net::IpAddr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_rig::netns::NetNs;
use kplane_rig::real;
use kplane_rig::wait::eventually;
use serde_json::json;

use super::{DEADLINE, Hook, NAMESPACE, SERVICE, Stand};

/// The table of NetworkPolicies.
const TABLE: &str = "kplane-policy";

/// A line that a program wrote, and when. The node is that of `nft monitor`; `None` = kubectl.
struct Line {
    at: Instant,
    node: Option<String>,
    text: String,
}

/// Programs that run until this is dropped.
#[derive(Default)]
struct Followers(Vec<Child>);

impl Drop for Followers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It has ended already, at worst.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Followers {
    /// Starts a program whose lines are sent.
    fn follow(
        &mut self,
        ns: &NetNs,
        mut command: Command,
        node: Option<String>,
        lines: Sender<Line>,
    ) -> Result<()> {
        command.stdout(Stdio::piped()).stdin(Stdio::null());
        let mut child = ns.run(move || command.spawn().context("cannot start a follower"))?;
        let output = child.stdout.take().context("no standard output")?;
        self.0.push(child);
        thread::spawn(move || {
            for text in BufReader::new(output).lines().map_while(Result::ok) {
                let (at, node) = (Instant::now(), node.clone());
                if lines.send(Line { at, node, text }).is_err() {
                    return;
                }
            }
        });
        Ok(())
    }
}

/// Replaces all Pods as often as asked for, and says how long new ones waited.
pub(super) fn measure(stand: &Stand<'_>) -> Result<String> {
    let cluster = &stand.cluster;
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": { "name": "same-namespace", "namespace": NAMESPACE },
        "spec": {
            "podSelector": { "matchLabels": { "app": SERVICE } },
            "ingress": [{ "from": [{ "podSelector": {} }] }],
        },
    });
    cluster.apply(&policy.to_string())?;
    let before: BTreeSet<_> =
        cluster.api().list("Pod", Some(NAMESPACE))?.iter().flat_map(real::ips).collect();
    let (send, lines) = channel();
    let mut followers = Followers::default();
    for node in cluster.nodes() {
        let mut monitor = node.command("nft")?;
        monitor.args(["monitor", "new", "elements"]);
        let name = Some(node.name().to_owned());
        followers.follow(&node.ns()?, monitor, name, send.clone())?;
    }
    let mut pods = cluster.command("kubectl");
    let columns = "custom-columns=NODE:.spec.nodeName,IP:.status.podIP";
    pods.args(["get", "pods", "-n", NAMESPACE, "-l"]);
    pods.arg(format!("app={SERVICE}"));
    pods.args(["--watch-only", "--no-headers", "-o", columns]);
    followers.follow(cluster.ns(), pods, None, send)?;
    for _ in 0..stand.args.runs {
        let of = format!("deployment/{SERVICE}");
        cluster.kubectl(&["rollout", "restart", "-n", NAMESPACE, &of])?;
        stand.rolled()?;
        stand.deploy(Hook::None)?;
    }
    let mut story = Story::default();
    eventually(DEADLINE, "each Pod is in its node's kernel", || {
        story.read(&lines);
        story.waits(&before)
    })
    .and_then(|waits| said(&waits))
}

/// When each Pod, by its node and address, was known first, and was first in the kernel.
#[derive(Default)]
struct Story {
    known: BTreeMap<(String, IpAddr), Instant>,
    held: BTreeMap<(String, IpAddr), Instant>,
}

impl Story {
    /// Reads what the programs have written by now.
    fn read(&mut self, lines: &Receiver<Line>) {
        for Line { at, node, text } in lines.try_iter() {
            let Some(node) = node else {
                if let Some((node, ip)) = text.split_once(char::is_whitespace)
                    && let Ok(ip) = ip.trim().parse()
                {
                    self.known.entry((node.to_owned(), ip)).or_insert(at);
                }
                continue;
            };
            if text.contains(TABLE) {
                let words = text.split(|c: char| !(c.is_ascii_digit() || c == '.'));
                for ip in words.filter_map(|word| word.parse().ok()) {
                    self.held.entry((node.clone(), ip)).or_insert(at);
                }
            }
        }
    }

    /// Returns how long each Pod waited that is new, shortest first.
    fn waits(&self, before: &BTreeSet<IpAddr>) -> Result<Vec<Duration>> {
        let new = self.known.iter().filter(|((_, ip), _)| !before.contains(ip));
        let wait = |(pod, known): (&(String, IpAddr), &Instant)| {
            let held =
                self.held.get(pod).with_context(|| format!("no kernel took the Pod {pod:?}"))?;
            Ok(held.saturating_duration_since(*known))
        };
        let mut waits: Vec<_> = new.map(wait).collect::<Result<_>>()?;
        waits.sort_unstable();
        Ok(waits)
    }
}

fn said(waits: &[Duration]) -> Result<String> {
    ensure!(!waits.is_empty(), "no Pod got an address");
    let at = |percent: usize| waits[(waits.len() * percent / 100).min(waits.len() - 1)];
    Ok(format!(
        "{} Pods, from the address in the API to the policies in the kernel: 50 % {:.0?}, 90 % {:.0?}, 99 % {:.0?}, all {:.0?}\n",
        waits.len(),
        at(50),
        at(90),
        at(99),
        at(100)
    ))
}
