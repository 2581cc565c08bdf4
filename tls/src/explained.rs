//! Errors of TLS in words: a peer in plain text, and certificates that are not valid by one of two clocks.
//!
//! TLS has one alert for a certificate that has expired and for one that is not valid yet, and it names no clock. In TLS 1.3
//! a client learns only after its handshake that the server refuses its certificate: with the first bytes that it reads.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use rustls::client::ResolvesClientCert;
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use x509_parser::prelude::ASN1Time;

use crate::subject::Validity;

/// A client's stream. Its errors say what a clock has to do with them.
pub(crate) struct Explained<S> {
    pub(crate) stream: S,
    /// The validity of the client's own certificate, if it has one.
    pub(crate) own: Option<Validity>,
}

/// Returns the validity of the certificate that a client shows to servers.
pub(crate) fn validity(identity: &dyn ResolvesClientCert) -> Option<Validity> {
    let schemes = [
        SignatureScheme::ECDSA_NISTP256_SHA256,
        SignatureScheme::ECDSA_NISTP384_SHA384,
        SignatureScheme::ED25519,
        SignatureScheme::RSA_PSS_SHA256,
    ];
    let own = identity.resolve(&[], &schemes)?;
    Validity::of(own.cert.first()?)
}

/// Returns the error of a handshake in words, if there are better ones; or else the error itself.
pub fn explain(error: io::Error) -> io::Error {
    explain_to(error, None, now())
}

fn explain_to(error: io::Error, own: Option<Validity>, now: Duration) -> io::Error {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
    match cause.and_then(|cause| words(cause, own, now)) {
        Some(words) => io::Error::other(words),
        None => error,
    }
}

fn words(error: &Error, own: Option<Validity>, now: Duration) -> Option<String> {
    match error {
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            Some("the peer speaks plain text, not TLS".to_owned())
        }
        Error::InvalidCertificate(CertificateError::NotValidYetContext { time, not_before }) => {
            let (now, from) = (time.as_secs(), not_before.as_secs());
            Some(early(
                "the peer's",
                Duration::from_secs(from),
                Duration::from_secs(now),
            ))
        }
        Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after }) => {
            let (now, until) = (time.as_secs(), not_after.as_secs());
            Some(late(
                "the peer's",
                Duration::from_secs(until),
                Duration::from_secs(now),
            ))
        }
        Error::AlertReceived(AlertDescription::CertificateExpired) => Some(refused(own, now)),
        _ => None,
    }
}

/// Says why a peer calls the own certificate expired.
fn refused(own: Option<Validity>, now: Duration) -> String {
    let Some(Validity { from, until }) = own else {
        return "the peer refuses the certificate: by the peer's clock it has expired, or is not valid yet".to_owned();
    };
    if now < from {
        return early("this side's", from, now);
    }
    if now > until {
        return late("this side's", until, now);
    }
    let apart = (now - from).min(until - now);
    format!(
        "the peer refuses this side's certificate: by the peer's clock it has expired, or is not valid yet. It is valid \
         from {} to {}, and this machine's clock says {}: the two clocks are at least {} apart. Set both by NTP",
        text(from),
        text(until),
        text(now),
        about(apart)
    )
}

fn early(whose: &str, from: Duration, now: Duration) -> String {
    format!(
        "{whose} certificate is not valid yet: it begins at {}, and this machine's clock says {}, {} before that. If the \
         certificate is in use, this clock or that of its issuer is wrong: set both by NTP",
        text(from),
        text(now),
        about(from.saturating_sub(now))
    )
}

fn late(whose: &str, until: Duration, now: Duration) -> String {
    format!(
        "{whose} certificate has expired: it ended at {}, and this machine's clock says {}, {} after that. Renew it, or \
         set the clock if it is wrong",
        text(until),
        text(now),
        about(now.saturating_sub(until))
    )
}

fn now() -> Duration {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default()
}

fn text(since_1970: Duration) -> String {
    let seconds = since_1970.as_secs();
    let time = i64::try_from(seconds).ok().map(ASN1Time::from_timestamp);
    match time {
        Some(Ok(time)) => time.to_string(),
        _ => format!("{seconds} s after 1970"),
    }
}

fn about(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..120 => format!("{seconds} s"),
        seconds @ ..7_200 => format!("{} min", seconds / 60),
        seconds @ ..172_800 => format!("{} h", seconds / 3_600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Explained<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        read.map_err(|error| explain_to(error, self.own, now()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Explained<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A certificate that is valid here, and refused by a peer whose clock is wrong, or this one.
    #[test]
    fn a_peer_with_another_clock_is_told_by_how_much_at_least() {
        let own = Validity {
            from: Duration::from_secs(10_000),
            until: Duration::from_secs(100_000),
        };
        let alert = Error::AlertReceived(AlertDescription::CertificateExpired);
        let said = |now| words(&alert, Some(own), Duration::from_secs(now)).unwrap();
        assert!(said(10_060).contains("the two clocks are at least 60 s apart"));
        assert!(said(92_800).contains("the two clocks are at least 2 h apart"));
        assert!(said(9_000).contains("not valid yet"));
        assert!(said(100_300).contains("5 min after that"));
        let unknown = words(&alert, None, Duration::ZERO).unwrap();
        assert!(unknown.contains("by the peer's clock"), "{unknown}");
    }
}
