//! The product's programs, in a folder.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

const PROGRAMS: [&str; 3] = ["kp-controlplane", "kp-nodeagent", "kpctl"];

/// The paths of the programs.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    /// `kp-controlplane`.
    pub(crate) control_plane: PathBuf,
    /// `kp-nodeagent`.
    pub(crate) node_agent: PathBuf,
    /// `kpctl`.
    pub(crate) kpctl: PathBuf,
}

impl Programs {
    /// Takes them from a folder.
    pub(crate) fn in_folder(folder: &Path) -> Result<Self> {
        let folder = std::path::absolute(folder)?;
        let find = |name: &str| {
            let path = folder.join(name);
            ensure!(path.is_file(), "there is no {}", path.display());
            Ok(path)
        };
        let [control_plane, node_agent, kpctl] = PROGRAMS.map(find);
        Ok(Self {
            control_plane: control_plane?,
            node_agent: node_agent?,
            kpctl: kpctl?,
        })
    }
}
