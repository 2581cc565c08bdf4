//! Certificates that kplane makes: an authority, and certificates of it. No I/O.

use std::fmt;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, Error, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use time::OffsetDateTime;

use crate::identity::REPLICAS;

/// Seconds of a day.
pub(crate) const DAY: u64 = 86_400;
/// Lifetime of an authority.
pub(crate) const AUTHORITY: Duration = Duration::from_secs(3_650 * DAY);
/// Certificates are valid from this long ago, for machines whose clocks are late.
const CLOCKS: Duration = Duration::from_secs(3_600);

/// A certificate and its key, in PEM.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

/// Shows no key.
impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.certificate)
    }
}

impl Pair {
    /// Makes an authority.
    pub(crate) fn authority(now: SystemTime) -> Result<Self, Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "kplane");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        lasts(&mut params, now, AUTHORITY);
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?.pem();
        let key = key.serialize_pem();
        Ok(Self { certificate, key })
    }

    /// Returns the authority that this pair is, to make certificates of it.
    pub(crate) fn issuer(&self) -> Result<Issuer<'static, KeyPair>, Error> {
        Issuer::from_ca_cert_pem(&self.certificate, KeyPair::from_pem(&self.key)?)
    }
}

/// Returns what a control plane shows to agents, to users, and to other replicas: its names, and that it is a replica.
pub(crate) fn control_plane(names: &[String]) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::new(names)?;
    let subject = &mut params.distinguished_name;
    subject.push(DnType::CommonName, "kp-controlplane");
    subject.push(DnType::OrganizationName, REPLICAS);
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    Ok(params)
}

/// Makes a certificate with a new key. `params` has the subject, the names and the uses.
pub(crate) fn issue(
    issuer: &Issuer<'_, KeyPair>,
    mut params: CertificateParams,
    now: SystemTime,
    lifetime: Duration,
) -> Result<Pair, Error> {
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.use_authority_key_identifier_extension = true;
    lasts(&mut params, now, lifetime);
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, issuer)?.pem();
    let key = key.serialize_pem();
    Ok(Pair { certificate, key })
}

fn lasts(params: &mut CertificateParams, now: SystemTime, lifetime: Duration) {
    params.not_before = OffsetDateTime::from(now - CLOCKS);
    params.not_after = OffsetDateTime::from(now + lifetime);
}
