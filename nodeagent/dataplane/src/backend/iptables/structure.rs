//! The ways in which the rules of mode iptables may find Services.

/// The structure in which a rule finds the Service of an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// One list of all addresses, as kube-proxy writes it.
    Compat,
    /// A tree of short chains, by address prefix.
    #[default]
    Tree,
}

impl Layout {
    /// All layouts.
    pub const ALL: [Self; 2] = [Self::Compat, Self::Tree];

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compat => "compat",
            Self::Tree => "tree",
        }
    }

    /// Returns the layout of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|layout| layout.name() == name)
    }
}
