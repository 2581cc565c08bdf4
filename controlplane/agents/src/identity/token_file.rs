//! The file of `--token-auth-file`: tokens of agents and users where there is no cluster.
//!
//! The format is that of kube-apiserver's flag of the same name: lines of `token,user,uid,"group1,group2"`. An agent
//! is the user `system:node:NAME` in the group `system:nodes`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kplane_tls::{FileError, Files, Subject, Token, read};

use super::{Identity, Proof, TokenId, token_id};

/// The owners of tokens.
#[derive(Debug, Default)]
pub struct TokenTable(HashMap<TokenId, Arc<Identity>>);

impl TokenTable {
    /// Parses the content of a file.
    ///
    /// # Errors
    /// The problem with a line. The text names the line, never its content.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = csv::ReaderBuilder::new();
        reader
            .has_headers(false)
            .flexible(true)
            .comment(Some(b'#'))
            .trim(csv::Trim::All);
        let mut table = HashMap::new();
        for record in reader.from_reader(bytes).records() {
            let record = record.map_err(|error| {
                let line = error.position().map_or(0, csv::Position::line);
                format!(
                    "line {line} cannot be read; the format is token,user,uid,\"group1,group2\""
                )
            })?;
            let line = record.position().map_or(0, csv::Position::line);
            let wrong = |what: &str| {
                Err(format!(
                    "line {line} has no {what}; the format is token,user,uid,\"group1,group2\""
                ))
            };
            let Some(token) = record.get(0).and_then(Token::parse) else {
                return wrong("valid token");
            };
            let Some(name) = record.get(1).filter(|name| !name.is_empty()) else {
                return wrong("user");
            };
            let Some(uid) = record.get(2) else {
                return wrong("uid");
            };
            let groups = record
                .get(3)
                .unwrap_or_default()
                .split(',')
                .map(str::trim)
                .filter(|group| !group.is_empty())
                .map(str::to_owned);
            let subject = Subject {
                name: name.to_owned(),
                groups: groups.collect(),
            };
            let identity = Identity {
                uid: uid.to_owned(),
                ..Identity::lasting(subject, Proof::ListedToken)
            };
            if table.insert(token_id(&token), Arc::new(identity)).is_some() {
                return Err(format!(
                    "line {line} repeats the token of an earlier line; give each user a token"
                ));
            }
        }
        Ok(Self(table))
    }

    /// Returns the owner of a token.
    pub fn owner(&self, token: &Token) -> Option<Arc<Identity>> {
        self.0.get(&token_id(token)).cloned()
    }
}

/// The path of a file with a [`TokenTable`].
#[derive(Clone, Debug)]
pub(super) struct TokenTableFile(pub(super) PathBuf);

impl Files for TokenTableFile {
    type Config = TokenTable;

    fn paths(&self) -> Vec<&Path> {
        vec![&self.0]
    }

    fn load(&self) -> Result<Arc<TokenTable>, FileError> {
        let table = TokenTable::parse(&read(&self.0)?);
        table.map(Arc::new).map_err(|reason| FileError::Content {
            file: self.0.clone(),
            reason,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_users_and_their_groups() {
        let table = TokenTable::parse(
            b"# agents\nabc,system:node:n1,1,system:nodes\ndef,alice,2,\"on-call, kplane:admins\"\nghi,bob,3\n",
        ).unwrap();
        let owner = |token| table.owner(&Token::parse(token).unwrap());
        assert_eq!(owner("abc").unwrap().node(&[]), Some("n1"));
        let alice = owner("def").unwrap();
        assert_eq!(alice.subject.groups, ["on-call", "kplane:admins"]);
        assert!(owner("ghi").unwrap().subject.groups.is_empty());
        assert_eq!(owner("abcd"), None);
    }

    #[test]
    fn mistakes_name_the_line_and_not_the_token() {
        for text in [
            "abc,alice,1\nsecret",
            "abc,alice,1\nsecret,,2",
            "abc,a,1\nsec ret,b,2",
            "secret,a,1\nsecret,b,2",
        ] {
            let error = TokenTable::parse(text.as_bytes()).unwrap_err();
            assert!(
                error.contains("line 2") && !error.contains("sec"),
                "{error}"
            );
        }
    }
}
