//! Bearer tokens: read from files with a limit, and never shown.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use http::HeaderValue;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Most bytes of a file with a token. A token of a ServiceAccount has a fiftieth of that.
const MAX_BYTES: u64 = 64 << 10;

/// Key of the metadata that carries the token.
const AUTHORIZATION: &str = "authorization";

/// A bearer token. Its text appears in no error and no debug output.
#[derive(Clone)]
pub(crate) struct Token(MetadataValue<Ascii>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// A file that contains no usable token. The text names the file and the remedy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenError {
    /// The file cannot be read.
    #[error("cannot read the token {}: {source}", file.display())]
    Read { file: PathBuf, source: io::Error },
    /// The file is larger than any real one.
    #[error("{} is larger than {MAX_BYTES} bytes: is it a token?", file.display())]
    Large { file: PathBuf },
    /// The file contains no single word.
    #[error("{} contains no token: it must have one word of ASCII characters", file.display())]
    Text { file: PathBuf },
}

impl Token {
    /// Reads a file that contains a token and perhaps white space around it.
    pub(crate) fn read(file: &Path) -> Result<Self, TokenError> {
        let named = || file.to_owned();
        let failed = |source| TokenError::Read {
            file: named(),
            source,
        };
        let mut bytes = Vec::new();
        let mut limited = File::open(file).map_err(failed)?.take(MAX_BYTES + 1);
        limited.read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(TokenError::Large { file: named() });
        }
        let text = str::from_utf8(&bytes).ok();
        text.and_then(Self::of_text)
            .ok_or_else(|| TokenError::Text { file: named() })
    }

    /// Takes a token with perhaps white space around it; `None` for anything that is not a single word.
    pub(crate) fn of_text(text: &str) -> Option<Self> {
        let text = text.trim();
        let is_word = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
        is_word.then(|| Self::of_header(&format!("Bearer {text}")))?
    }

    /// Takes the value of the header `authorization`; `None` if it is not a bearer token.
    pub(crate) fn of_header(header: &str) -> Option<Self> {
        header.strip_prefix("Bearer ")?;
        let mut value = MetadataValue::try_from(header).ok()?;
        value.set_sensitive(true);
        Some(Self(value))
    }

    /// Returns the value of the header `authorization`.
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        let mut value = HeaderValue::from_bytes(self.0.as_bytes()).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

/// Adds the token, if there is one, to every call.
#[derive(Clone, Debug)]
pub(crate) struct Bearer(pub(crate) Option<Token>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            let metadata = request.metadata_mut();
            metadata.insert(AUTHORIZATION, token.0.clone());
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(content: &[u8]) -> Result<Token, TokenError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        fs::write(&file, content).unwrap();
        Token::read(&file)
    }

    #[test]
    fn a_token_is_one_word() {
        let token = read(b"  abc.DEF-1_2~+/=\n").unwrap();
        assert_eq!(token.header().unwrap(), "Bearer abc.DEF-1_2~+/=");
        for content in [
            &b""[..],
            b" \n",
            b"two words",
            b"a\nb",
            b"\xff\xfe",
            b"t\xc3\xb6",
        ] {
            let error = read(content).unwrap_err();
            assert!(matches!(error, TokenError::Text { .. }), "{error}");
        }
    }

    #[test]
    fn a_token_is_bounded() {
        let limit = usize::try_from(MAX_BYTES).unwrap();
        read(&vec![b'a'; limit]).unwrap();
        let error = read(&vec![b'a'; limit + 1]).unwrap_err();
        assert!(error.to_string().contains("65536 bytes"), "{error}");
        // A device has no size, and no end.
        let endless = Token::read(Path::new("/dev/zero")).unwrap_err();
        assert!(matches!(endless, TokenError::Large { .. }), "{endless}");
        let error = Token::read(Path::new("/nowhere/token")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/token"), "{error}");
    }

    #[test]
    fn a_token_is_never_shown() {
        let token = read(b"secret").unwrap();
        assert_eq!(
            format!("{:?}", Bearer(Some(token.clone()))),
            "Bearer(Some(Token))"
        );
        assert!(token.header().unwrap().is_sensitive());
        let request = Bearer(Some(token)).call(Request::new(())).unwrap();
        assert!(
            request
                .metadata()
                .get(AUTHORIZATION)
                .unwrap()
                .is_sensitive()
        );
        assert!(!format!("{request:?}").contains("secret"));
        let without = Bearer(None).call(Request::new(())).unwrap();
        assert!(without.metadata().is_empty());
        assert!(Token::of_header("Basic YTpi").is_none());
    }
}
