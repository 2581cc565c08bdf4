//! The state of a migration that is not in the labels of nodes: an annotation of kube-proxy's DaemonSet.

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) const ANNOTATION: &str = "kplane.io/migration";

/// The direction of a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Direction {
    /// From kube-proxy to kplane.
    #[default]
    ToKplane,
    /// From kplane to kube-proxy.
    Back,
}

/// The reason why a migration stopped by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stopped {
    /// The node that could not be verified.
    pub(crate) node: String,
    /// What is wrong with it.
    pub(crate) reason: String,
}

/// The content of the annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Record {
    /// The direction of the last command.
    pub(crate) direction: Direction,
    /// Whether an operator paused the migration.
    pub(crate) paused: bool,
    /// The reason why it stopped by itself.
    pub(crate) stopped: Option<Stopped>,
    /// `spec.updateStrategy` of kube-proxy's DaemonSet from before the migration, to be restored at its end.
    pub(crate) strategy: Value,
}

impl Record {
    /// Reads the annotation. Text that is not kplane's counts as the beginning of a migration.
    pub(crate) fn parse(text: &str) -> Self {
        serde_json::from_str(text).unwrap_or_default()
    }

    /// Returns the text of the annotation.
    pub(crate) fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_annotation_is_read_back() {
        let record = Record {
            direction: Direction::Back,
            paused: true,
            stopped: Some(Stopped {
                node: "node-1".to_owned(),
                reason: "no agent".to_owned(),
            }),
            strategy: json!({ "type": "RollingUpdate" }),
        };
        assert_eq!(Record::parse(&record.text()), record);
        assert_eq!(Record::parse("{"), Record::default());
    }
}
