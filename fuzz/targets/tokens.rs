//! Tokens and the documents against which they are checked: whatever the bytes are, an identity or a reason.
//!
//! The first byte chooses what the others are: a header with a token, a set of published keys, the content of a token
//! that a key of the cluster signed, a file of tokens, or a file of rights.

#![no_main]

use std::sync::LazyLock;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use kplane_agents::identity::{Checked, KeySet, Parts, Published, Right, Rules, TokenTable};
use kplane_tls::{Subject, Token};
use libfuzzer_sys::fuzz_target;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};

/// The cluster's key.
static SIGNER: LazyLock<EcdsaKeyPair> = LazyLock::new(|| {
    let (algorithm, random) = (&ECDSA_P256_SHA256_FIXED_SIGNING, SystemRandom::new());
    let key = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
    EcdsaKeyPair::from_pkcs8(algorithm, key.as_ref(), &random).unwrap()
});

/// The keys that the cluster publishes. Its issuer has no name, as in claims that name none.
static KEYS: LazyLock<KeySet> = LazyLock::new(|| {
    let point = SIGNER.public_key().as_ref();
    let [x, y] = [&point[1..33], &point[33..]].map(|half| URL_SAFE_NO_PAD.encode(half));
    let keys =
        format!(r#"{{"keys":[{{"kty":"EC","crv":"P-256","kid":"k","x":"{x}","y":"{y}"}}]}}"#);
    KeySet::new(String::new(), serde_json::from_str(&keys).unwrap())
});

/// A token of each kind that keys sign, with a wrong signature.
static TOKENS: LazyLock<[Token; 3]> = LazyLock::new(|| {
    ["RS256", "ES256", "ES384"].map(|algorithm| {
        let header = format!(r#"{{"alg":"{algorithm}","kid":"k"}}"#);
        token(&header, br#"{"exp":99999999999}"#, &[7; 96])
    })
});

fn token(header: &str, claims: &[u8], signature: &[u8]) -> Token {
    let [header, claims, signature] =
        [header.as_bytes(), claims, signature].map(|part| URL_SAFE_NO_PAD.encode(part));
    Token::parse(&format!("{header}.{claims}.{signature}")).unwrap()
}

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    match choice % 5 {
        0 => header(rest),
        1 => keys(rest),
        2 => signed(rest),
        3 => drop(TokenTable::parse(rest)),
        _ => rules(rest),
    }
});

/// The header of a request.
fn header(value: &[u8]) {
    let token = str::from_utf8(value).ok().and_then(Token::of_header);
    let Some(parts) = token.as_ref().and_then(Parts::parse) else {
        return;
    };
    assert_ne!(KEYS.check(&parts, SystemTime::now()), Checked::Valid);
    let _ = parts.identity();
}

/// An answer with published keys, which sign nothing that the fuzzer can make.
fn keys(document: &[u8]) {
    let Ok(published) = serde_json::from_slice::<Published>(document) else {
        return;
    };
    let keys = KeySet::new(String::new(), published);
    for token in &*TOKENS {
        let parts = Parts::parse(token).unwrap();
        assert_ne!(keys.check(&parts, SystemTime::now()), Checked::Valid);
    }
}

/// Claims that the cluster signed. The signature would keep them from being reached.
fn signed(claims: &[u8]) {
    let header = r#"{"alg":"ES256","kid":"k"}"#;
    let [one, two] = [header.as_bytes(), claims].map(|part| URL_SAFE_NO_PAD.encode(part));
    let message = format!("{one}.{two}");
    let signature = SIGNER.sign(&SystemRandom::new(), message.as_bytes()).unwrap();
    if message.len() + 200 > Token::MAX_BYTES {
        return;
    }
    let token = token(header, claims, signature.as_ref());
    let Some(parts) = Parts::parse(&token) else {
        return;
    };
    let now = SystemTime::now();
    if KEYS.check(&parts, now) == Checked::Valid
        && let Some(identity) = parts.identity()
    {
        assert!(identity.until.is_some_and(|until| until > now));
    }
}

/// A file of rights, and what a user may do by it.
fn rules(text: &[u8]) {
    let Ok(rules) = Rules::parse(&String::from_utf8_lossy(text)) else {
        return;
    };
    let subject = Subject {
        name: "a".to_owned(),
        groups: vec!["g".to_owned()],
    };
    for right in [
        Right::ReadStatus,
        Right::ReadDesired("n".to_owned()),
        Right::Act,
    ] {
        let _ = rules.allow(&subject, &right);
    }
}
