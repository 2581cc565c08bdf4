//! Tokens against published keys.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use serde_json::{Value, json};

use super::super::claims;
use super::*;

pub(super) const ISSUER: &str = "https://issuer.example";

/// A key of an API server.
pub(super) struct Signer(EcdsaKeyPair);

impl Signer {
    pub(super) fn new() -> Self {
        let (algorithm, random) = (&ECDSA_P256_SHA256_FIXED_SIGNING, SystemRandom::new());
        let key = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
        Self(EcdsaKeyPair::from_pkcs8(algorithm, key.as_ref(), &random).unwrap())
    }

    /// Returns the set of keys that the API server publishes.
    pub(super) fn document(&self, kid: &str) -> Value {
        let point = self.0.public_key().as_ref();
        let [x, y] = [&point[1..33], &point[33..]].map(|half| URL_SAFE_NO_PAD.encode(half));
        json!({"keys": [
            {"kty": "oct", "kid": kid, "k": "c2VjcmV0"},
            {"kty": "EC", "crv": "P-256", "kid": kid, "x": x, "y": y},
        ]})
    }

    fn published(&self, kid: &str) -> KeySet {
        let keys = serde_json::from_value(self.document(kid)).unwrap();
        KeySet::new(ISSUER.to_owned(), keys)
    }

    pub(super) fn token(&self, header: &Value, claims: &Value) -> Token {
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", encode(header), encode(claims));
        let signature = self.0.sign(&SystemRandom::new(), signed.as_bytes()).unwrap();
        let signature = URL_SAFE_NO_PAD.encode(signature.as_ref());
        Token::parse(&format!("{signed}.{signature}")).unwrap()
    }
}

pub(super) fn claims(seconds: i64) -> Value {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    json!({
        "iss": ISSUER, "sub": "system:serviceaccount:kplane:kplane-nodeagent", "aud": ["kplane"],
        "nbf": now - 60, "exp": now.saturating_add_signed(seconds),
        "kubernetes.io": {"node": {"name": "n1", "uid": "11111111-2222-3333-4444-555555555555"}},
    })
}

fn check(keys: &KeySet, token: &Token) -> Checked {
    keys.check(&Parts::parse(token).unwrap(), SystemTime::now())
}

#[test]
fn only_what_a_key_signed_is_valid() {
    let (signer, other) = (Signer::new(), Signer::new());
    let keys = signer.published("k1");
    let header = json!({"alg": "ES256", "kid": "k1"});
    let good = signer.token(&header, &claims(600));
    assert_eq!(check(&keys, &good), Checked::Valid);
    let identity = Parts::parse(&good).unwrap().identity().unwrap();
    let accounts = ["system:serviceaccount:kplane:kplane-nodeagent".to_owned()];
    assert_eq!(identity.node(&accounts), Some("n1"));
    assert_eq!(identity.node(&[]), None);

    let invalid = |token: Token| {
        let checked = check(&keys, &token);
        assert!(matches!(checked, Checked::Invalid(_)), "{checked:?}");
    };
    invalid(other.token(&header, &claims(600)));
    invalid(signer.token(&json!({"alg": "none", "kid": "k1"}), &claims(600)));
    invalid(signer.token(&json!({"alg": "HS256", "kid": "k1"}), &claims(600)));
    invalid(signer.token(&json!({"alg": "RS256", "kid": "k1"}), &claims(600)));
    let mut endless = claims(600);
    endless.as_object_mut().unwrap().remove("exp");
    invalid(signer.token(&header, &endless));
    // Another node under the same signature.
    let mut stolen = claims(600);
    stolen["kubernetes.io"]["node"]["name"] = json!("n2");
    let (_, signature) = good.as_str().rsplit_once('.').unwrap();
    let forged = signer.token(&header, &stolen);
    let (signed, _) = forged.as_str().rsplit_once('.').unwrap();
    invalid(Token::parse(&format!("{signed}.{signature}")).unwrap());

    // About these the API server decides.
    let mut foreign = claims(600);
    foreign["iss"] = json!("https://other.example");
    let mut early = claims(600);
    early["nbf"] = early["exp"].clone();
    let unknown = json!({"alg": "ES256", "kid": "k2"});
    for token in [
        signer.token(&unknown, &claims(600)),
        signer.token(&header, &claims(-1)),
        signer.token(&header, &foreign),
        signer.token(&header, &early),
    ] {
        assert_eq!(check(&keys, &token), Checked::Unknown);
    }
    assert_eq!(check(&KeySet::default(), &good), Checked::Unknown);
}

#[test]
fn what_is_no_token_of_an_account_is_nobody() {
    for text in [
        "",
        "a.b",
        "a.b.c",
        "e30.e30.",
        "e30.W10.",
        "....",
        "e30.e30.!",
    ] {
        let parsed = Token::parse(text);
        let parts = parsed.as_ref().and_then(Parts::parse);
        assert!(
            parts.is_none_or(|parts| parts.identity().is_none()),
            "{text}"
        );
    }
    let mut user = claims(600);
    for subject in [
        "alice",
        "system:serviceaccount:",
        "system:serviceaccount:a",
        "system:serviceaccount::b",
    ] {
        user["sub"] = json!(subject);
        let claims: claims::Claims = serde_json::from_value(user.clone()).unwrap();
        assert_eq!(claims.identity(), None, "{subject}");
    }
}
