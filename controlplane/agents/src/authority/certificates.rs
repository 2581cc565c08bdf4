//! The certificates of a control plane that makes its own, and their renewal. No I/O.
//!
//! An authority is renewed in three steps, so that no client meets a certificate of an authority that it does not
//! know: the new one is published; a day later it signs; the old one stays published until it ends.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use kplane_tls::{Subject, ends_at};
use rcgen::KeyPair;

use crate::cert_issuer::{AUTHORITY, DAY, Pair, control_plane, issue};
use crate::identity::REPLICAS;

/// Time before its end at which an authority gets a successor.
const SUCCESSOR_LEAD: Duration = Duration::from_secs(730 * DAY);
/// Time for which a successor is only published. Volumes of ConfigMaps follow within minutes.
const SETTLING: Duration = Duration::from_secs(DAY);
/// Lifetime of a serving certificate.
const SERVING: Duration = Duration::from_secs(90 * DAY);
/// Time before its end at which a serving certificate is renewed.
const RENEWAL: Duration = Duration::from_secs(30 * DAY);

/// Keys of the Secret's data. `ca.crt`, `tls.crt` and `tls.key` are those of Secrets of the type kubernetes.io/tls.
const SIGNER: [&str; 2] = ["ca.crt", "ca.key"];
const SUCCESSOR: [&str; 2] = ["next-ca.crt", "next-ca.key"];
const PREDECESSOR: &str = "previous-ca.crt";
const SERVER: [&str; 2] = ["tls.crt", "tls.key"];

/// The data of the Secret.
pub(super) type Data = BTreeMap<String, Vec<u8>>;

/// The certificates and keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Certificates {
    signer: Pair,
    /// The next signer, which is published already.
    successor: Option<Pair>,
    /// The signer of before, in PEM.
    predecessor: Option<String>,
    pub(super) server: Pair,
}

impl Certificates {
    /// Makes an authority and a certificate for names.
    pub(super) fn new(names: &[String], now: SystemTime) -> Result<Self, rcgen::Error> {
        let signer = Pair::authority(now)?;
        Ok(Self {
            server: serving(&signer, names, now)?,
            signer,
            successor: None,
            predecessor: None,
        })
    }

    /// Reads a Secret's data; `None` if it lacks something or something in it cannot be parsed.
    pub(super) fn read(data: &Data) -> Option<Self> {
        let text = |key: &str| String::from_utf8(data.get(key)?.clone()).ok();
        let pair = |[certificate, key]: [&str; 2]| {
            let pair = Pair {
                certificate: text(certificate)?,
                key: text(key)?,
            };
            KeyPair::from_pem(&pair.key).ok()?;
            end(&pair.certificate)?;
            Some(pair)
        };
        Some(Self {
            signer: pair(SIGNER)?,
            successor: pair(SUCCESSOR),
            predecessor: text(PREDECESSOR).filter(|text| end(text).is_some()),
            server: pair(SERVER)?,
        })
    }

    /// Returns the data of the Secret.
    pub(super) fn write(&self) -> Data {
        let mut data = Data::new();
        let mut put = |key: &str, text: &str| data.insert(key.to_owned(), text.as_bytes().to_vec());
        let pairs = [
            (SIGNER, Some(&self.signer)),
            (SUCCESSOR, self.successor.as_ref()),
            (SERVER, Some(&self.server)),
        ];
        for ([certificate, key], pair) in pairs {
            if let Some(pair) = pair {
                put(certificate, &pair.certificate);
                put(key, &pair.key);
            }
        }
        if let Some(predecessor) = &self.predecessor {
            put(PREDECESSOR, predecessor);
        }
        data
    }

    /// Returns all authorities that clients must accept, in PEM.
    pub(super) fn bundle(&self) -> String {
        let successor = self.successor.as_ref().map(|pair| pair.certificate.as_str());
        [
            Some(self.signer.certificate.as_str()),
            successor,
            self.predecessor.as_deref(),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Returns the certificates that must take the place of these; `None` while these are good. One step at a time.
    pub(super) fn renewed(
        &self,
        names: &[String],
        now: SystemTime,
    ) -> Result<Option<Self>, rcgen::Error> {
        let left = |certificate: &str| {
            let end = end(certificate).unwrap_or(SystemTime::UNIX_EPOCH);
            end.duration_since(now).unwrap_or_default()
        };
        if let Some(successor) = &self.successor {
            let published = AUTHORITY.saturating_sub(left(&successor.certificate));
            if published >= SETTLING {
                return Ok(Some(Self {
                    server: serving(successor, names, now)?,
                    signer: successor.clone(),
                    predecessor: Some(self.signer.certificate.clone()),
                    successor: None,
                }));
            }
        } else if left(&self.signer.certificate) < SUCCESSOR_LEAD {
            return Ok(Some(Self {
                successor: Some(Pair::authority(now)?),
                ..self.clone()
            }));
        }
        if self.predecessor.as_ref().is_some_and(|old| left(old).is_zero()) {
            return Ok(Some(Self {
                predecessor: None,
                ..self.clone()
            }));
        }
        if left(&self.server.certificate) < RENEWAL || !is_of_replica(&self.server.certificate) {
            return Ok(Some(Self {
                server: serving(&self.signer, names, now)?,
                ..self.clone()
            }));
        }
        Ok(None)
    }
}

/// Returns the end of a certificate in PEM.
fn end(certificate: &str) -> Option<SystemTime> {
    let der = kplane_tls::der(certificate)?;
    ends_at(&der)
}

/// Returns whether a certificate proves to other replicas that its owner is one. Earlier versions made none that does.
fn is_of_replica(certificate: &str) -> bool {
    let der = kplane_tls::der(certificate);
    let subject = der.and_then(|der| Subject::of(&der));
    subject.is_some_and(|subject| subject.groups.iter().any(|group| group == REPLICAS))
}

/// Makes the certificate that replicas show to agents, to users, and to each other.
fn serving(signer: &Pair, names: &[String], now: SystemTime) -> Result<Pair, rcgen::Error> {
    let params = control_plane(names)?;
    issue(&signer.issuer()?, params, now, SERVING)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        vec!["kplane-controlplane.kplane.svc".to_owned()]
    }

    /// Lives through `years`, looking every ten days; returns each change with its day.
    fn live(
        certificates: &mut Certificates,
        start: SystemTime,
        years: u64,
    ) -> Vec<(u64, Certificates)> {
        let mut changes = Vec::new();
        for day in (0..years * 365).step_by(10) {
            let now = start + Duration::from_secs(day * DAY);
            while let Some(next) = certificates.renewed(&names(), now).unwrap() {
                changes.push((day, next.clone()));
                *certificates = next;
            }
            assert!(
                end(&certificates.server.certificate).unwrap() > now,
                "day {day}"
            );
            assert!(
                end(&certificates.signer.certificate).unwrap() > now,
                "day {day}"
            );
        }
        changes
    }

    #[test]
    fn certificates_survive_the_secret() {
        let certificates = Certificates::new(&names(), SystemTime::now()).unwrap();
        let data = certificates.write();
        assert_eq!(Certificates::read(&data).as_ref(), Some(&certificates));
        for key in data.keys() {
            let mut less = data.clone();
            less.remove(key);
            assert_eq!(Certificates::read(&less), None, "{key}");
            less.insert(key.clone(), b"nonsense".to_vec());
            assert_eq!(Certificates::read(&less), None, "{key}");
        }
        assert!(!format!("{certificates:?}").contains("PRIVATE"));
    }

    #[test]
    fn a_certificate_that_proves_no_replica_is_replaced() {
        let (names, now) = (names(), SystemTime::now());
        let certificates = Certificates::new(&names, now).unwrap();
        assert_eq!(certificates.renewed(&names, now).unwrap(), None);
        // As earlier versions made it.
        let params = rcgen::CertificateParams::new(names.clone()).unwrap();
        let server = issue(&certificates.signer.issuer().unwrap(), params, now, SERVING).unwrap();
        let earlier = Certificates {
            server,
            ..certificates
        };
        let renewed = earlier.renewed(&names, now).unwrap().unwrap();
        assert!(is_of_replica(&renewed.server.certificate));
        assert_eq!(renewed.signer, earlier.signer);
        assert_eq!(renewed.renewed(&names, now).unwrap(), None);
    }

    #[test]
    fn no_client_meets_an_authority_that_it_does_not_know() {
        let start = SystemTime::now();
        let mut certificates = Certificates::new(&names(), start).unwrap();
        let mut bundle = certificates.bundle();
        let mut since = 0;
        let changes = live(&mut certificates, start, 30);
        for (day, certificates) in changes {
            // A client that read the bundle a day ago knows the present signer.
            if day > since {
                assert!(
                    bundle.contains(&certificates.signer.certificate),
                    "day {day}"
                );
            }
            if certificates.bundle() != bundle {
                (bundle, since) = (certificates.bundle(), day);
            }
        }
        let authorities = certificates.bundle().matches("BEGIN CERTIFICATE").count();
        assert!(authorities <= 2, "{authorities}");
    }
}
