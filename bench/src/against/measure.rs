//! One contender at one size: started, left idle, and given changes.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kplane_tests::cluster::Api;
use kplane_tests::netns::NetNs;
use kplane_tests::process::Process;

use crate::against::contender::{Contender, Place};
use crate::against::first::FirstPacket;
use crate::against::kernel::Kernel;
use crate::against::packets::Packets;
use crate::against::start;
use crate::objects::{Each, Programmed, Progress, fresh};
use kplane_tests::usage::{Memory, cpu, memory, received};

/// No start and no change takes longer.
const DEADLINE: Duration = Duration::from_secs(180);
/// From the start's end until everybody has settled; kplane reads back once what it has written.
const SETTLE: Duration = Duration::from_secs(8);
/// How long idle CPU is looked at.
const IDLE: Duration = Duration::from_secs(4);
/// From a change's end to the next for kube-proxy: longer than its `minSyncPeriod` of 1 s, so that
/// no change has to wait for it. That is its best case; a change that comes sooner waits up to 1 s.
const PAUSE_KUBE_PROXY: Duration = Duration::from_millis(1_250);
/// The same for kplane, which has no such period.
const PAUSE_KPLANE: Duration = Duration::from_millis(100);

/// What was measured.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) services: u32,
    pub(crate) contender: Contender,
    /// Start of the process until the kernel holds everything.
    pub(crate) cold: Duration,
    /// CPU until then.
    pub(crate) cold_cpu: Duration,
    /// Sorted: from the beginning of the request until the kernel holds the change.
    pub(crate) from_request: Vec<Duration>,
    /// Sorted: from the API server's answer; zero where the kernel was first.
    pub(crate) from_answer: Vec<Duration>,
    /// CPU for one change, idle CPU taken off.
    pub(crate) change_cpu: Duration,
    /// Share of a core while nothing happens.
    pub(crate) idle: f64,
    /// After the changes.
    pub(crate) memory: Memory,
    /// Bytes from the API server until the kernel held everything.
    pub(crate) start_bytes: u64,
    /// And for each change.
    pub(crate) change_bytes: u64,
    pub(crate) first_packet: FirstPacket,
}

/// Who says what is programmed.
enum Judge {
    Kernel(Kernel),
    Packets(Packets),
}

impl Judge {
    /// Waits until everything is programmed after a start. Also returns the judge of changes.
    fn started(bench: &Bench<'_>, contender: Contender, node: &NetNs) -> Result<(Instant, Self)> {
        let wanted = bench.each.endpoints(bench.services);
        if contender.is_legacy() {
            let packets = Packets::from(node, bench.pods)?;
            return Ok((packets.holds(&wanted, DEADLINE)?, Self::Packets(packets)));
        }
        let held = start::holds(node, &wanted, DEADLINE)?;
        Ok((held, Self::Kernel(Kernel::follow(node)?)))
    }

    fn holds(&self, wanted: &[Programmed], deadline: Duration) -> Result<Instant> {
        match self {
            Self::Kernel(kernel) => kernel.holds(wanted, deadline),
            Self::Packets(packets) => packets.holds(wanted, deadline),
        }
    }
}

/// What there is to work with.
pub(crate) struct Bench<'a> {
    pub(crate) api: &'a Api,
    pub(crate) services: u32,
    pub(crate) each: Each,
    pub(crate) changes: u32,
    /// The link over which the contender reaches the API server.
    pub(crate) link: &'a str,
    /// Gets all packets to pods, and says nothing.
    pub(crate) pods: &'a NetNs,
    /// A node without rules.
    pub(crate) bare: &'a NetNs,
}

impl Bench<'_> {
    /// Measures one contender; afterwards the API server holds what it held before.
    pub(crate) fn measure(&self, contender: Contender, place: &Place<'_>) -> Result<Row> {
        let measured = self.run(contender, place).with_context(|| explain(contender, place.folder));
        for change in 0..self.changes {
            self.each.restore(self.api, self.service_of(change))?;
        }
        measured
    }

    fn run(&self, contender: Contender, place: &Place<'_>) -> Result<Row> {
        let title = format!("{:>6} {}", self.services, contender.name());
        let before = received(place.ns, self.link)?;
        let started = Instant::now();
        let processes = contender.start(place)?;
        let pids: Vec<u32> = processes.iter().map(|process| process.id()).collect();
        let (held, judge) = Judge::started(self, contender, place.ns)?;
        let cold = held - started;
        let cold_cpu = cpu(&pids)?;
        let start_bytes = received(place.ns, self.link)? - before;
        eprintln!("{title}: started in {:.2} s", cold.as_secs_f64());

        thread::sleep(SETTLE);
        let (cpu_before, began) = (cpu(&pids)?, Instant::now());
        thread::sleep(IDLE);
        let idle = (cpu(&pids)? - cpu_before).as_secs_f64() / began.elapsed().as_secs_f64();

        let (cpu_before, began) = (cpu(&pids)?, Instant::now());
        let bytes_before = received(place.ns, self.link)?;
        let times = self.changes(contender, &judge, &title)?;
        let used = (cpu(&pids)? - cpu_before).as_secs_f64();
        let used = (used - idle * began.elapsed().as_secs_f64()).max(0.0);
        let (mut from_request, mut from_answer): (Vec<_>, Vec<_>) = times.into_iter().unzip();
        from_request.sort();
        from_answer.sort();
        let row = Row {
            services: self.services,
            contender,
            cold,
            cold_cpu,
            from_request,
            from_answer,
            change_cpu: Duration::from_secs_f64(used / f64::from(self.changes)),
            idle,
            memory: memory(&pids)?,
            start_bytes,
            change_bytes: (received(place.ns, self.link)? - bytes_before) / u64::from(self.changes),
            first_packet: FirstPacket::measure(place.ns, self.bare, self.services, self.each)?,
        };
        stop(processes)?;
        Ok(row)
    }

    /// Changes one endpoint after the other: the times since the request and since the answer.
    fn changes(
        &self,
        contender: Contender,
        judge: &Judge,
        title: &str,
    ) -> Result<Vec<(Duration, Duration)>> {
        let pause = if contender.is_kube_proxy() { PAUSE_KUBE_PROXY } else { PAUSE_KPLANE };
        let mut progress = Progress::new(format!("{title}: changes"), self.changes);
        let mut times = Vec::new();
        for change in 0..self.changes {
            progress.show(change);
            let new = fresh(change);
            if let Judge::Kernel(kernel) = judge {
                kernel.forget(new);
            }
            let requested = Instant::now();
            let service = self.service_of(change);
            self.each.change(self.api, service, new)?;
            let answered = Instant::now();
            let wanted = Programmed {
                endpoint: new,
                service,
            };
            let held = judge.holds(&[wanted], DEADLINE)?;
            times.push((held - requested, held.saturating_duration_since(answered)));
            thread::sleep(pause);
        }
        progress.end(self.changes);
        Ok(times)
    }

    /// All over the place: 7,919 is prime.
    fn service_of(&self, change: u32) -> u32 {
        change.wrapping_mul(7_919) % self.services
    }
}

/// Ends them before the next begins: they would only take its CPU.
fn stop(processes: Vec<Process>) -> Result<()> {
    for process in processes.into_iter().rev() {
        process.terminate(DEADLINE)?;
    }
    Ok(())
}

/// The end of the contender's log, for when it does not do its work.
pub(crate) fn explain(contender: Contender, folder: &Path) -> String {
    let mut text = format!("measure {}", contender.name());
    for name in ["kube-proxy", "kp-controlplane", "kp-nodeagent"] {
        let Ok(log) = std::fs::read_to_string(folder.join(format!("{name}.log"))) else {
            continue;
        };
        let lines: Vec<&str> = log.lines().collect();
        let end = lines.len().saturating_sub(15);
        text.push_str(&format!(
            "; the end of {name}'s log:\n{}\n",
            lines[end..].join("\n")
        ));
    }
    text
}
