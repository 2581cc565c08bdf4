//! Digests of contents, as images name them.

use std::fmt;

use ring::digest::{SHA256, digest};

/// The SHA-256 digest of a content; displayed as `sha256:` and 64 hexadecimal digits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Digest(String);

impl Digest {
    /// Computes the digest of a content.
    pub fn of(bytes: &[u8]) -> Self {
        let sum = digest(&SHA256, bytes);
        let digits = sum.as_ref().iter().map(|byte| format!("{byte:02x}"));
        Self(digits.collect())
    }

    /// Returns the 64 hexadecimal digits.
    pub fn hex(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
