//! Packets that policies deny, as a node's agent tells of them.

use std::time::Duration;

use anyhow::{Result, ensure};
use kplane_dataplane::backend::Settings;
use kplane_proto::v1 as pb;
use kplane_tests::netns::NetNs;
use kplane_tests::support::Setup;
use kplane_tests::support::nft::nft;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::wait::{DEADLINE, eventually};
use tokio::runtime::{Builder, Runtime};

use super::{Stage, pod_ips, policy};

/// How soon an agent ends what a follower wanted that asks no more.
const LEASE: Duration = Duration::from_secs(30);

/// The agent of node-1, asked on a thread of its namespace as in its own process.
struct Agent {
    runtime: Runtime,
}

impl Agent {
    fn of(node: &NetNs) -> Result<Self> {
        let build = || Ok(Builder::new_multi_thread().worker_threads(1).enable_all().build()?);
        let runtime = node.run(build)?;
        Ok(Self { runtime })
    }

    fn ask(&self, stage: &Stage, follower: u64) -> Result<pb::Denials> {
        let denials = stage.cluster.denials(1)?;
        let question = pb::DenialsQuestion {
            follower,
            ..pb::DenialsQuestion::default()
        };
        let asked = self.runtime.spawn(async move { denials.answer(question).await });
        let answer = self.runtime.block_on(asked)?;
        ensure!(answer.error.is_empty(), "{}", answer.error);
        Ok(answer)
    }
}

fn sampled(node: &NetNs) -> Result<bool> {
    Ok(nft(node, "list set ip kplane-policy sampled")?.contains("elements"))
}

pub(crate) fn denied_packets_are_counted_and_followed() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy(
        "deny",
        "in x: podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress]",
    ))?;
    let node = stage.ns("node1")?.clone();
    let agent = Agent::of(&node)?;
    ensure!(agent.ask(&stage, 0)?.pods.is_empty());
    stage.check("denied", "there>a/4 no; b>c")?;
    let [a, ..] = pod_ips(1, 1);
    let [there, ..] = pod_ips(2, 9);
    let counts = agent.ask(&stage, 0)?.pods;
    ensure!(counts.len() == 1 && counts[0].packets > 0, "{counts:?}");
    ensure!(counts[0].address == a.to_string(), "{counts:?}");
    ensure!(counts[0].direction() == pb::PolicyDirection::Ingress);
    // Two follow. Each sees the packets that come from then on.
    for follower in [1, 2] {
        ensure!(agent.ask(&stage, follower)?.packets.is_empty());
    }
    eventually(DEADLINE, "the kernel logs", || match sampled(&node) {
        Ok(true) => Ok(()),
        _ => Err("no element"),
    })?;
    stage.check("followed", "there>a/4 no")?;
    for follower in [1, 2] {
        eventually(DEADLINE, "a sample", || {
            let packets = agent.ask(&stage, follower)?.packets;
            let is_its =
                |of: &pb::DeniedPacket| (&of.from, &of.to) == (&there.to_string(), &a.to_string());
            let packet = packets.first();
            ensure!(packet.is_some_and(is_its), "{packets:?}");
            Ok::<_, anyhow::Error>(())
        })?;
    }
    if UnderTest::current()? == UnderTest::Nftables {
        eventually(LEASE, "the kernel logs no more", || match sampled(&node) {
            Ok(false) => Ok(()),
            _ => Err("there is an element"),
        })?;
        agent.ask(&stage, 3)?;
        eventually(DEADLINE, "the kernel logs", || match sampled(&node) {
            Ok(true) => Ok(()),
            _ => Err("no element"),
        })?;
    }
    // Another process knows no follower.
    stage.cluster.restart(&Setup::PodRanges.settings()?, &Settings::default())?;
    ensure!(!sampled(&node)?);
    stage.check("after a restart", "there>a/4 no")
}
