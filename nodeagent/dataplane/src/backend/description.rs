//! Facts about a backend. Code outside a backend reads these, and never compares the names of backends.

use kplane_model::Severity;

/// The facts that hold for a backend on every machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// The name in flags, status and metrics.
    pub name: &'static str,
    /// One sentence for `--help`, without a full stop.
    pub summary: &'static str,
    /// Reason for users to choose another backend; `None` for most backends.
    pub deprecation: Option<&'static str>,
    /// Whether the backend programs the kernel, and so takes kube-proxy's place on the node.
    pub programs_kernel: bool,
    /// Whether the objects that the backend programs have kube-proxy's names, and cannot be distinguished
    /// from kube-proxy's.
    pub shares_names: bool,
    /// Whether addresses of Services become the node's own, as virtual servers require (D2).
    pub has_virtual_servers: bool,
    /// Whether the agent's proxy has all connections to Services.
    pub is_proxy: bool,
    /// Whether the kernel remembers its decisions in conntrack entries. Entries of UDP flows then go stale
    /// when the data path changes (section f), and the engine has to delete them.
    pub leaves_conntrack_entries: bool,
    /// The kernel's settings without which the backend does not serve as it should. The agent sets them if it may.
    pub needs: &'static [NeededSetting],
    /// kube-proxy's metrics that this backend has, besides those of all modes (section h).
    pub metrics: ModeMetrics,
}

impl Description {
    /// Returns whether connections to Services never leave the kernel.
    pub const fn serves_in_kernel(&self) -> bool {
        self.programs_kernel && !self.is_proxy
    }

    /// Returns whether the agent's proxy serves with no more rights than the user who runs it.
    pub const fn serves_without_rights(&self) -> bool {
        self.is_proxy && !self.programs_kernel
    }

    /// Returns whether the kernel leads packets with loopback addresses to endpoints, if its settings allow that.
    pub fn routes_loopback(&self) -> bool {
        self.needs.iter().any(|need| need.for_loopback)
    }
}

/// A setting of the kernel that must not be 0.
#[derive(Debug, PartialEq, Eq)]
pub struct NeededSetting {
    /// The name, as `sysctl` has it.
    pub key: &'static str,
    /// The severity of a 0.
    pub severity: Severity,
    /// What clients see if it is 0.
    pub effect: &'static str,
    /// Whether only node ports on loopback addresses need it.
    pub for_loopback: bool,
}

/// kube-proxy's metrics that only some modes have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModeMetrics {
    /// `kubeproxy_sync_full_proxy_rules_*` and `kubeproxy_sync_partial_proxy_rules_*`.
    pub full_and_partial: bool,
    /// Name of the metric of failed attempts: that of nftables, or that of `iptables-restore`.
    pub failures: Failures,
    /// `kubeproxy_sync_proxy_rules_iptables_*` besides failures, and the packets counted by rules.
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
