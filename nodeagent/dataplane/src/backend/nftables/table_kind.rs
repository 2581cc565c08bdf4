//! kplane's tables, and their names.

/// Name of the table, one in family `ip` and one in `ip6`.
pub const TABLE: &str = "kplane";
/// Comment of the table. The number goes up with every change of chains, rules or sets.
pub const TABLE_COMMENT: &str = "kplane nftables layout 5";

/// Name of the table of NetworkPolicies, one in family `ip` and one in `ip6`.
pub const POLICY_TABLE: &str = "kplane-policy";
/// Comment of that table. The number goes up with every change of chains, rules or sets.
pub(super) const POLICY_TABLE_COMMENT: &str = "kplane nftables policy layout 4";

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
