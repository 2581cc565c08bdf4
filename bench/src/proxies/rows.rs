//! What is measured, and how.

use std::fs;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use kplane_tests::usage;
use kplane_tests::wait::eventually;

use crate::proxies::contender::Contender;
use crate::proxies::load::{self, Done};
use crate::proxies::place::Place;
use crate::proxies::target::Target;
use crate::proxies::udp;

/// Threads of clients with short connections, and of those with requests on connections that stay.
const CLIENTS: usize = 8;

/// Idle connections: as many as the limits of files here allow for all; socat has a process for each.
const IDLE: usize = 2_000;
const IDLE_OF_SOCAT: usize = 200;

/// UDP queries that wait for answers.
const FLOWS: usize = 64;

/// Connections with dead endpoints, and the time between two of them.
const STEADY: u32 = 400;
const APART: Duration = Duration::from_millis(5);

/// Connections whose times are compared, and the time between two of them.
const COMPARED: (u32, Duration) = (2_000, Duration::from_millis(2));

/// Connections beside them: to an endpoint that answers, and then to a silent one.
const BESIDE: (u32, Duration) = (400, Duration::from_millis(10));

/// A contender is at rest if it uses no more than this CPU in this time.
const REST: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(1));

/// Longest time until a contender is at rest.
const SETTLED: Duration = Duration::from_secs(10);

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Row {
    /// G1: bulk data of one connection.
    OneStream,
    /// G1: bulk data of eight connections.
    EightStreams,
    /// G2: short connections.
    Connections,
    /// G2: requests on connections that stay.
    Requests,
    /// G3: memory of idle connections.
    Idle,
    /// G4: queries of 64 flows.
    Flows,
    /// G4: queries, each of which is a flow of its own.
    NewFlows,
    /// G5, U37: one of two endpoints refuses.
    Refusing,
    /// G5, U38: of three endpoints one refuses, and one is silent.
    Dead,
    /// G8: connections to an endpoint that answers, beside others to one that is silent.
    Neighbour,
    /// G9: what passes: 1 = yes, 0 = no.
    Passes,
}

/// A column of numbers: its heading, and the decimals that are shown.
pub(crate) type Column = (&'static str, usize);

impl Row {
    pub(crate) fn heading(self) -> &'static str {
        match self {
            Self::OneStream => "Bulk data, 1 connection (G1)",
            Self::EightStreams => "Bulk data, 8 connections (G1)",
            Self::Connections => "New connections, each with one request (G2)",
            Self::Requests => "Requests on 8 connections that stay (G2)",
            Self::Idle => "Idle connections (G3)",
            Self::Flows => "UDP, 64 flows (G4)",
            Self::NewFlows => "UDP, each query a new flow (G4)",
            Self::Refusing => "One of 2 endpoints refuses (G5, U37)",
            Self::Dead => "Of 3 endpoints, 1 refuses and 1 is silent (G5, U38)",
            Self::Neighbour => {
                "Beside a Service whose only endpoint answers, and then is silent (G8)"
            }
            Self::Passes => "What passes: 1 = yes, 0 = no (G9)",
        }
    }

    pub(crate) fn columns(self) -> &'static [Column] {
        match self {
            Self::OneStream | Self::EightStreams => &[("Gbit/s", 1), ("CPU ms a GB", 0)],
            Self::Connections => &[("a second", 0), ("CPU µs each", 1)],
            Self::Requests | Self::Flows | Self::NewFlows => &[("a second", 0), ("CPU µs each", 2)],
            Self::Idle => &[("KiB each", 2)],
            Self::Refusing | Self::Dead => &[("failed %", 1), ("p50 ms", 2), ("p99 ms", 1)],
            Self::Passes => &[("an end of data", 0), ("a reset", 0), ("60,000 bytes", 0)],
            Self::Neighbour => &[
                ("p99 ms, it answers", 2),
                ("p99 ms, it is silent", 2),
                ("change %", 0),
            ],
        }
    }

    pub(crate) fn target(self) -> Target {
        match self {
            Self::OneStream | Self::EightStreams => Target::Sink,
            Self::Connections | Self::Neighbour | Self::Passes => Target::Once,
            Self::Requests => Target::Echo,
            Self::Idle => Target::Hold,
            Self::Flows => Target::Datagrams,
            Self::NewFlows => Target::Lookups,
            Self::Refusing => Target::Refusing,
            Self::Dead => Target::Dead,
        }
    }

    /// Whether a contender can do it, and says something by it.
    pub(crate) fn has(self, contender: Contender) -> bool {
        let is_dead = matches!(self, Self::Refusing | Self::Dead);
        if matches!(self, Self::Neighbour | Self::Passes) {
            let rivals = [Contender::Haproxy, Contender::Nginx];
            let ours = [Contender::Captured, Contender::Sockets];
            return rivals.contains(&contender) || ours.contains(&contender);
        }
        match contender {
            Contender::Direct => !is_dead && self != Self::Idle,
            Contender::Nftables => is_dead,
            Contender::Socat => !is_dead && !self.target().is_udp(),
            Contender::Haproxy => !self.target().is_udp(),
            Contender::HaproxySplice => matches!(self, Self::OneStream | Self::EightStreams),
            Contender::Captured | Contender::Sockets | Contender::Nginx => true,
        }
    }

    /// Measures a contender that runs.
    pub(crate) fn measure(self, way: &Way<'_>) -> Result<Vec<f64>> {
        match self {
            Self::OneStream => way.bulk(1),
            Self::EightStreams => way.bulk(8),
            Self::Connections => way.connections(),
            Self::Requests => way.requests(CLIENTS),
            Self::Idle => way.idle(),
            Self::Flows => way.queries(udp::flows),
            Self::NewFlows => way.queries(udp::new_flows),
            Self::Refusing | Self::Dead => way.dead(),
            Self::Neighbour => way.neighbour(),
            Self::Passes => way.passes(),
        }
    }
}

/// A contender that runs in its place.
pub(crate) struct Way<'a> {
    pub(crate) contender: Contender,
    pub(crate) place: &'a Place,
    /// The process whose CPU counts, with that of its children.
    pub(crate) pid: Option<u32>,
    pub(crate) to: SocketAddr,
    pub(crate) time: Duration,
}

impl Way<'_> {
    /// Bulk data of so many connections: Gbit/s, and milliseconds of CPU a GB.
    pub(crate) fn bulk(&self, streams: usize) -> Result<Vec<f64>> {
        let dropped = &self.place.servers.0.dropped;
        let measure = || {
            let (bytes, cpu, took) = self.window(dropped)?;
            Ok(vec![
                bytes * 8.0 / took / 1e9,
                cpu * 1e3 / (bytes / f64::from(1 << 30)),
            ])
        };
        let load = || load::streams(self.to, streams, measure);
        self.place.client.run(load)
    }

    fn connections(&self) -> Result<Vec<f64>> {
        self.repeated(CLIENTS, || Ok(()), |()| load::once(self.to))
    }

    /// Requests on so many connections that stay: how many a second, and microseconds of CPU for each.
    pub(crate) fn requests(&self, clients: usize) -> Result<Vec<f64>> {
        self.repeated(clients, || Ok(load::connect(self.to)?), load::request)
    }

    fn repeated<S>(
        &self,
        clients: usize,
        state: impl Fn() -> Result<S> + Sync + Send,
        act: impl Fn(&mut S) -> std::io::Result<()> + Sync + Send,
    ) -> Result<Vec<f64>> {
        let measure = |done: &Done| {
            let rates = self.rates(&done.ok)?;
            let failed = done.failed.load(Relaxed);
            ensure!(failed == 0, "{failed} failed");
            Ok(rates)
        };
        let load = || load::repeat(clients, state, act, measure);
        self.place.client.run(load)
    }

    fn queries(
        &self,
        load: fn(SocketAddr, usize, &Done, &dyn Fn() -> bool) -> Result<()>,
    ) -> Result<Vec<f64>> {
        let done = Done::default();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let clients = || load(self.to, FLOWS, &done, &|| stop.load(Relaxed));
        thread::scope(|scope| {
            let clients = scope.spawn(|| self.place.client.run(clients));
            thread::sleep(Duration::from_millis(300));
            let rates = self.rates(&done.ok);
            stop.store(true, Relaxed);
            clients.join().unwrap()?;
            rates
        })
    }

    /// A rate, and CPU for each.
    fn rates(&self, count: &AtomicU64) -> Result<Vec<f64>> {
        let (count, cpu, took) = self.window(count)?;
        ensure!(count > 0.0, "nothing arrived");
        Ok(vec![count / took, cpu * 1e6 / count])
    }

    /// What was counted within the time of a measurement, the CPU of the proxy in seconds, and the seconds that it took.
    fn window(&self, counter: &AtomicU64) -> Result<(f64, f64, f64)> {
        let read = || Ok::<_, anyhow::Error>((counter.load(Relaxed), self.cpu()?, Instant::now()));
        let (before, cpu_before, begun) = read()?;
        thread::sleep(self.time);
        let (after, cpu_after, ended) = read()?;
        Ok((
            (after - before) as f64,
            cpu_after - cpu_before,
            ended.duration_since(begun).as_secs_f64(),
        ))
    }

    fn idle(&self) -> Result<Vec<f64>> {
        let number = match self.contender {
            Contender::Socat => IDLE_OF_SOCAT,
            _ => IDLE,
        };
        let before = self.memory()?;
        let all = self.place.client.run(|| load::idle(self.to, number))?;
        let held = &self.place.servers.0.held;
        eventually(load::PATIENCE, "all connections have a server", || {
            let held = held.load(Relaxed);
            // The one of the attempt that showed that the contender runs may still be there.
            if held >= number as u64 { Ok(()) } else { Err(held) }
        })?;
        let after = self.memory()?;
        drop(all);
        Ok(vec![(after - before) / 1024.0 / number as f64])
    }

    fn dead(&self) -> Result<Vec<f64>> {
        let load = || Ok(load::steady(self.to, STEADY, APART));
        let seen = self.place.client.run(load)?;
        let [p50, p99] = [50, 99].map(|percent| seen.percentile(percent));
        Ok(vec![seen.failed_percent(), p50, p99])
    }

    fn neighbour(&self) -> Result<Vec<f64>> {
        let silent = self.contender.address(Target::Silent);
        let beside = |neighbour: SocketAddr| {
            thread::scope(|scope| {
                scope.spawn(|| load::steady(neighbour, BESIDE.0, BESIDE.1));
                load::steady(self.to, COMPARED.0, COMPARED.1)
            })
        };
        let load = || Ok([beside(self.to), beside(silent)]);
        let both = self.place.client.run(load)?;
        let failed = both.iter().map(|seen| seen.failed).sum::<usize>();
        ensure!(failed == 0, "{failed} failed");
        let [well, silent] = both.map(|seen| seen.percentile(99));
        Ok(vec![well, silent, (silent / well - 1.0) * 100.0])
    }

    fn passes(&self) -> Result<Vec<f64>> {
        let at = |target| self.contender.address(target);
        let has_udp = self.contender != Contender::Haproxy;
        let passes = || {
            Ok([
                load::passes_an_end(at(Target::HalfClose)),
                load::passes_a_reset(at(Target::Resets)),
                has_udp && load::passes_a_datagram(at(Target::Datagrams)),
            ])
        };
        let passes = self.place.client.run(passes)?;
        Ok(passes.map(|it| f64::from(u8::from(it))).to_vec())
    }

    /// Waits until the contender has done what it does at its start.
    pub(crate) fn settle(&self) -> Result<()> {
        eventually(SETTLED, "the contender is at rest", || {
            let before = self.cpu()?;
            thread::sleep(REST.0);
            let used = self.cpu()? - before;
            ensure!(used <= REST.1.as_secs_f64(), "it used {used} s");
            Ok(())
        })
    }

    /// The processes of the contender.
    fn pids(&self) -> Vec<u32> {
        let Some(pid) = self.pid else {
            return Vec::new();
        };
        let children =
            fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        std::iter::once(pid)
            .chain(children.split_whitespace().filter_map(|pid| pid.parse().ok()))
            .collect()
    }

    /// CPU time in seconds. A child that ends meanwhile counts once its parent has waited for it.
    fn cpu(&self) -> Result<f64> {
        let pids = self.pids();
        let Some((first, children)) = pids.split_first() else {
            return Ok(0.0);
        };
        let own = usage::cpu(&[*first]).context("CPU of the proxy")?;
        let children = children.iter().filter_map(|pid| usage::cpu(&[*pid]).ok());
        Ok((own + children.sum::<Duration>()).as_secs_f64())
    }

    /// Resident memory in bytes; pages that processes share count once.
    fn memory(&self) -> Result<f64> {
        let of = |pid: u32| {
            let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
            let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
            let value = line.and_then(|line| line.split_whitespace().next());
            let kilobytes: f64 = value.context("memory of the proxy")?.parse()?;
            Ok(kilobytes * 1024.0)
        };
        self.pids().into_iter().map(of).sum()
    }
}
