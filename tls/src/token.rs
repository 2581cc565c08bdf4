//! Bearer tokens (RFC 6750), and the files that hold them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::HeaderValue;
use http::header::InvalidHeaderValue;

use crate::files::{FileError, Files, read};

/// Prefix of the value of the header `authorization`.
const SCHEME: &str = "Bearer ";

/// A bearer token. Every holder of its text counts as its owner, so the text appears in no log and no error.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Arc<str>);

impl Token {
    /// Most bytes of a token. A ServiceAccount token has about 1,200.
    pub const MAX_BYTES: usize = 12 * 1024;

    /// Checks that a text can be sent as a token: visible ASCII without spaces, and not too long.
    pub fn parse(text: &str) -> Option<Self> {
        let fits = (1..=Self::MAX_BYTES).contains(&text.len());
        let plain = text.bytes().all(|byte| byte.is_ascii_graphic());
        (fits && plain).then(|| Self(text.into()))
    }

    /// Reads a token from a file, without the white space around it.
    ///
    /// # Errors
    /// [`FileError`] when the file cannot be read or holds no token.
    pub fn read(file: &Path) -> Result<Self, FileError> {
        let bytes = read(file)?;
        let text = str::from_utf8(&bytes).unwrap_or_default();
        Self::parse(text.trim()).ok_or_else(|| FileError::Content {
            file: file.to_owned(),
            reason: format!(
                "no token: it must be one word of at most {} visible ASCII characters",
                Self::MAX_BYTES
            ),
        })
    }

    /// Reads the token in the value of the header `authorization`. `None` for other schemes.
    pub fn of_header(value: &str) -> Option<Self> {
        let scheme = value.get(..SCHEME.len())?;
        // RFC 9110, section 11.1: the scheme's case does not matter.
        let token = scheme.eq_ignore_ascii_case(SCHEME).then(|| &value[SCHEME.len()..])?;
        Self::parse(token.trim())
    }

    /// Returns the value of the header `authorization`, marked so that no log shows it.
    ///
    /// # Errors
    /// None happens: a token consists of characters that a header may have.
    pub fn to_header(&self) -> Result<HeaderValue, InvalidHeaderValue> {
        let mut value = HeaderValue::try_from(format!("{SCHEME}{}", self.0))?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The path of a file with a token, which its writer replaces before the token ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFile(pub PathBuf);

impl Files for TokenFile {
    type Config = Token;

    fn paths(&self) -> Vec<&Path> {
        vec![&self.0]
    }

    fn load(&self) -> Result<Arc<Token>, FileError> {
        Token::read(&self.0).map(Arc::new)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn headers_and_files_give_the_token_and_nothing_else() {
        let text = |value| Token::of_header(value).map(|token| token.as_str().to_owned());
        assert_eq!(text("Bearer abc.def-_~+/="), Some("abc.def-_~+/=".into()));
        assert_eq!(text("bearer  abc "), Some("abc".into()));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Basic abc",
            "Bearer a b",
            "Béarer abc",
            "Bearer \u{e9}",
        ] {
            assert_eq!(text(wrong), None, "{wrong:?}");
        }
        let long = format!("Bearer {}", "x".repeat(Token::MAX_BYTES + 1));
        assert_eq!(text(&long), None);
        let token = Token::parse("secret").unwrap();
        let header = token.to_header().unwrap();
        assert!(header.is_sensitive());
        assert_eq!(
            Token::of_header(header.to_str().unwrap()),
            Some(token.clone())
        );
        assert!(!format!("{token:?}").contains("secret"));

        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        fs::write(&file, "secret\n").unwrap();
        assert_eq!(Token::read(&file).unwrap(), token);
        fs::write(&file, "two words").unwrap();
        let error = Token::read(&file).unwrap_err().to_string();
        assert!(
            error.contains("token") && !error.contains("words"),
            "{error}"
        );
    }
}
