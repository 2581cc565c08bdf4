//! The interfaces of pods.

/// The interfaces of pods (`detectLocalMode` `BridgeInterface` and `InterfaceNamePrefix`): one interface, or
/// all whose names have a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodInterface {
    /// Padded with zeros: `IFNAMSIZ` (linux/if.h).
    name: [u8; 16],
    /// Number of bytes of `name` to compare: all 16 for one interface, fewer for a prefix.
    len: u8,
}

impl PodInterface {
    /// Longest name of an interface, in bytes: `IFNAMSIZ` without the terminating zero.
    pub const MAX_NAME: usize = 15;

    /// Returns one interface, or all whose names begin with `name` if `prefix` is set. `None` for names that
    /// the kernel forbids, and for names with quotes, `\` or `*`, which can only be a mistake.
    pub fn new(name: &str, prefix: bool) -> Option<Self> {
        let allowed = |b: u8| b.is_ascii_graphic() && !b"/:*\"'`\\".contains(&b);
        let fits = (1..=Self::MAX_NAME).contains(&name.len());
        if !fits || !name.bytes().all(allowed) || name == "." || name == ".." {
            return None;
        }
        let mut padded = [0; 16];
        padded[..name.len()].copy_from_slice(name.as_bytes());
        let len = if prefix { name.len() } else { padded.len() };
        Some(Self {
            name: padded,
            len: u8::try_from(len).ok()?,
        })
    }

    /// Returns the name, and whether it is a prefix.
    pub(super) fn pattern(&self) -> (&str, bool) {
        let prefix = usize::from(self.len) < self.name.len();
        let end = self.name.iter().position(|b| *b == 0);
        let name = &self.name[..end.unwrap_or(self.name.len())];
        // The constructor takes ASCII only.
        (std::str::from_utf8(name).unwrap_or_default(), prefix)
    }

    /// Returns the bytes with which an interface's name, padded with zeros, must begin.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.name[..usize::from(self.len)]
    }
}
