//! Metrics of the process itself, under the names that every Prometheus client library uses.

use std::fmt;
use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::names::{Metric, alone};

/// Clock ticks a second in /proc, a constant of Linux's interface (`USER_HZ`).
const TICKS: f64 = 100.0;

/// Metrics that are read from /proc at each scrape. Values that cannot be read are left out.
#[derive(Debug)]
pub struct Process;

/// Values read from /proc.
#[derive(Debug, Default, PartialEq)]
struct Usage {
    cpu_seconds: Option<f64>,
    resident_bytes: Option<f64>,
    virtual_bytes: Option<f64>,
    open_fds: Option<f64>,
    max_fds: Option<f64>,
    started_at_seconds: Option<f64>,
}

impl Usage {
    fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let stat = text("/proc/self/stat");
        let status = text("/proc/self/status");
        let open = fs::read_dir("/proc/self/fd").ok();
        Self {
            cpu_seconds: cpu_ticks(&stat).map(|ticks| ticks / TICKS),
            resident_bytes: kilobytes(&status, "VmRSS:"),
            virtual_bytes: kilobytes(&status, "VmSize:"),
            // The file descriptor that reads the folder does not count.
            open_fds: open.map(|fds| fds.count().saturating_sub(1) as f64),
            max_fds: max_fds(&text("/proc/self/limits")),
            started_at_seconds: started_at(&stat, &text("/proc/stat")),
        }
    }
}

/// Returns a field by its number in proc(5), from 3 on. Field 2, the program's name, may contain
/// any character.
fn field(stat: &str, number: usize) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
}

fn cpu_ticks(stat: &str) -> Option<f64> {
    Some(field(stat, 14)? + field(stat, 15)?)
}

fn started_at(stat: &str, system: &str) -> Option<f64> {
    let boot: f64 = system
        .lines()
        .find_map(|line| line.strip_prefix("btime "))?
        .trim()
        .parse()
        .ok()?;
    Some(boot + field(stat, 22)? / TICKS)
}

fn kilobytes(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: f64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes * 1024.0)
}

fn max_fds(limits: &str) -> Option<f64> {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max open files"));
    line?.split_whitespace().next()?.parse().ok()
}

impl Collector for Process {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let usage = Usage::read();
        Metric::new("process_cpu_seconds")
            .help("CPU time of the process")
            .counter(&mut to, usage.cpu_seconds.map(alone))?;
        Metric::new("process_resident_memory_bytes")
            .help("Memory in use")
            .gauge(&mut to, usage.resident_bytes.map(alone))?;
        Metric::new("process_virtual_memory_bytes")
            .help("Address space in use")
            .gauge(&mut to, usage.virtual_bytes.map(alone))?;
        Metric::new("process_open_fds")
            .help("Open files")
            .gauge(&mut to, usage.open_fds.map(alone))?;
        Metric::new("process_max_fds")
            .help("Maximum number of open files")
            .gauge(&mut to, usage.max_fds.map(alone))?;
        Metric::new("process_start_time_seconds")
            .help("Start time of the process")
            .gauge(&mut to, usage.started_at_seconds.map(alone))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_behind_any_program_name() {
        let stat = "7 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 150 50 13 14 15 16 17 18 3000 20";
        assert_eq!(cpu_ticks(stat), Some(200.0));
        assert_eq!(started_at(stat, "cpu 1\nbtime 1000\n"), Some(1030.0));
        assert_eq!(cpu_ticks("nonsense"), None);
    }

    #[test]
    fn every_number_is_there_on_linux() {
        let usage = Usage::read();
        assert!(usage.resident_bytes.unwrap() > 1e6);
        assert!(usage.virtual_bytes >= usage.resident_bytes);
        assert!(usage.max_fds >= usage.open_fds && usage.open_fds.unwrap() >= 3.0);
        assert!(usage.cpu_seconds.unwrap() >= 0.0);
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_secs_f64();
        let age = now - usage.started_at_seconds.unwrap();
        assert!((-2.0..86_400.0).contains(&age), "started {age} s ago");
    }
}
