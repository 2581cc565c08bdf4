//! Changes settings of the kernel, and remembers what they were, so that a cleanup puts them back.
//!
//! The file has a line for each setting: its path, the earlier value, and the agent's. The first earlier value stays,
//! since a later one may be an agent's. The first line names the start of the machine, after which the kernel has its
//! own values again.

use std::fmt;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

/// The name of the file in the agent's folder.
pub const FILE: &str = "kernel-settings";
/// The id of this start of the machine.
const BOOT: &str = "proc/sys/kernel/random/boot_id";
/// The folder of the file.
static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();

/// A setting that an agent changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedSetting {
    /// The file, below the root of the file system.
    file: PathBuf,
    /// The value before the first change.
    earlier: String,
    /// The agent's value, as the kernel shows it.
    ours: String,
}

/// Names the folder of this process's file; `None` = no change is remembered.
pub fn remember_in(folder: Option<PathBuf>) {
    // The folder of a process does not change.
    let _ = FOLDER.set(folder);
}

/// Changes a setting, whose file is below `root`, and remembers its earlier value.
///
/// # Errors
/// The setting cannot be read or written.
pub fn change(root: &Path, file: &Path, value: &str) -> io::Result<()> {
    let folder = FOLDER.get().and_then(Option::as_deref);
    change_in(folder, root, file, value)
}

fn change_in(folder: Option<&Path>, root: &Path, file: &Path, value: &str) -> io::Result<()> {
    let path = root.join(file);
    let earlier = fs::read_to_string(&path)?.trim().to_owned();
    fs::write(&path, value)?;
    let Some(folder) = folder else {
        return Ok(());
    };
    let changed = ChangedSetting {
        file: file.to_owned(),
        earlier,
        // The kernel rounds some values.
        ours: fs::read_to_string(&path)?.trim().to_owned(),
    };
    if let Err(error) = remember(folder, root, changed) {
        tracing::warn!(
            setting = %path.display(), %error,
            "cannot save the earlier value of a kernel setting in {}; --cleanup will not restore it",
            folder.display()
        );
    }
    Ok(())
}

fn remember(folder: &Path, root: &Path, changed: ChangedSetting) -> io::Result<()> {
    let mut all =
        fs::read_to_string(folder.join(FILE)).map_or(Vec::new(), |text| parse(&text, root));
    match all.iter_mut().find(|known| known.file == changed.file) {
        Some(known) => known.ours = changed.ours,
        None => all.push(changed),
    }
    let mut text = boot(root);
    for ChangedSetting {
        file,
        earlier,
        ours,
    } in &all
    {
        text += &format!("\n{} {earlier} {ours}", file.display());
    }
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let new = folder.join(FILE).with_added_extension("new");
    fs::write(&new, text)?;
    fs::rename(new, folder.join(FILE))
}

/// Returns the settings that the text of a file names, if agents changed them since the machine started.
pub fn parse(text: &str, root: &Path) -> Vec<ChangedSetting> {
    let mut lines = text.lines();
    if lines.next() != Some(&boot(root)) {
        return Vec::new();
    }
    let setting = |line: &str| {
        let [file, earlier, ours] = line.split(' ').collect::<Vec<_>>().try_into().ok()?;
        let file = PathBuf::from(file);
        let is_setting = file.starts_with("proc/sys/net") || file.starts_with("sys/module");
        let is_below = file.components().all(|part| matches!(part, Component::Normal(_)));
        (is_setting && is_below).then(|| ChangedSetting {
            file,
            earlier: earlier.to_owned(),
            ours: ours.to_owned(),
        })
    };
    lines.filter_map(setting).collect()
}

fn boot(root: &Path) -> String {
    let id = fs::read_to_string(root.join(BOOT)).unwrap_or_default();
    id.trim().to_owned()
}

/// The name, as `sysctl` has it, and the earlier value.
impl fmt::Display for ChangedSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.file.strip_prefix("proc/sys") {
            Ok(key) => key.display().to_string().replace('/', "."),
            Err(_) => format!("/{}", self.file.display()),
        };
        write!(f, "{name} = {}", self.earlier)
    }
}

impl ChangedSetting {
    /// Returns whether the setting still has the agent's value.
    pub fn is_ours(&self, root: &Path) -> bool {
        fs::read_to_string(root.join(&self.file)).is_ok_and(|now| now.trim() == self.ours)
    }

    /// Writes the earlier value.
    ///
    /// # Errors
    /// The setting cannot be written, or connections would be lost.
    pub fn put_back(&self, root: &Path) -> io::Result<()> {
        let path = root.join(&self.file);
        if path.ends_with("nf_conntrack_max") {
            let entries = fs::read_to_string(path.with_file_name("nf_conntrack_count"))?;
            let number = |text: &str| text.trim().parse().unwrap_or(0_u64);
            if number(&entries) >= number(&self.earlier) {
                return Err(io::Error::other(format!(
                    "{} connections are tracked",
                    entries.trim()
                )));
            }
        }
        fs::write(path, &self.earlier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a root with one setting and a boot id, and a writer of each.
    fn machine() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let file = PathBuf::from("proc/sys/net/netfilter/nf_conntrack_max");
        for (name, text) in [(&*file, "100\n"), (Path::new(BOOT), "first\n")] {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        fs::write(
            root.path().join(&file).with_file_name("nf_conntrack_count"),
            "7\n",
        )
        .unwrap();
        (root, file)
    }

    fn remembered(root: &Path) -> Vec<ChangedSetting> {
        parse(&fs::read_to_string(root.join(FILE)).unwrap(), root)
    }

    #[test]
    fn the_first_earlier_value_is_put_back() {
        let (root, file) = machine();
        let root = root.path();
        for value in ["200", "300"] {
            change_in(Some(root), root, &file, value).unwrap();
        }
        let [setting] = &remembered(root)[..] else {
            panic!("{:?}", remembered(root));
        };
        assert_eq!(setting.to_string(), "net.netfilter.nf_conntrack_max = 100");
        assert!(setting.is_ours(root));
        setting.put_back(root).unwrap();
        assert_eq!(fs::read_to_string(root.join(&file)).unwrap(), "100");
        assert!(!setting.is_ours(root));
    }

    /// A smaller table would make the kernel drop new connections.
    #[test]
    fn a_table_stays_as_large_as_its_content_needs() {
        let (root, file) = machine();
        let root = root.path();
        change_in(Some(root), root, &file, "200").unwrap();
        fs::write(
            root.join(&file).with_file_name("nf_conntrack_count"),
            "100\n",
        )
        .unwrap();
        let refused = remembered(root)[0].put_back(root).unwrap_err();
        assert_eq!(refused.to_string(), "100 connections are tracked");
    }

    #[test]
    fn what_another_start_of_the_machine_or_another_program_wrote_does_not_count() {
        let (root, file) = machine();
        let root = root.path();
        change_in(Some(root), root, &file, "200").unwrap();
        fs::write(root.join(BOOT), "second\n").unwrap();
        assert_eq!(remembered(root), []);
        for line in [
            "etc/shadow 1 2",
            "proc/sys/net/../kernel/core_pattern 1 2",
            "proc/sys/net/x 1",
        ] {
            assert_eq!(parse(&format!("second\n{line}"), root), [], "{line}");
        }
    }
}
