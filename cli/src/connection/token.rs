//! The user's bearer token, as metadata of every call.

use http::HeaderValue;
use http::header::AUTHORIZATION;
use kplane_tls::Token;
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Adds the token, if there is one, to every call.
#[derive(Clone, Debug)]
pub(crate) struct Bearer(Option<HeaderValue>);

impl Bearer {
    /// Takes the token for the calls over one connection.
    pub(crate) fn new(token: Option<&Token>) -> Self {
        Self(token.and_then(|token| token.to_header().ok()))
    }

    /// Returns the value of the header, which is marked as sensitive.
    pub(crate) fn header(&self) -> Option<&HeaderValue> {
        self.0.as_ref()
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            let headers = request.metadata_mut().as_mut();
            headers.insert(AUTHORIZATION, value.clone());
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
        assert!(token.to_header().unwrap().is_sensitive());
        let mut bearer = Bearer::new(Some(&token));
        assert!(!format!("{bearer:?}").contains("secret"));
        let request = bearer.call(Request::new(())).unwrap();
        assert!(!format!("{request:?}").contains("secret"));
        let value = request.metadata().get(AUTHORIZATION.as_str()).unwrap();
        assert_eq!(
            (value.to_str().unwrap(), value.is_sensitive()),
            ("Bearer secret", true)
        );
        let without = Bearer::new(None).call(Request::new(())).unwrap();
        assert!(without.metadata().is_empty());
    }
}
