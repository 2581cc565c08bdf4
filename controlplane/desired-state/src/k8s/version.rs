//! Versions of objects.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Deserializer};

/// The `resourceVersion` of an object, shown as the cause of a change. It says nothing about the
/// content: all versions are equal and have the same hash, so two states of an object that differ in it only are the
/// same state.
#[derive(Clone, Copy, Debug, Default)]
pub struct Version(u64);

impl Version {
    /// Creates a version from a number; 0 = unknown.
    pub fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number; 0 = unknown.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl PartialEq for Version {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Version {}

impl Hash for Version {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<'de> Deserialize<'de> for Version {
    /// Reads a version. One in another form is ignored, because it is no reason to refuse an object.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        Ok(Self(text.and_then(|text| text.parse().ok()).unwrap_or(0)))
    }
}
