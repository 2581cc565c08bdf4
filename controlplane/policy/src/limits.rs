//! What fits into messages of 256 KiB. Whatever is larger allows less, and never more.

/// The limits of objects. Tests set smaller ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum size of a policy's object, and of the decisions about a part of the other ends, in bytes.
    pub(crate) object: usize,
    /// What the policies of a namespace may take in all, in bytes. An agent takes about six times as much for them.
    pub(crate) share: usize,
    /// What the groups of a namespace's policies may take of the control plane's memory, in bytes; more if there are many nodes.
    pub(crate) groups: usize,
    /// Maximum size of the policies' names in a Pod's object, in bytes: with addresses and ports, the object fits into a
    /// message.
    pub(crate) names: usize,
    /// Maximum size of these names in the objects of all Pods of a namespace together. Each Pod may have an equal share, if that
    /// is not less than a fortieth of `names`: some 100 policies.
    pub(crate) all_names: usize,
    /// Maximum number of ranges of ports in a decision, of which a few fit into a message. Everything is denied beyond it.
    pub(crate) ranges: usize,
    /// Maximum number of members in a part of a group. Members beyond it are not allowed by the group; to get there by
    /// chance takes three million classes.
    pub(crate) members: usize,
}

impl Limits {
    /// Returns the maximum size of the names in the object of each of so many Pods of a namespace. It is the same for all
    /// numbers up to a power of two, so that few Pods cause changes of all.
    pub(crate) fn names_of_one(&self, pods: usize) -> usize {
        let share = self.all_names / pods.next_power_of_two();
        share.max(self.names / 40).min(self.names)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            object: 200 << 10,
            share: 4 << 20,
            groups: 32 << 20,
            names: 160 << 10,
            all_names: 32 << 20,
            ranges: 512,
            members: 12_000,
        }
    }
}
