//! Facts about a backend. Code outside a backend reads these, and never compares the names of backends.

/// What is true of a backend on every machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// The name in flags, status and metrics.
    pub name: &'static str,
    /// One sentence for `--help`, without a full stop.
    pub summary: &'static str,
    /// Why users should choose another backend; `None` for most.
    pub deprecation: Option<&'static str>,
    /// Whether it programs the kernel, and so takes kube-proxy's place on the node.
    pub programs_kernel: bool,
    /// Whether what it programs carries kube-proxy's names, and cannot be told from what kube-proxy programmed.
    pub shares_names: bool,
    /// Whether addresses of Services become the node's own, as virtual servers need them (D2).
    pub has_virtual_servers: bool,
    /// Whether the kernel remembers its decisions in conntrack entries. Entries of UDP flows then go stale
    /// when the data path changes (section f), and the engine has to delete them.
    pub leaves_conntrack_entries: bool,
    /// Which of kube-proxy's metrics it has besides those of all modes (section h).
    pub metrics: ModeMetrics,
}

/// kube-proxy's metrics that not every mode has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModeMetrics {
    /// `kubeproxy_sync_full_proxy_rules_*` and `kubeproxy_sync_partial_proxy_rules_*`.
    pub full_and_partial: bool,
    /// How failed attempts are named: by nftables, or by `iptables-restore`.
    pub failures: Failures,
    /// `kubeproxy_sync_proxy_rules_iptables_*` besides failures, and packets that rules count.
    pub rules: bool,
}

/// Name of the metric of failed attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failures {
    /// `kubeproxy_sync_proxy_rules_nftables_sync_failures_total`.
    Nftables,
    /// `kubeproxy_sync_proxy_rules_iptables_restore_failures_total`.
    Restore,
}
