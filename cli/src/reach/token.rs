//! The user's bearer token, as metadata of every call.

use http::HeaderValue;
use kplane_tls::Token;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Key of the metadata that carries the token.
const AUTHORIZATION: &str = "authorization";

/// Returns the value of the header `authorization`, which no log shows.
pub(super) fn header(token: &Token) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(token.to_header()).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Adds the token, if there is one, to every call.
#[derive(Clone, Debug)]
pub(crate) struct Bearer(Option<MetadataValue<Ascii>>);

impl Bearer {
    /// Takes the token for the calls over one connection.
    pub(crate) fn new(token: Option<&Token>) -> Self {
        let value = token.and_then(|token| MetadataValue::try_from(token.to_header()).ok());
        Self(value.map(|mut value| {
            value.set_sensitive(true);
            value
        }))
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert(AUTHORIZATION, value.clone());
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_sent_and_never_shown() {
        let token = Token::parse("secret").unwrap();
        assert!(header(&token).unwrap().is_sensitive());
        let mut bearer = Bearer::new(Some(&token));
        assert!(!format!("{bearer:?}").contains("secret"));
        let request = bearer.call(Request::new(())).unwrap();
        assert!(!format!("{request:?}").contains("secret"));
        let value = request.metadata().get(AUTHORIZATION).unwrap();
        assert_eq!(
            (value.to_str().unwrap(), value.is_sensitive()),
            ("Bearer secret", true)
        );
        let without = Bearer::new(None).call(Request::new(())).unwrap();
        assert!(without.metadata().is_empty());
    }
}
