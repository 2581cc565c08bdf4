//! What the rules of kplane's tables depend on.

use kplane_model::Family;

use super::layout::{self, Chain};
use super::policy_layout;
use super::schema::TableSettings;
use super::table_kind::TableKind;

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

    pub(super) fn chains(self, family: Family) -> Vec<Chain> {
        match self {
            Self::Services(_) => layout::chains(),
            Self::Policies { output, log } => policy_layout::chains(family, output, log),
        }
    }
}
