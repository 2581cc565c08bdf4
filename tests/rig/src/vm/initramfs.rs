//! The first file system of a guest: an archive in memory with busybox, a few modules and a script.
//!
//! Format: `Documentation/driver-api/early-userspace/buffer-format.rst` of the kernel ("newc").

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::script;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
/// The name of the last entry of an archive.
const TRAILER: &str = "TRAILER!!!";
/// Alignment of headers, names and contents in bytes.
const ALIGNMENT: usize = 4;

/// Builds the archive; modules are loaded in this order.
pub(super) fn build(busybox: &Path, modules: &[PathBuf]) -> Result<Vec<u8>> {
    let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
    let mut archive = Archive::default();
    for folder in ["bin", "modules.d", "proc", "dev", "lower", "upper", "root"] {
        archive.add(folder, DIRECTORY, &[]);
    }
    archive.add("bin/busybox", PROGRAM, &read(busybox)?);
    let mut order = String::new();
    for module in modules {
        let name = module.file_name().context("a module is a file")?;
        let path = format!("modules.d/{}", name.to_string_lossy());
        archive.add(&path, FILE, &read(module)?);
        order += &format!("/{path}\n");
    }
    archive.add("modules", FILE, order.as_bytes());
    archive.add("init", PROGRAM, script::INIT.as_bytes());
    archive.add(TRAILER, 0, &[]);
    Ok(archive.bytes)
}

#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: usize,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let fields = [
            self.entries,   // inode
            mode as usize,  // file type and permissions
            0,              // owner
            0,              // group
            1,              // links
            0,              // time of modification
            content.len(),  // size
            0,              // major number of the device it is on
            0,              // minor
            0,              // major number of the device it is
            0,              // minor
            name.len() + 1, // size of the name
            0,              // checksum, unused
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").into_bytes());
        }
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
    }
}
