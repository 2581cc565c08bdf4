//! Files: read with care, replaced as a whole or not at all.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;

/// Largest file that is read or written: more than the objects that an agent takes.
const MAX_BYTES: u64 = 256 * 1024 * 1024;

/// A file that is of no use, or cannot be written.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    /// There is none.
    #[error("there is no file")]
    Absent,
    /// The disk, or who may use it.
    #[error(transparent)]
    Io(io::Error),
    /// Not what an agent leaves.
    #[error("not a regular file of this user's of at most {MAX_BYTES} bytes")]
    Strange,
    /// Written in part, or changed by a fault of the disk.
    #[error("damaged or incomplete")]
    Damaged,
    /// Of another version of the program.
    #[error("format {0} is not known to this version")]
    Version(u32),
    /// Of another node.
    #[error("written for node {0:?}")]
    Foreign(String),
}

impl From<io::Error> for FileError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::NotFound => Self::Absent,
            _ => Self::Io(error),
        }
    }
}

/// The whole of a regular file.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits())
        .open(path)?;
    let about = file.metadata()?;
    let ours = about.is_file() && about.uid() == geteuid().as_raw();
    if !ours || about.len() > MAX_BYTES {
        return Err(FileError::Strange);
    }
    let mut bytes = Vec::with_capacity(usize::try_from(about.len()).unwrap_or(0));
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Puts a new file in the place of an old one: after a crash there is one of the two. Returns its
/// length.
pub(super) fn replace(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<u64, FileError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let new = path.with_added_extension("new");
    // What a crash left. Whatever else is in the way makes the next step fail.
    let _ = fs::remove_file(&new);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)?;
    let written = fill(file, write).and_then(|bytes| {
        fs::rename(&new, path)?;
        File::open(folder)?.sync_all()?;
        Ok(bytes)
    });
    if written.is_err() {
        // A full disk needs the room.
        let _ = fs::remove_file(&new);
    }
    Ok(written?)
}

fn fill(file: File, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<u64> {
    let mut to = Bounded {
        inner: BufWriter::new(file),
        bytes: 0,
    };
    write(&mut to)?;
    let file = to.inner.into_inner()?;
    file.sync_all()?;
    Ok(to.bytes)
}

/// Fails instead of writing a file that would not be read.
struct Bounded {
    inner: BufWriter<File>,
    bytes: u64,
}

impl Write for Bounded {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        if self.bytes + buffer.len() as u64 > MAX_BYTES {
            return Err(ErrorKind::FileTooLarge.into());
        }
        let written = self.inner.write(buffer)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
