//! The table, for terminals and for documents.

use std::time::Duration;

use super::percentile;
use crate::against::contender::Contender;
use crate::against::measure::Row;
use crate::goal;

const HEADINGS: [&str; 12] = [
    "Services",
    "proxy",
    "cold start",
    "start CPU",
    "change p50",
    "p99",
    "after answer p50",
    "CPU per change",
    "idle CPU",
    "memory (peak)",
    "bytes: start, per change",
    "first packet: median, slowest, in turn",
];

/// Cells of a row, as people read them.
fn cells(row: &Row) -> [String; 12] {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    [
        row.services.to_string(),
        row.contender.name().to_owned(),
        time(row.cold),
        time(row.cold_cpu),
        time(percentile(&row.from_request, 50)),
        time(percentile(&row.from_request, 99)),
        time(percentile(&row.from_answer, 50)),
        time(row.change_cpu),
        format!("{:.2} %", row.idle * 100.0),
        format!(
            "{:.0} ({:.0}) MiB",
            mib(row.memory.now),
            mib(row.memory.most)
        ),
        format!("{}, {}", bytes(row.start_bytes), bytes(row.change_bytes)),
        row.first_packet.more().map(microseconds).join(", "),
    ]
}

/// A duration with two or three digits that count.
pub(crate) fn time(took: Duration) -> String {
    let seconds = took.as_secs_f64();
    match seconds {
        ..0.001 => format!("{:.2} ms", seconds * 1e3),
        ..0.01 => format!("{:.1} ms", seconds * 1e3),
        ..1.0 => format!("{:.0} ms", seconds * 1e3),
        ..10.0 => format!("{seconds:.2} s"),
        _ => format!("{seconds:.1} s"),
    }
}

fn microseconds(more: Duration) -> String {
    format!("+{:.1} µs", more.as_secs_f64() * 1e6)
}

fn bytes(bytes: u64) -> String {
    let kilobytes = bytes as f64 / 1e3;
    match kilobytes {
        ..10.0 => format!("{kilobytes:.1} kB"),
        10.0..1e3 => format!("{kilobytes:.0} kB"),
        _ => format!("{:.1} MB", kilobytes / 1e3),
    }
}

/// The table as Markdown that is aligned, so that terminals can show it too.
pub(crate) fn table(rows: &[Row]) -> String {
    let headings = HEADINGS.map(str::to_owned);
    let cells: Vec<[String; 12]> = rows.iter().map(cells).collect();
    let width = |column: usize| {
        std::iter::once(&headings)
            .chain(&cells)
            .map(|row| row[column].len())
            .max()
            .unwrap_or(0)
    };
    let line = |row: &[String; 12]| {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let width = width(column);
            // Numbers to the right, names to the left.
            if column == 1 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "))
    };
    let rule = (0..headings.len()).map(|column| {
        let dashes = "-".repeat(width(column) - 1);
        if column == 1 { format!("{dashes}-") } else { format!("{dashes}:") }
    });
    let rule = format!("| {} |\n", rule.collect::<Vec<_>>().join(" | "));
    let mut text = line(&headings) + &rule;
    text.extend(cells.iter().map(line));
    text
}

/// How many times better kplane is, at the largest size.
pub(crate) fn summary(rows: &[Row]) -> Vec<String> {
    let largest = rows.iter().map(|row| row.services).max().unwrap_or(0);
    let at_largest = || rows.iter().filter(|row| row.services == largest);
    let mut lines = Vec::new();
    for theirs in at_largest().filter(|row| row.contender.is_kube_proxy()) {
        let ours = at_largest().filter(|row| !row.contender.is_kube_proxy());
        for ours in ours.filter(|row| row.contender.rivals(theirs.contender)) {
            let times = |of: fn(&Row) -> f64| of(theirs) / of(ours);
            lines.push(format!(
                "{largest} Services, {} compared with {}: a change reaches the kernel {:.0} times \
                 sooner, using 1/{:.0} of the CPU; kplane starts {:.0} times faster and uses 1/{:.1} \
                 of the memory.",
                ours.contender.name(),
                theirs.contender.name(),
                times(|row| percentile(&row.from_request, 50).as_secs_f64()),
                times(|row| row.change_cpu.as_secs_f64()),
                times(|row| row.cold.as_secs_f64()),
                times(|row| row.memory.now as f64),
            ));
        }
    }
    lines
}

/// Prints the goals of mode nftables, with what was measured.
pub(crate) fn goals(rows: &[Row]) {
    for row in rows {
        let cpu = ("CPU of a change", row.change_cpu.as_secs_f64() * 1e3, "ms");
        let cold = ("cold start", row.cold.as_secs_f64(), "s");
        let mib = row.memory.now as f64 / f64::from(1 << 20);
        let memory = ("memory", mib, "MiB");
        let goals = match (row.contender, row.services) {
            (Contender::KplaneStandalone, 10_000) => {
                vec![(cpu, 0.35), (cold, 0.3), (memory, 45.0)]
            }
            (Contender::Kplane, 10_000) => vec![(cpu, 0.35), (cold, 0.3)],
            (Contender::KplaneStandalone, 100_000) => vec![(cold, 3.0), (memory, 350.0)],
            _ => Vec::new(),
        };
        for ((what, value, unit), most) in goals {
            let what = format!(
                "{} Services, {}: {what}",
                row.services,
                row.contender.name()
            );
            goal::print(&what, most, value, unit);
        }
    }
}
