//! Names of sockets in the epoll instance of a worker.

/// The number by which epoll names a socket: the place of its entry, the entry's generation, and which of the entry's
/// sockets it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token(u64);

impl Token {
    /// Largest generation.
    pub(super) const GENERATIONS: u32 = (1 << 28) - 1;

    /// The side of sockets of UDP flows, which are no entries.
    const FLOW: u8 = 15;

    /// Returns the token of an entry's socket number 0.
    pub(super) fn new(key: usize, generation: u32) -> Self {
        Self((key as u64) << 32 | u64::from(generation & Self::GENERATIONS) << 4)
    }

    /// Returns the token of a UDP flow's socket.
    pub(super) fn flow(key: usize, generation: u32) -> Self {
        Self::new(key, generation).side(Self::FLOW)
    }

    /// Returns the token of another socket of the entry, 0..15.
    pub(super) fn side(self, side: u8) -> Self {
        Self(self.0 & !15 | u64::from(side & 15))
    }

    pub(super) fn key(self) -> usize {
        usize::try_from(self.0 >> 32).unwrap_or(usize::MAX)
    }

    pub(super) fn generation(self) -> u32 {
        u32::try_from(self.0 >> 4 & u64::from(Self::GENERATIONS)).unwrap_or_default()
    }

    pub(super) fn number(self) -> u8 {
        u8::try_from(self.0 & 15).unwrap_or_default()
    }

    pub(super) fn is_flow(self) -> bool {
        self.number() == Self::FLOW
    }
}

impl From<u64> for Token {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

impl From<Token> for u64 {
    fn from(token: Token) -> Self {
        token.0
    }
}
