//! The user's credentials: a client of the API server, and what proves the same user to the control plane.
//!
//! The crate kube knows every form of credentials, but does not hand them out. The token is taken from a request that
//! goes nowhere, and the certificate from a TLS configuration.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Response};
use kplane_model::one_line;
use kplane_tls::{FileError, ResolvesClientCert, Token, is_this_machine};
use kube::client::{AuthError, Body, ConfigExt as _};
use kube::config::{AuthInfo, ExecConfig};
use kube::{Client, Config};
use secrecy::ExposeSecret as _;
use tokio::task::spawn_blocking;
use tower::{BoxError, Layer as _, ServiceExt as _, service_fn};

use super::kubeconfig::{self, KubeconfigError, Selected};
use crate::connection::root_cause;

/// A user of a cluster.
pub(super) struct Login {
    /// The client of the API server.
    pub(super) client: Client,
    /// The user's bearer token, if there is one.
    pub(super) token: Option<Token>,
    /// The user's certificate, if there is one.
    pub(super) certificate: Arc<dyn ResolvesClientCert>,
}

/// Credentials that cannot be obtained. The text contains none of them.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoginError {
    /// The file with the token cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The token is not a word.
    #[error("the kubeconfig {place}: the user's token is not a single word of ASCII characters")]
    Token { place: String },
    /// The program that makes credentials cannot be started.
    #[error(
        "the kubeconfig {place}: cannot run {program:?}, which makes your credentials: {reason}"
    )]
    Start {
        place: String,
        program: String,
        reason: String,
    },
    /// The program that makes credentials failed.
    #[error("the kubeconfig {place}: {program:?}, which makes your credentials, failed: {reason}")]
    Failed {
        place: String,
        program: String,
        reason: String,
    },
    /// A certificate or key cannot be used.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    /// The proxy cannot be used.
    #[error("the kubeconfig {place}: the proxy cannot be used: {reason}")]
    Proxy { place: String, reason: String },
    /// The API server speaks plain text, and is another machine.
    #[error(
        "the kubeconfig {place}: your token is not sent in plain text to another machine. Use \
         https:// for the API server"
    )]
    PlainText { place: String },
    /// Any other problem.
    #[error("the kubeconfig {place}: the user's credentials cannot be obtained: {reason}")]
    Other { place: String, reason: String },
}

/// Obtains the credentials and makes a client, without a request to the API server. Programs that the kubeconfig names
/// run once, or a few times if they make certificates.
pub(super) async fn login(selected: Selected, limit: Duration) -> Result<Login, LoginError> {
    let Selected {
        mut config, place, ..
    } = selected;
    config.connect_timeout = Some(limit);
    config.default_retry = false;
    let explain = Explain::new(&place, &config.auth_info);
    let header = match own_token(&config.auth_info, &place)? {
        Some(token) => token.to_header().ok(),
        None => made_header(&config, &explain).await?,
    };
    let mut token = None;
    if let Some(mut header) = header {
        let is_here = is_this_machine(config.cluster_url.host().unwrap_or_default());
        if config.cluster_url.scheme_str() != Some("https") && !is_here {
            return Err(LoginError::PlainText { place });
        }
        token = header.to_str().ok().and_then(Token::of_header);
        header.set_sensitive(true);
        config.headers.push((AUTHORIZATION, header));
        forget_sources(&mut config.auth_info);
    }
    // The program may run again, for its certificate.
    let made: Result<_, kube::Error> = spawn_blocking(move || {
        let tls = config.rustls_client_config()?;
        Ok((Client::try_from(config)?, tls.client_auth_cert_resolver))
    })
    .await
    .map_err(|_| explain.other("it crashed"))?;
    let (client, certificate) = made.map_err(|error| explain.kube(&error))?;
    Ok(Login {
        client,
        token,
        certificate,
    })
}

/// Returns the token that the kubeconfig contains, or whose file it names. The order is kubectl's.
fn own_token(user: &AuthInfo, place: &str) -> Result<Option<Token>, LoginError> {
    if user.auth_provider.is_some() || user.username.is_some() && user.password.is_some() {
        return Ok(None);
    }
    let inline = user
        .token
        .as_ref()
        .map(|token| {
            Token::parse(token.expose_secret().trim()).ok_or_else(|| LoginError::Token {
                place: place.to_owned(),
            })
        })
        .transpose()?;
    let Some(file) = &user.token_file else {
        return Ok(inline);
    };
    match (Token::read(Path::new(file)), inline) {
        (Ok(token), _) | (Err(_), Some(token)) => Ok(Some(token)),
        (Err(error), None) => Err(error.into()),
    }
}

/// Returns the header that kube makes of other sources, such as a program that the kubeconfig names.
async fn made_header(
    config: &Config,
    explain: &Explain,
) -> Result<Option<HeaderValue>, LoginError> {
    let config = config.clone();
    let layer = spawn_blocking(move || config.auth_layer())
        .await
        .map_err(|_| explain.other("the token is not a word"))?;
    let Some(layer) = layer.map_err(|error| explain.kube(&error))? else {
        return Ok(None);
    };
    let nowhere = service_fn(|request: Request<Body>| async move {
        let header = request.headers().get(AUTHORIZATION).cloned();
        Ok::<_, BoxError>(Response::new(header))
    });
    let answer = layer
        .layer(nowhere)
        .oneshot(Request::new(Body::empty()))
        .await
        .map_err(|error| explain.other(&root_cause(&*error)))?;
    Ok(answer.into_body())
}

/// Removes the sources of a token, which is there now.
fn forget_sources(user: &mut AuthInfo) {
    user.token = None;
    user.token_file = None;
    user.exec = None;
    user.auth_provider = None;
    user.username = None;
    user.password = None;
}

/// Turns errors of kube into those of this module, without what programs printed to standard output.
struct Explain {
    place: String,
    exec: Option<ExecConfig>,
}

impl Explain {
    fn new(place: &str, user: &AuthInfo) -> Self {
        Self {
            place: place.to_owned(),
            exec: user.exec.clone(),
        }
    }

    fn other(&self, reason: &str) -> LoginError {
        LoginError::Other {
            place: self.place.clone(),
            reason: one_line(reason),
        }
    }

    fn kube(&self, error: &kube::Error) -> LoginError {
        let place = self.place.clone();
        match error {
            kube::Error::Auth(error) => self.auth(error),
            kube::Error::InferKubeconfig(error) => kubeconfig::explain(&place, error).into(),
            kube::Error::RustlsTls(error) => LoginError::Kubeconfig(KubeconfigError::Material {
                place,
                what: "a certificate or key",
                reason: one_line(&error.to_string()),
            }),
            // The address of a proxy may contain a password.
            kube::Error::ProxyProtocolUnsupported { .. } => LoginError::Proxy {
                place,
                reason: "it must be http://, https:// or socks5://".to_owned(),
            },
            error => self.other(&root_cause(error)),
        }
    }

    fn auth(&self, error: &AuthError) -> LoginError {
        let place = self.place.clone();
        let program = self.exec.as_ref().and_then(|exec| exec.command.clone()).unwrap_or_default();
        match error {
            AuthError::AuthExecStart(error) => {
                let hint = self.exec.as_ref().and_then(|exec| exec.install_hint.clone());
                LoginError::Start {
                    place,
                    program,
                    reason: one_line(&format!("{error}. {}", hint.unwrap_or_default())),
                }
            }
            AuthError::AuthExecRun { out, .. } => {
                let said = String::from_utf8_lossy(&out.stderr);
                let last = said.lines().last().unwrap_or_default();
                LoginError::Failed {
                    place,
                    program,
                    reason: one_line(&format!("{} {last}", out.status)),
                }
            }
            AuthError::AuthExecParse(_) | AuthError::ExecPluginFailed => LoginError::Failed {
                place,
                program,
                reason: "it printed no ExecCredential with a status".to_owned(),
            },
            error => self.other(&error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests;
