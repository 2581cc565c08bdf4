//! The file of `kpctl bundle`: parts in a compressed archive, of bounded size, with addresses hashed on request.

use std::collections::hash_map::RandomState;
use std::fs::OpenOptions;
use std::hash::BuildHasher;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, Header};

/// Largest part, and largest sum of all parts, in bytes before compression.
const MAX_PART: usize = 64 << 20;
const MAX_ALL: usize = 256 << 20;
/// Longest text that may be an address.
const MAX_ADDRESS: usize = 45;

/// Names for addresses, which are the same within one bundle only.
pub(crate) struct Addresses(RandomState);

impl Addresses {
    /// Creates names that differ from those of all other bundles.
    pub(crate) fn new() -> Self {
        Self(RandomState::new())
    }

    /// Replaces each IP address in a text. A port or a prefix length behind it stays.
    pub(crate) fn hide(&self, text: &str) -> String {
        let mut hidden = String::with_capacity(text.len());
        let mut rest = text;
        while !rest.is_empty() {
            let is_part = |c: char| c.is_ascii_hexdigit() || c == '.' || c == ':';
            let end = rest.find(|c: char| !is_part(c)).unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            self.word(word, &mut hidden);
            let mut chars = after.chars();
            hidden.extend(chars.next());
            rest = chars.as_str();
        }
        hidden
    }

    /// Adds a word of the characters that addresses have: an address, one with a port, or something else.
    fn word(&self, word: &str, to: &mut String) {
        let trimmed = word.trim_end_matches([':', '.']);
        let with_port = || trimmed.rsplit_once(':');
        let parse = |text: &str| {
            let text = Some(text).filter(|text| (2..=MAX_ADDRESS).contains(&text.len()));
            text.and_then(|text| text.parse::<IpAddr>().ok())
        };
        let (address, used) = match (parse(word), parse(trimmed)) {
            (Some(address), _) => (address, word.len()),
            (None, Some(address)) => (address, trimmed.len()),
            (None, None) => match with_port().and_then(|(ip, _)| Some((parse(ip)?, ip.len()))) {
                Some(found) => found,
                None => return to.push_str(word),
            },
        };
        let family = if address.is_ipv4() { "ip4" } else { "ip6" };
        let number = self.0.hash_one(address) & 0xffff_ffff;
        to.push_str(&format!("{family}-{number:08x}"));
        to.push_str(word.get(used..).unwrap_or_default());
    }
}

/// An archive in progress.
pub(crate) struct Bundle {
    archive: Builder<GzEncoder<Vec<u8>>>,
    bytes: usize,
    /// Time of the parts, in seconds since 1970.
    at: u64,
    addresses: Option<Addresses>,
}

impl Bundle {
    /// Creates an empty archive.
    pub(crate) fn new(at: u64, addresses: Option<Addresses>) -> Self {
        let encoder = GzEncoder::new(Vec::new(), Compression::default());
        Self {
            archive: Builder::new(encoder),
            bytes: 0,
            at,
            addresses,
        }
    }

    /// Adds a part; returns its size, or the reason why it does not fit.
    pub(crate) fn add(&mut self, name: &str, text: &str) -> io::Result<Result<usize, String>> {
        let hidden = self.addresses.as_ref().map(|names| names.hide(text));
        let bytes = hidden.as_deref().unwrap_or(text).as_bytes();
        if bytes.len() > MAX_PART || self.bytes + bytes.len() > MAX_ALL {
            return Ok(Err(format!("its {} bytes do not fit", bytes.len())));
        }
        let mut header = Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.at);
        self.archive.append_data(&mut header, name, bytes)?;
        self.bytes += bytes.len();
        Ok(Ok(bytes.len()))
    }

    /// Writes the archive to a new file that only its owner can read; returns its size.
    pub(crate) fn write(self, path: &Path) -> io::Result<usize> {
        let bytes = self.archive.into_inner()?.finish()?;
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(&bytes)?;
        Ok(bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn addresses_are_hidden_and_everything_else_stays() {
        let names = Addresses::new();
        let text = "10.0.0.1:8080 on node-1, [fd00::1]:80, 10.96.0.0/16, at 12:30:05 2026-01-31T12:00:00.123Z, dead:beef";
        let hidden = names.hide(text);
        for gone in ["10.0.0.1", "fd00::1", "10.96.0.0"] {
            assert!(!hidden.contains(gone), "{hidden}");
        }
        let kept = [
            ":8080 on node-1",
            "]:80,",
            "/16,",
            "12:30:05 2026-01-31T12:00:00.123Z, dead:beef",
        ];
        for kept in kept {
            assert!(hidden.contains(kept), "{kept}: {hidden}");
        }
        assert_eq!(names.hide("10.0.0.1"), names.hide("10.0.0.1"));
        assert_ne!(names.hide("10.0.0.1"), names.hide("10.0.0.2"));
        assert_ne!(names.hide("10.0.0.1"), Addresses::new().hide("10.0.0.1"));
        assert!(names.hide("10.0.0.1.").ends_with('.'));
    }

    #[test]
    fn a_bundle_is_an_archive_that_is_never_written_over_another_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bundle.tar.gz");
        let mut bundle = Bundle::new(1, None);
        assert_eq!(bundle.add("a/b.json", "{}").unwrap(), Ok(2));
        let large = "x".repeat(MAX_PART + 1);
        assert!(bundle.add("large", &large).unwrap().is_err());
        bundle.write(&path).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let mut archive = tar::Archive::new(GzDecoder::new(file));
        let mut texts = archive.entries().unwrap().map(|entry| {
            let mut text = String::new();
            let mut entry = entry.unwrap();
            entry.read_to_string(&mut text).unwrap();
            (entry.path().unwrap().into_owned(), text)
        });
        assert_eq!(texts.next(), Some(("a/b.json".into(), "{}".to_owned())));
        assert_eq!(texts.next(), None);
        let again = Bundle::new(1, None).write(&path).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
    }
}
