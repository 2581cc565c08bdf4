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

/// Variable with which backends other than nftables run the chosen tests of `under_test.txt` only.
const CHOSEN_ONLY: &str = "KPLANE_CHOSEN_TESTS";

/// Returns whether a list of `under_test.txt` has a test, or its module.
#[expect(
    clippy::panic,
    reason = "a list with another name would leave tests out"
)]
fn is_listed(list: &str, test: &str) -> bool {
    let mut lists = include_str!("under_test.txt").split("\n[");
    let has_name = |text: &&str| text.split_once("]\n").is_some_and(|(name, _)| name == list);
    let Some(text) = lists.find(has_name) else {
        panic!("no list {list}");
    };
    text.lines()
        .skip(1)
        .filter_map(|line| line.split(' ').next())
        .filter(|name| !name.is_empty() && *name != "#")
        .any(|name| test.starts_with(name))
}

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
        Self::ALL.into_iter().filter(move |backend| inside || *backend != Self::Ipvs)
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
        let is_chosen = is_listed("chosen", test);
        let chosen_only = self != Self::Nftables && privilege::is_set(CHOSEN_ONLY);
        self.is_said(test) && (is_chosen || !chosen_only)
    }

    fn is_said(self, test: &str) -> bool {
        let of = |list: &str| is_listed(list, test);
        match self {
            Self::Ipvs if of("ipvs only") => true,
            Self::Ipvs if of("nftables only") || of("iptables only") || of("userspace only") => {
                false
            }
            Self::Ipvs => !of("not ipvs") && (of("ipvs too") || vm::runs_all()),
            _ if of("ipvs only") => false,
            Self::Userspace if of("userspace only") => true,
            Self::Userspace => !of("not userspace") && of("userspace too"),
            _ if of("userspace only") => false,
            Self::Nftables => !of("iptables only"),
            Self::IptablesNft | Self::IptablesLegacy => !of("nftables only"),
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
