//! The goals G1 to G5, G8 and G9, and whether they are reached.

use crate::goal::Limit;
use crate::proxies::contender::Contender;
use crate::proxies::results::{Results, median};
use crate::proxies::rows::Row;

/// Both ways of the userspace proxy.
const OURS: [Contender; 2] = [Contender::Sockets, Contender::Captured];

/// A goal: a number, or its ratio to the best of some rivals.
struct Goal {
    what: &'static str,
    row: Row,
    column: usize,
    limit: Limit,
    than: &'static [Contender],
}

const fn goal(
    what: &'static str,
    row: Row,
    column: usize,
    limit: Limit,
    than: &'static [Contender],
) -> Goal {
    Goal {
        what,
        row,
        column,
        limit,
        than,
    }
}

const HAPROXY: &[Contender] = &[Contender::Haproxy];
const SPLICE: &[Contender] = &[Contender::HaproxySplice];
const NGINX: &[Contender] = &[Contender::Nginx];
const BOTH: &[Contender] = &[Contender::Haproxy, Contender::Nginx];
const BOTH_HAPROXYS: &[Contender] = &[Contender::Haproxy, Contender::HaproxySplice];
const SOCAT: &[Contender] = &[Contender::Socat];

#[rustfmt::skip]
const GOALS: [Goal; 28] = [
    goal("G1 CPU a GB, 1 connection", Row::OneStream, 1, Limit::AtMost(0.6), SPLICE),
    goal("G1 CPU a GB, 1 connection", Row::OneStream, 1, Limit::AtMost(0.4), NGINX),
    goal("G1 CPU a GB, 8 connections", Row::EightStreams, 1, Limit::AtMost(0.6), SPLICE),
    goal("G1 CPU a GB, 8 connections", Row::EightStreams, 1, Limit::AtMost(0.4), NGINX),
    goal("G1 Gbit/s, 1 connection", Row::OneStream, 0, Limit::AtLeast(0.95), BOTH_HAPROXYS),
    goal("G1 Gbit/s, 8 connections", Row::EightStreams, 0, Limit::AtLeast(1.3), BOTH_HAPROXYS),
    goal("G2 new connections a second", Row::Connections, 0, Limit::AtLeast(0.95), BOTH),
    goal("G2 CPU of a new connection", Row::Connections, 1, Limit::AtMost(1.05), BOTH),
    goal("G2 CPU of a request", Row::Requests, 1, Limit::AtMost(1.0), HAPROXY),
    goal("G3 KiB of an idle connection", Row::Idle, 0, Limit::AtMost(1.5), &[]),
    goal("G3 KiB of an idle connection", Row::Idle, 0, Limit::AtMost(0.5), HAPROXY),
    goal("G3 KiB of an idle connection", Row::Idle, 0, Limit::AtMost(0.167), NGINX),
    goal("G3 KiB of an idle connection", Row::Idle, 0, Limit::AtMost(0.0167), SOCAT),
    goal("G4 queries a second, 64 flows", Row::Flows, 0, Limit::AtLeast(1.3), NGINX),
    goal("G4 CPU of a query, 64 flows", Row::Flows, 1, Limit::AtMost(0.7), NGINX),
    goal("G4 queries a second, new flows", Row::NewFlows, 0, Limit::AtLeast(1.0), NGINX),
    goal("G4 CPU of a query, new flows", Row::NewFlows, 1, Limit::AtMost(0.7), NGINX),
    goal("G5 U37: failed %", Row::Refusing, 0, Limit::AtMost(0.0), &[]),
    goal("G5 U37: p50 in ms", Row::Refusing, 1, Limit::AtMost(2.0), &[]),
    goal("G5 U37: p99", Row::Refusing, 2, Limit::AtMost(1.0), NGINX),
    goal("G5 U38: failed %", Row::Dead, 0, Limit::AtMost(0.0), &[]),
    goal("G5 U38: p50 in ms", Row::Dead, 1, Limit::AtMost(2.0), &[]),
    goal("G5 U38: p99", Row::Dead, 2, Limit::AtMost(0.3), NGINX),
    goal("G5 U38: p99", Row::Dead, 2, Limit::AtMost(1.0), HAPROXY),
    goal("G8 % more p99 beside a silent endpoint", Row::Neighbour, 2, Limit::AtMost(10.0), &[]),
    goal("G9 an end of data passes", Row::Passes, 0, Limit::AtLeast(1.0), &[]),
    goal("G9 a reset passes", Row::Passes, 1, Limit::AtLeast(1.0), &[]),
    goal("G9 60,000 bytes in a datagram pass", Row::Passes, 2, Limit::AtLeast(1.0), &[]),
];

/// Returns the table of goals, of what was measured.
pub(crate) fn table(results: &Results) -> String {
    let mut text = String::from(
        "| goal | compared with | wanted | socket | captured |\n| ---- | ------------- | -----: | -----: | -------: |\n",
    );
    for goal in &GOALS {
        let cells = OURS.map(|ours| goal.cell(results, ours));
        let [Some(socket), Some(captured)] = cells else {
            continue;
        };
        let names: Vec<&str> = goal.than.iter().map(|rival| rival.name()).collect();
        let than = match names[..] {
            [] => "-".to_owned(),
            [one] => one.to_owned(),
            _ => format!("the better of {}", names.join(" and ")),
        };
        let wanted = goal.limit.text();
        text += &format!(
            "| {} | {than} | {wanted} | {socket} | {captured} |\n",
            goal.what
        );
    }
    text
}

impl Goal {
    fn cell(&self, results: &Results, ours: Contender) -> Option<String> {
        let rounds = results.column(self.row, ours, self.column)?;
        let rivals: Option<Vec<_>> = self
            .than
            .iter()
            .map(|rival| results.column(self.row, *rival, self.column))
            .collect();
        let rivals = rivals?;
        // Values of one round were measured soon after each other.
        let values = rounds.iter().enumerate().map(|(round, value)| {
            let of_round = rivals.iter().filter_map(|rival| rival.get(round)).copied();
            let best = match self.limit {
                Limit::AtMost(_) => of_round.reduce(f64::min),
                Limit::AtLeast(_) => of_round.reduce(f64::max),
            };
            best.map_or(*value, |best| value / best)
        });
        let value = median(values.collect());
        Some(format!("{value:.2} {}", self.limit.verdict(value)))
    }
}
