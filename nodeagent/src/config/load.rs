//! Where kube-proxy's configuration comes from: a file, with the few flags that count beside it
//! (I2), or flags alone.

use std::path::{Path, PathBuf};

use super::Problem;
use super::kube_proxy::{self, Host, KubeProxyFlags, Note, Settings, resolve};
use kplane_kube_proxy_config::{KubeProxyConfiguration, document, text_of};

/// Reads a configuration, as often as it changes.
#[derive(Clone, Debug)]
pub struct Loader {
    path: PathBuf,
    flags: KubeProxyFlags,
}

/// A configuration that makes sense.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// As it is said, with defaults.
    pub config: KubeProxyConfiguration,
    /// What it means.
    pub settings: Settings,
    /// The file is not strictly valid (I2).
    pub lenient: Option<Note>,
    /// What to say about it when an agent starts with it (I7).
    pub notes: Vec<Note>,
}

impl Loader {
    /// Of a file, and flags of which those count that count beside a file.
    #[must_use]
    pub fn new(path: PathBuf, flags: KubeProxyFlags) -> Self {
        Self { path, flags }
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn load(&self) -> Result<Loaded, Vec<Problem>> {
        let text = text_of(&self.path).map_err(|problem| vec![problem.in_file(&self.path)])?;
        self.parse(&text)
    }

    /// Reads what the file says.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(&self, text: &str) -> Result<Loaded, Vec<Problem>> {
        let in_file = |problems: Vec<Problem>| {
            let named = problems.into_iter().map(|p| p.in_file(&self.path));
            named.collect::<Vec<_>>()
        };
        let document = document(text).map_err(in_file)?;
        let mut problems = in_file(document.problems);
        let mut config = document.config;
        problems.extend(self.flags.overrule(&mut config));
        let settings = accepted(problems, resolve(&config), |problem| {
            let named = self.name_flag(problem);
            if named.place.starts_with("--") {
                named
            } else {
                named.in_file(&self.path)
            }
        })?;
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

    /// Flags that were given, but do not count.
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

    /// Of fields, only those count that the flags may overrule.
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

/// The configuration that flags alone describe.
///
/// # Errors
/// Everything that is wrong with them, by flag.
pub(super) fn from_flags(flags: &KubeProxyFlags) -> Result<Loaded, Vec<Problem>> {
    let name_flag = |problem: Problem| match flags.of_field(&problem.place) {
        Some(flag) => Problem {
            place: format!("--{flag}"),
            ..problem
        },
        None => problem,
    };
    let (config, problems) = flags.configuration();
    let settings = accepted(problems, resolve(&config), name_flag)?;
    let notes = kube_proxy::start_up(&config, &settings, Host::this());
    let notes = notes.map_err(|problem| vec![name_flag(problem)])?;
    Ok(Loaded {
        config,
        settings,
        lenient: None,
        notes,
    })
}

/// The settings if nothing is wrong; else all that is, values that could not be read first.
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
