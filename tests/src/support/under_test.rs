//! The backends that tests run on, and the tests that are of one of them only.

use std::cell::Cell;
use std::process::Command;

use anyhow::{Context as _, Result};
use kplane_dataplane::backend::iptables::Flavour;
use kplane_dataplane::backend::{Kind, Serving};
use kplane_model::{Cidr, Family};
use kplane_rig::netns::NetNs;
use kplane_rig::privilege::{self, need_tools};
use kplane_rig::vm;

/// A backend, and for iptables the kind of it that the node's other programs use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnderTest {
    Nftables,
    /// iptables above nf_tables.
    IptablesNft,
    /// iptables with x_tables.
    IptablesLegacy,
    /// The userspace proxy, with nftables behind it.
    Userspace,
    /// IPVS, with rules in iptables above nf_tables. In a virtual machine only, as few kernels have it.
    Ipvs,
}

thread_local! {
    /// Of the test that runs on this thread.
    static CURRENT: Cell<Option<UnderTest>> = const { Cell::new(None) };
}

/// Tests, or modules of tests, that say something about one backend only, and why.
const NFTABLES_ONLY: [(&str, &str); 35] = [
    (
        "network_policies::np14_why_tells",
        "asks a control plane, without a backend",
    ),
    (
        "network_policies::each_wrong_reading",
        "judges on paper, without a backend",
    ),
    (
        "unserved::a18_refusals_come_at_once",
        "C1: REJECT answers TCP with an ICMP error, which IPv6 hears late",
    ),
    (
        "unserved::a18_an_endpoint_may_be_where_another_service_refuses",
        "C1: KUBE-EXTERNAL-SERVICES sees packets after DNAT, as in kube-proxy",
    ),
    (
        "unserved::a20_",
        "A20: mode iptables leaves such packets alone; iptables::a20_..",
    ),
    (
        "unserved::a21_node_ports_are_served_on_the_primary",
        "A21: all addresses, loopback too; iptables::a21_..",
    ),
    ("unserved::k6_", "K6 is of mode nftables"),
    (
        "unserved::a10_",
        "A10: REJECT wins without endpoints; iptables::a10_..",
    ),
    (
        "affinity::a11_a_client_is_forgotten_when",
        "looks into a set of nftables; iptables::a11_..",
    ),
    (
        "affinity::a11_what_is_remembered",
        "C4: lists of xt_recent are printed nowhere",
    ),
    ("strangers::a_foreign_table", "marks and tables of nftables"),
    ("strangers::foreign_commits", "generations of nftables"),
    ("strangers::what_others_do", "iptables::what_others_do_.."),
    (
        "strangers::an_engine_at_rest",
        "iptables::what_others_do_..",
    ),
    ("strangers::a_deleted_rule", "iptables::what_others_do_.."),
    ("strangers::a_change_onto", "iptables-restore has no guard"),
    ("listing::", "prints nftables"),
    ("restart::a_table_", "numbers of the layout of nftables"),
    ("restart::cleanup_removes_both", "iptables::cleanup_.."),
    (
        "coming_from_kube_proxy::",
        "comes to nftables; iptables::i4_..",
    ),
    ("limits::many_services", "buffers of netlink"),
    ("limits::too_many_endpoints", "buckets of nftables"),
    ("limits::nothing_is_deleted", "reads nftables back"),
    (
        "conntrack::f3_flows_that_began_while",
        "deletes the table of nftables",
    ),
    (
        "conntrack::f4_a_service_without_endpoints",
        "A18: refusals as above",
    ),
    ("generated::cases_are_the_same", "says nothing of backends"),
    ("told::", "says nothing of backends"),
    ("runtime::a21_node_port_addresses_by_range", "A21: loopback"),
    (
        "runtime::a21_e10_node_ports_follow",
        "A21: primary is not the default; iptables::a21_..",
    ),
    ("runtime::c5_e7_any_bit", "lists nftables"),
    ("runtime::e12_a_failed", "locks nftables"),
    ("runtime::a20_", "A20: as above"),
    (
        "dead::",
        "which endpoints count is decided before the backend",
    ),
    ("ruleset::", "tables of nftables"),
    ("walk::", "elements of nftables"),
];

/// The same for iptables.
const IPTABLES_ONLY: [&str; 2] = ["iptables::", "iptables_faults::"];
/// The same for the userspace proxy.
const USERSPACE_ONLY: [&str; 2] = ["proxied::", "network_policies::relayed"];
/// The same for IPVS.
const IPVS_ONLY: [&str; 2] = ["virtual_servers::", "virtual_server_faults::"];

/// Of the common tests those that IPVS has something of its own to say about: packets are slow in a
/// virtual machine. `KPLANE_VM_ALL=1` runs the others too.
const COMMON_OF_IPVS: [&str; 29] = [
    "connected::",
    "network_policies::np",
    "transparent::",
    "remembered::",
    "asked::",
    "addresses::a15_external",
    "addresses::a15_an_endpoint",
    "addresses::a15_endpoints_with",
    "addresses::a17_masquerade_all_masquerades",
    "addresses::a3_",
    "policies::a16_outside",
    "policies::a18_outside",
    "policies::a18_internal",
    "policies::a12_a13_",
    "policies::b3_",
    "policies::b5_",
    "unserved::a18_without",
    "unserved::a18_addresses_that",
    "unserved::a8_ranges",
    "unserved::a9_",
    "affinity::a11_an_endpoint_that_goes",
    "affinity::a11_affinity_comes",
    "churn::an_address_passes",
    "health::",
    "own_way::",
    "handed::a_service",
    "handed::u37_",
    "handed::u22_",
    "handed::weights_",
];

/// Of the common tests those that the userspace proxy has something of its own to say about: the rest is nftables'.
const COMMON_OF_USERSPACE: [&str; 21] = [
    "connected::",
    "talked::",
    "network_policies::np14_services_are",
    "counted::",
    "transparent::",
    "handed::u22_",
    "remembered::a_client_is_listed",
    "addresses::",
    "policies::",
    "unserved::a18_",
    "unserved::a8_",
    "unserved::a9_",
    "affinity::a11_a_client_stays",
    "affinity::a11_an_endpoint_that_goes",
    "affinity::a11_a16_",
    "churn::",
    "combined::",
    "health::",
    "limits::of_two",
    "own_way::",
    "shared::",
];

/// Variable with which backends other than nftables run [`CHOSEN`] tests only.
const CHOSEN_ONLY: &str = "KPLANE_CHOSEN_TESTS";
/// Tests for each backend in a run of few minutes: what is the backend's own, and one test of each kind of the common
/// ones.
const CHOSEN: [&str; 16] = [
    "connected::",
    "talked::",
    "network_policies::np14_",
    "iptables::a",
    "iptables::i4_nothing_fails_on_the_way",
    "iptables_faults::c10_",
    "proxied::",
    "addresses::a15_external",
    "addresses::a17_masquerade_all_masquerades",
    "policies::a16_outside",
    "policies::b3_",
    "unserved::a18_without",
    "unserved::a8_source",
    "affinity::a11_a_client_stays",
    "churn::endpoints_come",
    "restart::a_restart_adopts",
];

/// Common tests whose words are not true of the userspace proxy, and why.
const NOT_USERSPACE: [(&str, &str); 3] = [
    (
        "addresses::a15_a_pod_keeps_its_source",
        "endpoints see the node's address: U16",
    ),
    ("combined::a15_a16_pods_are_told_by_one", "the same"),
    (
        "unserved::a20_an_endpoint",
        "the proxy's own connection leads on to the other Service",
    ),
];

/// Common tests whose words are not true of IPVS, and why.
const NOT_IPVS: [(&str, &str); 15] = [
    (
        "counted::",
        "the kernel reports a connection before IPVS has chosen its endpoint",
    ),
    ("talked::", "the same"),
    (
        "affinity::a11_a_client_stays",
        "each virtual server remembers for itself: D7",
    ),
    (
        "affinity::a11_protocols",
        "round robin takes the same turn for each protocol",
    ),
    (
        "affinity::a11_a16_",
        "each virtual server remembers for itself: D7",
    ),
    (
        "conntrack::f2_serving_endpoints",
        "UDP endpoints that are not used any more go with their flows: D5",
    ),
    ("conntrack::f2_local_policies", "the same"),
    (
        "conntrack::the_engine_cleans_up",
        "the kernel itself deletes the flows of an endpoint that goes",
    ),
    (
        "combined::a15_a16_",
        "pods reach what others do under a Local policy: A16",
    ),
    ("combined::b2_b3_b5_", "the same"),
    (
        "own_way::what_is_marked",
        "a virtual server takes packets whatever the rules say",
    ),
    (
        "combined::a11_a16_",
        "each virtual server remembers for itself: D7",
    ),
    (
        "generated::generated_cases",
        "Local policies of other backends: A16, A29; source ranges and the node itself: A8",
    ),
    (
        "runtime::a19_",
        "a Service's address is the node's own from then on: D2",
    ),
    (
        "runtime::f5_",
        "source ranges are looked at for each packet: A8",
    ),
];

impl UnderTest {
    const ALL: [Self; 5] = [
        Self::Nftables,
        Self::IptablesNft,
        Self::IptablesLegacy,
        Self::Userspace,
        Self::Ipvs,
    ];

    /// Those for which this machine is meant.
    pub fn here() -> impl Iterator<Item = Self> {
        let inside = vm::is_inside();
        let all = Self::ALL.into_iter();
        all.filter(move |backend| inside || *backend != Self::Ipvs)
    }

    /// Of the calling thread's test.
    pub fn current() -> Result<Self> {
        CURRENT.get().context("this thread has no backend under test")
    }

    /// Makes it the calling thread's, for threads that a test starts.
    pub fn set(self) {
        CURRENT.set(Some(self));
    }

    /// Runs a test on it.
    pub fn test(self, body: fn() -> Result<()>) -> Result<()> {
        need_tools(match self {
            Self::Nftables | Self::Userspace => &[],
            Self::IptablesNft => &["iptables-nft"],
            Self::IptablesLegacy => &["iptables-legacy"],
            Self::Ipvs => &["ipvsadm", "ipset"],
        })?;
        self.set();
        body()
    }

    /// Whether a test says something about it.
    pub fn runs(self, test: &str) -> bool {
        let is_chosen = CHOSEN.iter().any(|name| test.starts_with(name));
        let chosen_only = self != Self::Nftables && privilege::is_set(CHOSEN_ONLY);
        self.is_said(test) && (is_chosen || !chosen_only)
    }

    fn is_said(self, test: &str) -> bool {
        let listed = |list: &[(&str, &str)]| list.iter().any(|(name, _)| test.starts_with(name));
        let of = |list: &[&str]| list.iter().any(|name| test.starts_with(name));
        match self {
            Self::Ipvs if of(&IPVS_ONLY) => true,
            Self::Ipvs if listed(&NFTABLES_ONLY) || of(&IPTABLES_ONLY) || of(&USERSPACE_ONLY) => {
                false
            }
            Self::Ipvs => !listed(&NOT_IPVS) && (of(&COMMON_OF_IPVS) || vm::runs_all()),
            _ if of(&IPVS_ONLY) => false,
            Self::Userspace if of(&USERSPACE_ONLY) => true,
            Self::Userspace => !listed(&NOT_USERSPACE) && of(&COMMON_OF_USERSPACE),
            _ if of(&USERSPACE_ONLY) => false,
            Self::Nftables => !of(&IPTABLES_ONLY),
            Self::IptablesNft | Self::IptablesLegacy => !listed(&NFTABLES_ONLY),
        }
    }

    /// A test's name with it.
    pub fn name_of(self, test: &str) -> String {
        match self {
            Self::Nftables => test.to_owned(),
            Self::IptablesNft => format!("iptables_nft::{test}"),
            Self::IptablesLegacy => format!("iptables_legacy::{test}"),
            Self::Userspace => format!("userspace::{test}"),
            Self::Ipvs => format!("ipvs::{test}"),
        }
    }

    pub fn kind(self) -> Kind {
        match self {
            Self::Nftables => Kind::Nftables,
            Self::IptablesNft | Self::IptablesLegacy => Kind::Iptables,
            Self::Userspace => Kind::Userspace,
            Self::Ipvs => Kind::Ipvs,
        }
    }

    /// Whether refusals are ICMP errors, which are slower.
    pub fn refuses_late(self) -> bool {
        !matches!(self, Self::Nftables | Self::Userspace)
    }

    pub fn is_iptables(self) -> bool {
        self.kind() == Kind::Iptables
    }

    /// What its backend has in a node's data path.
    pub fn serving(self) -> Serving {
        let flavour = match self {
            Self::Nftables | Self::Userspace => None,
            Self::IptablesNft | Self::Ipvs => Some(Flavour::Nft),
            Self::IptablesLegacy => Some(Flavour::Legacy),
        };
        self.kind().serving([flavour; 2])
    }

    /// A21: what `nodePortAddresses` is by default.
    pub fn nodeport_addresses(self) -> Vec<Cidr> {
        match self {
            Self::Nftables | Self::Userspace => Vec::new(),
            Self::IptablesNft | Self::IptablesLegacy | Self::Ipvs => {
                Family::ALL.map(Cidr::everything).to_vec()
            }
        }
    }

    /// Puts into a node's namespace what tells the kind of iptables there: what kubelet does.
    pub fn prepare(self, node: &NetNs) -> Result<()> {
        let kind = match self {
            Self::Nftables | Self::Userspace => return Ok(()),
            Self::IptablesNft | Self::Ipvs => "nft",
            Self::IptablesLegacy => "legacy",
        };
        for base in ["iptables", "ip6tables"] {
            let mut command = Command::new(format!("{base}-{kind}"));
            command.args(["-t", "mangle", "-N", "KUBE-IPTABLES-HINT"]);
            node.output(command)?;
        }
        Ok(())
    }
}
