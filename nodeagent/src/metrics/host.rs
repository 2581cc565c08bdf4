//! Metrics of the node's kernel that decide about Services.

use std::fmt;
use std::fs;

use kplane_http::metrics::{Metric, alone};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

/// The number of entries of connection tracking in this network namespace, and their limit.
const ENTRIES: &str = "/proc/sys/net/netfilter/nf_conntrack_count";
const LIMIT: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

/// Numbers that are read at each scrape. Those that the kernel does not have are left out.
#[derive(Debug)]
pub(super) struct HostCollector;

impl Collector for HostCollector {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        Metric::new("kplane_agent_conntrack_entries")
            .help("Connections that the node tracks")
            .gauge(&mut to, number(ENTRIES).map(alone))?;
        Metric::new("kplane_agent_conntrack_limit")
            .help("Maximum number of connections that the node tracks; further ones are dropped")
            .gauge(&mut to, number(LIMIT).map(alone))
    }
}

fn number(file: &str) -> Option<f64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}
