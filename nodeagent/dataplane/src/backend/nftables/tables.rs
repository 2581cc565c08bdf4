//! kplane's tables, and what their rules depend on.

use kplane_model::Family;

use super::layout::{self, Chain};
use super::policy_layout;
use super::schema::{TABLE, TABLE_COMMENT, TableSettings};

/// Name of the table of NetworkPolicies, one in family `ip` and one in `ip6`.
pub const POLICY_TABLE: &str = "kplane-policy";
/// Comment of that table. The number goes up with every change of chains, rules or sets.
pub(super) const POLICY_TABLE_COMMENT: &str = "kplane nftables policy layout 1";

/// One of the tables that a family has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TableKind {
    /// The table of Services.
    Services,
    /// The table of NetworkPolicies.
    Policies,
}

impl TableKind {
    /// All tables.
    pub const ALL: [Self; 2] = [Self::Services, Self::Policies];

    /// Returns the table's name in the kernel.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Services => TABLE,
            Self::Policies => POLICY_TABLE,
        }
    }

    pub(super) const fn comment(self) -> &'static str {
        match self {
            Self::Services => TABLE_COMMENT,
            Self::Policies => POLICY_TABLE_COMMENT,
        }
    }
}

/// A table with what its rules depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The table of Services.
    Services(TableSettings),
    /// The table of NetworkPolicies.
    Policies {
        /// Whether packets of others leave from the node itself, as those that IPVS leads to Pods.
        output: bool,
    },
}

impl From<TableSettings> for Layout {
    fn from(settings: TableSettings) -> Self {
        Self::Services(settings)
    }
}

impl Layout {
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
            Self::Policies { output } => policy_layout::chains(family, output),
        }
    }
}
