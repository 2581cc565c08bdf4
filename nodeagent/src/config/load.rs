//! Loads kube-proxy's configuration from a file, with the few flags that override a file (I2), or
//! from flags alone.

use std::path::{Path, PathBuf};

use super::Problem;
use super::kube_proxy::{self, Host, KubeProxyFlags, Note, Settings, resolve};
use kplane_kube_proxy_config::{KubeProxyConfiguration, document, text_of};

/// Loads a configuration, again after each change of its file.
#[derive(Clone, Debug)]
pub struct Loader {
    path: PathBuf,
    flags: KubeProxyFlags,
}

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration as written, with defaults filled in.
    pub config: KubeProxyConfiguration,
    /// The settings that follow from it.
    pub settings: Settings,
    /// A note if the file is not strictly valid (I2).
    pub lenient: Option<Note>,
    /// The notes to log when an agent starts with this configuration (I7).
    pub notes: Vec<Note>,
}

impl Loader {
    /// Creates a loader of a file. `flags` are all kube-proxy flags of the command line, of which
    /// only some override a file.
    pub fn new(path: PathBuf, flags: KubeProxyFlags) -> Self {
        Self { path, flags }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file.
    ///
    /// # Errors
    /// Everything that is wrong with the file.
    pub fn load(&self) -> Result<Loaded, Vec<Problem>> {
        let text = text_of(&self.path).map_err(|problem| vec![problem.in_file(&self.path)])?;
        self.parse(&text)
    }

    /// Parses the text of the file.
    ///
    /// # Errors
    /// Everything that is wrong with the text.
    pub fn parse(&self, text: &str) -> Result<Loaded, Vec<Problem>> {
        let in_file = |problems: Vec<Problem>| {
            problems.into_iter().map(|p| p.in_file(&self.path)).collect::<Vec<_>>()
        };
        let document = document(text).map_err(in_file)?;
        let mut problems = in_file(document.problems);
        let mut config = document.config;
        problems.extend(self.flags.overrule(&mut config));
        let mut settings = accepted(problems, resolve(&config), |problem| {
            let named = self.name_flag(problem);
            if named.place.starts_with("--") { named } else { named.in_file(&self.path) }
        })?;
        settings.node.nodeport_primary = document.names_primary;
        let notes = kube_proxy::start_up(&config, &settings, Host::this());
        let path = self.path.display();
        Ok(Loaded {
            config,
            settings,
            lenient: document.warning.map(|warning| {
                Note::warning(format!(
                    "{path} is not strictly valid, read leniently: {warning}"
                ))
            }),
            notes: notes.map_err(|problem| in_file(vec![problem]))?,
        })
    }

    /// Returns a note about flags that were given but have no effect.
    pub(super) fn ignored_flags(&self) -> Option<Note> {
        let ignored = self.flags.ignored_beside_file();
        let flags: Vec<_> = ignored.iter().map(|flag| format!("--{flag}")).collect();
        let path = self.path.display();
        (!flags.is_empty()).then(|| {
            Note::warning(format!(
                "ignored, since the configuration comes from {path}: {}",
                flags.join(" ")
            ))
        })
    }

    /// Names the flag instead of the field, if the problem's field was set by a flag that overrides
    /// the file.
    fn name_flag(&self, problem: Problem) -> Problem {
        match self.flags.of_field(&problem.place) {
            Some(flag) if !self.flags.ignored_beside_file().contains(&flag) => Problem {
                place: format!("--{flag}"),
                ..problem
            },
            _ => problem,
        }
    }
}

/// Returns the configuration that flags alone describe.
///
/// # Errors
/// Everything that is wrong with the flags, by flag.
pub(super) fn from_flags(flags: &KubeProxyFlags) -> Result<Loaded, Vec<Problem>> {
    let name_flag = |problem: Problem| match flags.of_field(&problem.place) {
        Some(flag) => Problem {
            place: format!("--{flag}"),
            ..problem
        },
        None => problem,
    };
    let (config, problems) = flags.configuration();
    let mut settings = accepted(problems, resolve(&config), name_flag)?;
    let given = flags.of_field("nodePortAddresses").is_some();
    let mut addresses = config.node_port_addresses.iter();
    settings.node.nodeport_primary = given && addresses.any(|it| it == "primary");
    let notes = kube_proxy::start_up(&config, &settings, Host::this())
        .map_err(|problem| vec![name_flag(problem)])?;
    Ok(Loaded {
        config,
        settings,
        lenient: None,
        notes,
    })
}

/// Returns a warning if a file with this configuration would be read as another one.
pub(super) fn read_differently(config: &KubeProxyConfiguration) -> Option<Note> {
    let mut read = config.clone();
    read.fill_defaults();
    (read != *config).then(|| {
        Note::warning(
            "an empty bind address, and 0 for minSyncPeriod, qps or burst, mean the default when they are read from a \
             file: only flags can switch these off",
        )
    })
}

/// Returns the settings if nothing is wrong, or else all problems, values that could not be read
/// first.
fn accepted(
    mut problems: Vec<Problem>,
    resolved: Result<Settings, Vec<Problem>>,
    name: impl Fn(Problem) -> Problem,
) -> Result<Settings, Vec<Problem>> {
    match resolved {
        Ok(settings) if problems.is_empty() => Ok(settings),
        Ok(_) => Err(problems),
        Err(more) => {
            problems.extend(more.into_iter().map(name));
            Err(problems)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::kube_proxy::KubeProxyFlags;

    /// A default is not a wish: a folder without Nodes may open all addresses only if the operator said nothing.
    #[test]
    fn a21_a_written_primary_is_told_from_the_default() {
        let named = |text: &str| {
            let head =
                "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
            let loader = Loader::new("config.conf".into(), KubeProxyFlags::default());
            let loaded = loader.parse(&format!("{head}{text}")).unwrap();
            loaded.settings.node.nodeport_primary
        };
        assert!(named("nodePortAddresses: [primary]"));
        assert!(named("nodePortAddresses: [localhost, primary]"));
        assert!(named("mode: iptables\nnodePortAddresses: [primary]"));
        for other in [
            "",
            "mode: nftables",
            "nodePortAddresses: []",
            "nodePortAddresses: [all]",
        ] {
            assert!(!named(other), "{other}");
        }
        assert!(!from_flags(&KubeProxyFlags::default()).unwrap().settings.node.nodeport_primary);
    }
}
