//! The file of `--authorization-file`: rights without a cluster.
//!
//! ```yaml
//! rules:
//! - users: [alice]
//!   groups: [on-call]
//!   verbs: [get]
//!   paths: [/kplane/status, "/kplane/desired/*"]
//! ```
//!
//! The words are those of RBAC's rules for non-resource URLs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kplane_tls::{FileError, Files, Subject, read};
use serde::Deserialize;

use super::Right;

/// Matches every verb, or any rest of a path.
const ANY: &str = "*";
/// All verbs of rights.
const VERBS: [&str; 5] = ["get", "create", "update", "delete", ANY];

/// Rules that allow something. What no rule allows is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rules {
    #[serde(default)]
    rules: Vec<Rule>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    #[serde(default)]
    users: Vec<String>,
    #[serde(default)]
    groups: Vec<String>,
    verbs: Vec<String>,
    paths: Vec<String>,
}

impl Rules {
    /// Parses the content of a file. Verbs that mean nothing are errors: they are misspelt.
    ///
    /// # Errors
    /// The problem with the file.
    pub fn parse(text: &str) -> Result<Self, String> {
        let rules: Self = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        for rule in &rules.rules {
            if rule.users.is_empty() && rule.groups.is_empty() {
                return Err("a rule names neither users nor groups; add one of them".to_owned());
            }
            let known = |verb: &&String| VERBS.contains(&verb.as_str());
            if let Some(verb) = rule.verbs.iter().find(|verb| !known(verb)) {
                return Err(format!(
                    "a rule has the verb {verb:?}; use get, create, update, delete or \"*\""
                ));
            }
            if let Some(path) = rule.paths.iter().find(|path| !path.starts_with("/kplane/")) {
                return Err(format!(
                    "a rule has the path {path:?}; paths begin with /kplane/"
                ));
            }
        }
        Ok(rules)
    }

    /// Returns whether a rule gives a user a right.
    pub fn allow(&self, subject: &Subject, right: &Right) -> bool {
        let (verb, path) = (right.verb(), right.path());
        self.rules.iter().any(|rule| {
            let groups = &rule.groups;
            let concerns = rule.users.contains(&subject.name)
                || subject.groups.iter().any(|group| groups.contains(group));
            concerns
                && rule.verbs.iter().any(|allowed| allowed == verb || allowed == ANY)
                && rule.paths.iter().any(|allowed| covers(allowed, &path))
        })
    }
}

/// Returns whether a path of a rule covers a path: the same one, or one below a final `*`.
fn covers(allowed: &str, path: &str) -> bool {
    match allowed.strip_suffix(ANY) {
        Some(prefix) => path.starts_with(prefix),
        None => allowed == path,
    }
}

/// The path of a file with [`Rules`].
#[derive(Clone, Debug)]
pub(super) struct RulesFile(pub(super) PathBuf);

impl Files for RulesFile {
    type Config = Rules;

    fn paths(&self) -> Vec<&Path> {
        vec![&self.0]
    }

    fn load(&self) -> Result<Arc<Rules>, FileError> {
        let wrong = |reason: String| FileError::Content {
            file: self.0.clone(),
            reason,
        };
        let bytes = read(&self.0)?;
        let text = str::from_utf8(&bytes).map_err(|error| wrong(error.to_string()))?;
        Rules::parse(text).map(Arc::new).map_err(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(name: &str, groups: &[&str]) -> Subject {
        Subject {
            name: name.to_owned(),
            groups: groups.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn rules_allow_what_they_say_and_nothing_else() {
        let rules = Rules::parse(
            "rules:\n\
             - {users: [alice], verbs: [get], paths: [/kplane/status, '/kplane/desired/*']}\n\
             - {groups: [on-call], verbs: ['*'], paths: ['/kplane/*']}\n\
             - {users: [dave], verbs: [get], paths: [/kplane/desired/n1]}\n",
        )
        .unwrap();
        let (alice, bob) = (subject("alice", &[]), subject("bob", &["on-call"]));
        let (carol, dave) = (subject("carol", &["on-call-not"]), subject("dave", &[]));
        let node = Right::ReadDesired("n1".into());
        for (subject, rights) in [
            (&alice, [true, true, false]),
            (&bob, [true; 3]),
            (&carol, [false; 3]),
            (&dave, [false, true, false]),
        ] {
            let found = [Right::ReadStatus, node.clone(), Right::Act]
                .map(|right| rules.allow(subject, &right));
            assert_eq!(found, rights, "{subject:?}");
        }
    }

    #[test]
    fn mistakes_are_errors_that_name_them() {
        for (text, part) in [
            (
                "rules: [{users: [a], verbs: [read], paths: [/kplane/status]}]",
                "read",
            ),
            (
                "rules: [{users: [a], verbs: [get], paths: [/status]}]",
                "/status",
            ),
            ("rules: [{verbs: [get], paths: [/kplane/status]}]", "users"),
            (
                "rules: [{user: [a], verbs: [get], paths: [/kplane/status]}]",
                "user",
            ),
        ] {
            let error = Rules::parse(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
