//! Requests to the API server about identities and rights: TokenReview, SubjectAccessReview, published keys.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kplane_desired_state::k8s::Uid;
use kplane_desired_state::kubernetes::{Api, Asked, Failure, Unanswered};
use kplane_tls::{Subject, Token};
use kube::api::PostParams;
use serde::de::DeserializeOwned;

use super::{AUDIENCE, Identity, NodeBinding, Proof, Right};

/// Longest wait for an answer. The caller's connection waits meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
/// Prefix of the attributes that the API server adds to users.
const EXTRA: &str = "authentication.kubernetes.io/";

const TOKENS: Asked = Asked::new("create", "tokenreviews", "authentication.k8s.io");
const RIGHTS: Asked = Asked::new("create", "subjectaccessreviews", "authorization.k8s.io");
pub(super) const KEYS: Asked = Asked::new("get", "/openid/v1/jwks", "");

/// The API server's answer about a token.
#[derive(Debug)]
pub(super) enum Review {
    /// The token is valid, and its owner is this user.
    Accepted(Box<UserInfo>),
    /// The token is invalid.
    Rejected,
}

/// The API server, as far as identities and rights are concerned.
#[derive(Debug)]
pub(super) struct Reviews(Arc<Api>);

impl Reviews {
    pub(super) fn new(api: Arc<Api>) -> Self {
        Self(api)
    }

    /// Asks who owns a token. `for_kplane` accepts tokens with kplane's audience only, otherwise those for the API
    /// server.
    pub(super) async fn token(
        &self,
        token: &Token,
        for_kplane: bool,
    ) -> Result<Review, Unanswered> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.as_str().to_owned(),
                audiences: for_kplane.then(|| vec![AUDIENCE.to_owned()]),
            },
            ..TokenReview::default()
        };
        let client: kube::Api<TokenReview> = kube::Api::all(self.0.client());
        let params = PostParams::default();
        let answer = self.0.ask(TOKENS, PATIENCE, client.create(&params, &review)).await?;
        let status = answer.status.unwrap_or_default();
        let audiences = status.audiences.unwrap_or_default();
        // An API server that knows no audiences answers without any (TokenReviewStatus.audiences).
        let is_ours = !for_kplane || audiences.iter().any(|audience| audience == AUDIENCE);
        Ok(match (status.authenticated, status.user) {
            (Some(true), Some(user)) if is_ours => Review::Accepted(Box::new(user)),
            _ => Review::Rejected,
        })
    }

    /// Asks whether a user has a right. Returns the reason of a denial.
    pub(super) async fn right(
        &self,
        identity: &Identity,
        right: &Right,
    ) -> Result<Result<(), String>, Unanswered> {
        let extra: BTreeMap<_, _> = identity.extra.clone();
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(identity.subject.name.clone()),
                uid: Some(identity.uid.clone()).filter(|uid| !uid.is_empty()),
                groups: Some(identity.subject.groups.clone()),
                extra: Some(extra).filter(|extra| !extra.is_empty()),
                non_resource_attributes: Some(NonResourceAttributes {
                    path: Some(right.path()),
                    verb: Some(right.verb().to_owned()),
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let client: kube::Api<SubjectAccessReview> = kube::Api::all(self.0.client());
        let params = PostParams::default();
        let answer = self.0.ask(RIGHTS, PATIENCE, client.create(&params, &review)).await?;
        let status = answer.status.unwrap_or_default();
        Ok(if status.allowed && status.denied != Some(true) {
            Ok(())
        } else {
            Err(status.reason.unwrap_or_default())
        })
    }

    /// Reads a document about the published keys.
    pub(super) async fn document<T: DeserializeOwned>(&self, path: &str) -> Result<T, Unanswered> {
        let request = http::Request::get(path).body(Vec::new()).map_err(|error| Unanswered {
            asked: KEYS,
            failure: Failure::Malformed(error.to_string()),
        })?;
        self.0.ask(KEYS, PATIENCE, self.0.client().request(request)).await
    }
}

/// Returns the identity of a reviewed token's owner. `until` is the end of the token.
pub(super) fn identity(user: UserInfo, for_kplane: bool, until: Option<SystemTime>) -> Identity {
    let extra = user.extra.unwrap_or_default();
    let first = |name: &str| {
        let values = extra.get(&format!("{EXTRA}{name}"))?;
        values.first().cloned()
    };
    let node = first("node-name").map(|name| NodeBinding {
        name,
        uid: first("node-uid").and_then(|uid| Uid::parse(&uid)),
    });
    Identity {
        subject: Subject {
            name: user.username.unwrap_or_default(),
            groups: user.groups.unwrap_or_default(),
        },
        uid: user.uid.unwrap_or_default(),
        proof: Proof::ApiToken { node, for_kplane },
        until,
        extra,
    }
}
