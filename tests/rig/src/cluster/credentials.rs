//! Keys, tokens and kubeconfigs of a cluster, as files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use ring::rand::{SecureRandom as _, SystemRandom};
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _};
use serde_json::json;

/// The group whose members may do everything.
const ADMINISTRATORS: &str = "system:masters";

/// The bytes before the point of a P-256 key in a `SubjectPublicKeyInfo` (RFC 5480, in DER): the
/// algorithms id-ecPublicKey and prime256v1, and the head of a bit string of 66 bytes.
const P256_PUBLIC_KEY: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// The files that the API server reads.
#[derive(Clone, Debug)]
pub(super) struct Credentials {
    /// The key that signs tokens of ServiceAccounts: an ECDSA key, which is created at once, while
    /// RSA takes seconds.
    pub(super) account_key: PathBuf,
    /// The public half of the key: the server does not take it from a private one in PKCS#8.
    pub(super) account_public_key: PathBuf,
    /// The file with the users' tokens.
    pub(super) tokens: PathBuf,
    /// The administrator's token.
    pub(super) admin_token: String,
}

impl Credentials {
    /// Finds the credentials in a folder, or creates them.
    pub(super) fn in_folder(folder: &Path) -> Result<Self> {
        let credentials = Self {
            account_key: folder.join("accounts.key"),
            account_public_key: folder.join("accounts.pub"),
            tokens: folder.join("tokens.csv"),
            admin_token: String::new(),
        };
        if !credentials.tokens.exists() {
            credentials.make()?;
        }
        let tokens = fs::read_to_string(&credentials.tokens)
            .with_context(|| credentials.tokens.display().to_string())?;
        let (token, _) = tokens.split_once(',').context("no token in tokens.csv")?;
        Ok(Self {
            admin_token: token.to_owned(),
            ..credentials
        })
    }

    fn make(&self) -> Result<()> {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random)
            .ok()
            .context("the system has no random numbers")?;
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, key.as_ref(), &random)
            .ok()
            .context("a new key cannot be read again")?;
        let public = [&P256_PUBLIC_KEY, pair.public_key().as_ref()].concat();
        write_pem(&self.account_key, "PRIVATE KEY", key.as_ref())?;
        write_pem(&self.account_public_key, "PUBLIC KEY", &public)?;
        let mut token = [0; 16];
        random.fill(&mut token).ok().context("the system has no random numbers")?;
        let token = format!("{:032x}", u128::from_ne_bytes(token));
        let line = format!("{token},admin,admin,{ADMINISTRATORS}\n");
        fs::write(&self.tokens, line).with_context(|| self.tokens.display().to_string())
    }
}

fn write_pem(to: &Path, tag: &str, der: &[u8]) -> Result<()> {
    let text = pem::encode(&pem::Pem::new(tag, der));
    fs::write(to, text).with_context(|| to.display().to_string())
}

/// Writes a kubeconfig as JSON, which every YAML reader accepts.
pub(super) fn write_kubeconfig(to: &Path, server: &str, ca: &Path, token: &str) -> Result<()> {
    let name = "kplane-tests";
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": name, "cluster": {
            "server": server, "certificate-authority": ca,
        } }],
        "users": [{ "name": name, "user": { "token": token } }],
        "contexts": [{ "name": name, "context": { "cluster": name, "user": name } }],
        "current-context": name,
    });
    fs::write(to, serde_json::to_vec_pretty(&config)?)
        .with_context(|| format!("write {}", to.display()))
}
