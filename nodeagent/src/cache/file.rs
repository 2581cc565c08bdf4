//! Reads the cache file with care, and replaces it as a whole or not at all.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;

/// Largest file that is read or written, in bytes. An agent never takes that many objects.
const MAX_BYTES: u64 = 256 * 1024 * 1024;

/// The reason why a cache file cannot be used or written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file does not exist.
    #[error("there is no file")]
    Absent,
    /// The disk failed, or access was denied.
    #[error(transparent)]
    Io(io::Error),
    /// The path is not a regular file such as agents write.
    #[error("not a regular file that this user owns, of at most {MAX_BYTES} bytes")]
    Strange,
    /// The file was written in part, or a disk fault changed it.
    #[error("damaged or incomplete")]
    Damaged,
    /// Another version of the program wrote the file.
    #[error("format {0} is not known to this version")]
    Version(u32),
    /// The content comes from another source.
    #[error("the source was {0:?}, and is another one now")]
    OtherSource(String),
    /// The agent of another node wrote the file.
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

/// The bytes of a file.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    /// The time of the last write, milliseconds since 1970; 0 = not known.
    pub(super) written_ms: u64,
}

/// Reads a regular file as a whole.
pub(super) fn read(path: &Path) -> Result<Content, FileError> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)?;
    let about = file.metadata()?;
    let ours = about.is_file() && about.uid() == geteuid().as_raw();
    if !ours || about.len() > MAX_BYTES {
        return Err(FileError::Strange);
    }
    let mut bytes = Vec::with_capacity(usize::try_from(about.len()).unwrap_or(0));
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    let written = about.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let written_ms = written.map_or(0, |at| u64::try_from(at.as_millis()).unwrap_or(u64::MAX));
    Ok(Content { bytes, written_ms })
}

/// Reads a small text; empty if there is none.
pub(super) fn read_text(path: &Path) -> String {
    let content = read(path).map(|content| content.bytes).unwrap_or_default();
    String::from_utf8(content).unwrap_or_default()
}

/// Replaces a file atomically: after a crash either the old or the new file exists. Returns the
/// length of the new file.
pub(super) fn replace(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<u64, FileError> {
    let (new, file) = beside(path)?;
    let written = fill(file, write).and_then(|bytes| {
        fs::rename(&new, path)?;
        File::open(folder_of(path))?.sync_all()?;
        Ok(bytes)
    });
    if written.is_err() {
        // On a full disk the space is needed.
        let _ = fs::remove_file(&new);
    }
    Ok(written?)
}

/// Replaces a file that is of use to the next process, and of none after the machine has failed.
pub(super) fn put(path: &Path, text: &str) -> io::Result<()> {
    let (new, mut file) = beside(path)?;
    file.write_all(text.as_bytes())?;
    fs::rename(&new, path)
}

/// Creates a file to be renamed.
fn beside(path: &Path) -> io::Result<(PathBuf, File)> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder_of(path))?;
    let new = path.with_added_extension("new");
    // A crash may have left this file. If anything else is in the way, the next step fails.
    let _ = fs::remove_file(&new);
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(&new)?;
    Ok((new, file))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("."))
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

/// Writer that fails when the file grows larger than `read` accepts.
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
