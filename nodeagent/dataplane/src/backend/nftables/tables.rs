//! What the rules of kplane's tables depend on.

use kplane_model::Family;

use super::chain::Chain;
use super::layout;
use super::policy_layout;
use super::schema::TableSettings;
use super::table_kind::TableKind;
use super::uapi::{NFT_TABLE_F_OWNER, NFT_TABLE_F_PERSIST};

/// Flags of a table with an owner that it outlives. While it has none, it lacks the first of them.
pub(super) const OWNED: u32 = NFT_TABLE_F_OWNER | NFT_TABLE_F_PERSIST;

/// A table with what its rules depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableLayout {
    /// The table of Services.
    Services(TableSettings),
    /// The table of NetworkPolicies.
    Policies {
        /// Whether packets of others leave from the node itself, as those that IPVS leads to Pods.
        output: bool,
        /// Whether the kernel can log denied packets for a program (`nfnetlink_log`).
        log: bool,
        /// Whether nobody but the agent may change the table, which outlives it (Linux 6.9).
        owned: bool,
    },
}

impl From<TableSettings> for TableLayout {
    fn from(settings: TableSettings) -> Self {
        Self::Services(settings)
    }
}

impl TableLayout {
    pub(super) fn table(self) -> TableKind {
        match self {
            Self::Services(_) => TableKind::Services,
            Self::Policies { .. } => TableKind::Policies,
        }
    }

    pub(super) fn settings(self) -> TableSettings {
        match self {
            Self::Services(settings) => settings,
            Self::Policies { .. } => TableSettings::default(),
        }
    }

    /// Returns the table's flags.
    pub(super) fn flags(self) -> u32 {
        match self {
            Self::Policies { owned: true, .. } => OWNED,
            Self::Services(_) | Self::Policies { .. } => 0,
        }
    }

    pub(super) fn chains(self, family: Family) -> Vec<Chain> {
        match self {
            Self::Services(_) => layout::chains(),
            Self::Policies { output, log, .. } => policy_layout::chains(family, output, log),
        }
    }
}
