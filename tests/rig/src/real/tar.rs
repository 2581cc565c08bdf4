//! Archives in the format of POSIX (ustar): the same entries give the same bytes.

use anyhow::{Context as _, Result, ensure};

/// The size of headers, and the unit to which contents are padded.
const BLOCK: usize = 512;
/// Longest name of an entry, and of a link's target.
const LONGEST: usize = 100;

/// An archive in memory.
#[derive(Debug, Default)]
pub(super) struct Tar {
    bytes: Vec<u8>,
}

impl Tar {
    /// Adds a folder.
    pub(super) fn folder(&mut self, path: &str, mode: u32) -> Result<()> {
        self.header(&format!("{path}/"), mode, 0, b'5', "")
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) -> Result<()> {
        self.header(path, 0o777, 0, b'2', target)
    }

    /// Adds a file.
    pub(super) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.header(path, mode, content.len(), b'0', "")?;
        self.bytes.extend_from_slice(content);
        let padded = self.bytes.len().next_multiple_of(BLOCK);
        self.bytes.resize(padded, 0);
        Ok(())
    }

    /// Returns the archive's bytes, which end with two empty blocks.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 2 * BLOCK, 0);
        self.bytes
    }

    fn header(&mut self, path: &str, mode: u32, size: usize, kind: u8, target: &str) -> Result<()> {
        ensure!(
            path.len() <= LONGEST && target.len() <= LONGEST,
            "{path}: names in an archive have at most {LONGEST} bytes"
        );
        let mut block = [0; BLOCK];
        // Offsets and widths are those of pax(1), "ustar Interchange Format"; owner and time are 0.
        let fields = [
            (0, path.to_owned()),
            (100, format!("{mode:07o}")),
            (108, format!("{:07o}", 0)),
            (116, format!("{:07o}", 0)),
            (124, format!("{size:011o}")),
            (136, format!("{:011o}", 0)),
            // The checksum counts as spaces while it is computed.
            (148, " ".repeat(8)),
            (156, char::from(kind).to_string()),
            (157, target.to_owned()),
            (257, "ustar\x0000".to_owned()),
        ];
        for (at, text) in fields {
            put(&mut block, at, text.as_bytes())?;
        }
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        put(&mut block, 148, format!("{sum:06o}\0 ").as_bytes())?;
        self.bytes.extend_from_slice(&block);
        Ok(())
    }
}

fn put(block: &mut [u8; BLOCK], at: usize, text: &[u8]) -> Result<()> {
    let field = block.get_mut(at..at + text.len());
    field
        .context("a field of an archive's header is too long")?
        .copy_from_slice(text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;
    use crate::process::output;

    #[test]
    fn the_tar_program_reads_archives() {
        let mut tar = Tar::default();
        tar.folder("etc", 0o755).unwrap();
        tar.file("etc/text", 0o640, b"hello").unwrap();
        tar.link("etc/link", "text").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("archive.tar");
        fs::write(&file, tar.finish()).unwrap();
        let mut unpack = Command::new("tar");
        unpack.arg("-xf").arg(&file).arg("-C").arg(folder.path());
        output(unpack).unwrap();
        let text = fs::read_to_string(folder.path().join("etc/link")).unwrap();
        assert_eq!(text, "hello");
        assert!(Tar::default().folder(&"x".repeat(100), 0o755).is_err());
    }
}
