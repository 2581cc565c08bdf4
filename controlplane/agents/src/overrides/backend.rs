//! The place of the document: a ConfigMap, or a file beside the manifests. Writers use the version that they read, so
//! that of two orders at the same time none is lost.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kplane_desired_state::kubernetes::{Api, Asked, Failure, Unanswered};
use kube::api::PostParams;
use nix::fcntl::OFlag;
use nix::unistd::{AccessFlags, eaccess};
use tokio::time::timeout;

use super::{Change, Damaged, MAX_BYTES, Overrides, TooMany};

/// Name of the ConfigMap.
const CONFIG_MAP: &str = "kplane-orders";
/// Key of its data.
const KEY: &str = "orders.json";
/// Name of the file; sources ignore hidden files.
const FILE: &str = ".kplane-orders.json";
/// Longest wait for an answer of the API server or of a disk.
const PATIENCE: Duration = Duration::from_secs(5);
/// Number of attempts to write while others write, too.
const TRIES: usize = 8;

/// The place of the document.
#[derive(Clone, Debug)]
pub enum Backend {
    /// A file. Other replicas may have one of their own, unless the configuration names the file.
    File(PathBuf),
    /// A file that all replicas share, because their configuration names it.
    SharedFile(PathBuf),
    /// A ConfigMap.
    ConfigMap {
        /// The API server.
        api: Arc<Api>,
        /// The namespace.
        namespace: String,
    },
}

/// The reason why the document could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// The document exists and cannot be understood.
    #[error("the document is damaged: {0}. Repair or delete it")]
    Damaged(#[from] Damaged),
    /// The API server.
    #[error(
        "{0}. The control plane needs the verbs get, create and update for the ConfigMap {CONFIG_MAP} in its namespace"
    )]
    Api(#[from] Unanswered),
    /// The disk.
    #[error("cannot use {}: {source}. --state-file names another place", file.display())]
    Disk {
        /// The file.
        file: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The write was not confirmed; it may have been made.
    #[error("{0}. The order may be in force all the same: `kpctl status` shows it then")]
    Unsure(Box<Self>),
    /// Other replicas wrote all the time.
    #[error("other replicas change the orders all the time; try again")]
    Contended,
}

impl Trouble {
    /// Returns whether another attempt soon gives the same result.
    pub(super) fn is_final(&self) -> bool {
        match self {
            Self::Damaged(_) | Self::Disk { .. } => true,
            Self::Api(unanswered) => matches!(
                unanswered.failure,
                Failure::Forbidden(_) | Failure::Refused { .. } | Failure::Malformed(_)
            ),
            Self::Unsure(_) | Self::Contended => false,
        }
    }
}

impl Trouble {
    /// Returns whether a disk did not answer in time.
    fn is_timeout(&self) -> bool {
        matches!(self, Self::Disk { source, .. } if source.kind() == io::ErrorKind::TimedOut)
    }
}

/// The reason why an order was not taken.
#[derive(Debug, thiserror::Error)]
pub enum Unchanged {
    /// This control plane keeps no orders.
    #[error(
        "this control plane keeps no orders: it has neither a cluster nor a folder, or is part of an agent"
    )]
    NoPlace,
    /// There would be too many orders.
    #[error(transparent)]
    TooMany(#[from] TooMany),
    /// The document could not be read or written.
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl Unchanged {
    /// Returns whether the order may be in force all the same.
    pub fn is_unsure(&self) -> bool {
        matches!(self, Self::Trouble(Trouble::Unsure(_)))
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file) | Self::SharedFile(file) => write!(f, "{}", file.display()),
            Self::ConfigMap { namespace, .. } => write!(f, "ConfigMap {namespace}/{CONFIG_MAP}"),
        }
    }
}

impl Backend {
    /// Returns the place of a source of manifests: in its folder, or in that of its file.
    pub fn beside(manifests: &Path) -> Self {
        let folder = if manifests.is_file() {
            manifests.parent().unwrap_or(manifests)
        } else {
            manifests
        };
        Self::File(folder.join(FILE))
    }

    /// Returns whether all replicas certainly have the same place.
    pub fn is_shared(&self) -> bool {
        !matches!(self, Self::File(_))
    }

    /// Reads the document; `None` if there is none.
    pub(super) async fn read(&self) -> Result<Option<Overrides>, Trouble> {
        match self {
            Self::File(file) | Self::SharedFile(file) => on_disk(file, read_file).await,
            Self::ConfigMap { api, namespace } => {
                let map = get(api, namespace).await?;
                map.map(|map| orders_of(&map)).transpose()
            }
        }
    }

    /// Changes the orders in the document, or those in force if there is no document. Returns all orders.
    pub(super) async fn change(
        &self,
        in_force: &Overrides,
        change: &Change,
    ) -> Result<Overrides, Unchanged> {
        match self {
            Self::File(file) | Self::SharedFile(file) => {
                let (in_force, change) = (in_force.clone(), change.clone());
                let changed = on_disk(file, move |file| change_file(file, &in_force, &change));
                changed.await.map_err(|unchanged| match unchanged {
                    // The thread may get through later.
                    Unchanged::Trouble(trouble) if trouble.is_timeout() => {
                        Trouble::Unsure(Box::new(trouble)).into()
                    }
                    unchanged => unchanged,
                })
            }
            Self::ConfigMap { api, namespace } => {
                let map = Map { api, namespace };
                map.change(in_force, change).await
            }
        }
    }
}

impl Backend {
    /// Returns the reason why no order can be written, as far as the rights on the file's folder show it.
    pub(super) async fn unwritable(&self) -> Option<Trouble> {
        let (Self::File(file) | Self::SharedFile(file)) = self else {
            return None;
        };
        let check = |file: &Path| {
            let access = eaccess(folder_of(file), AccessFlags::W_OK);
            access.map_err(|errno| disk(file)(errno.into()))
        };
        on_disk(file, check).await.err()
    }
}

fn folder_of(file: &Path) -> &Path {
    file.parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Runs a step on a thread that may wait for the disk, with a limit.
async fn on_disk<T: Send + 'static, E: From<Trouble> + Send + 'static>(
    file: &Path,
    step: impl FnOnce(&Path) -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    let owned = file.to_owned();
    match timeout(PATIENCE, tokio::task::spawn_blocking(move || step(&owned))).await {
        Ok(Ok(done)) => done,
        Ok(Err(error)) => Err(disk(file)(io::Error::other(error)).into()),
        Err(_) => Err(disk(file)(io::ErrorKind::TimedOut.into()).into()),
    }
}

fn disk(file: &Path) -> impl Fn(io::Error) -> Trouble {
    move |source| Trouble::Disk {
        file: file.to_owned(),
        source,
    }
}

/// Opens a regular file, and nothing else: a pipe may never have another end, and a thread would wait for it for ever.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let at_once = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let file = options.custom_flags(at_once.bits()).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is not a regular file"))
    }
}

fn read_file(path: &Path) -> Result<Option<Overrides>, Trouble> {
    let file = match open(path, OpenOptions::new().read(true)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(disk(path)(error)),
    };
    let mut bytes = Vec::new();
    let most = MAX_BYTES as u64 + 1;
    file.take(most).read_to_end(&mut bytes).map_err(disk(path))?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(Some(Overrides::read(&text)?))
}

/// Changes the file while no other replica does: they share a lock file.
fn change_file(path: &Path, in_force: &Overrides, change: &Change) -> Result<Overrides, Unchanged> {
    let lock = path.with_extension("lock");
    let lock = open(&lock, OpenOptions::new().create(true).append(true)).map_err(disk(path))?;
    lock.lock().map_err(disk(path))?;
    let before = read_file(path)?;
    let next = Overrides::newer(before.as_ref(), in_force).changed(change)?;
    write_file(path, &next.write()).map_err(disk(path))?;
    Ok(next)
}

/// Replaces the file in one step, also if the machine stops in the middle.
fn write_file(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut options = OpenOptions::new();
    let mut file = open(&new, options.write(true).create(true).truncate(true))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(folder_of(path))?.sync_all()
}

/// The ConfigMap.
struct Map<'a> {
    api: &'a Api,
    namespace: &'a str,
}

impl Map<'_> {
    /// Changes the document over the version that was read. A write that was not confirmed may have been made, so
    /// the document is read again, and written again only without the change.
    async fn change(&self, in_force: &Overrides, change: &Change) -> Result<Overrides, Unchanged> {
        let mut unsure = None;
        for _ in 0..TRIES {
            let before = match (get(self.api, self.namespace).await, unsure.take()) {
                (Ok(before), now) => {
                    unsure = now;
                    before
                }
                (Err(_), Some(first)) => return Err(Trouble::Unsure(Box::new(first)).into()),
                (Err(trouble), None) => return Err(trouble.into()),
            };
            let overrides = before.as_ref().map(orders_of).transpose()?;
            let overrides = Overrides::newer(overrides.as_ref(), in_force);
            if unsure.is_some() && overrides.has(change) {
                return Ok(overrides.clone());
            }
            let next = overrides.changed(change)?;
            match self.write(before, next.write()).await {
                Ok(()) => return Ok(next),
                Err(error) if error.is_conflict() => {}
                Err(error) if may_be_done(&error.failure) && unsure.is_none() => {
                    unsure = Some(error.into());
                }
                Err(error) if may_be_done(&error.failure) => {
                    return Err(Trouble::Unsure(Box::new(error.into())).into());
                }
                Err(error) => return Err(Trouble::from(error).into()),
            }
        }
        Err(Trouble::Contended.into())
    }

    /// Writes the document, unless another version was written since `before` was read.
    async fn write(&self, before: Option<ConfigMap>, text: String) -> Result<(), Unanswered> {
        let maps: kube::Api<ConfigMap> = kube::Api::namespaced(self.api.client(), self.namespace);
        let params = PostParams::default();
        let is_new = before.is_none();
        let mut map = before.unwrap_or_default();
        map.metadata.name = Some(CONFIG_MAP.to_owned());
        map.metadata.managed_fields = None;
        let data = map.data.get_or_insert_default();
        data.insert(KEY.to_owned(), text);
        let written = if is_new {
            let create = maps.create(&params, &map);
            self.api.ask(asked("create"), PATIENCE, create).await
        } else {
            let replace = maps.replace(CONFIG_MAP, &params, &map);
            self.api.ask(asked("update"), PATIENCE, replace).await
        };
        written.map(drop)
    }
}

/// Returns whether a request that failed like this may have had its effect.
fn may_be_done(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Silent(_) | Failure::Broken(_) | Failure::Server { .. } | Failure::Malformed(_)
    )
}

async fn get(api: &Api, namespace: &str) -> Result<Option<ConfigMap>, Trouble> {
    let maps: kube::Api<ConfigMap> = kube::Api::namespaced(api.client(), namespace);
    let map = maps.get_opt(CONFIG_MAP);
    Ok(api.ask(asked("get"), PATIENCE, map).await?)
}

fn orders_of(map: &ConfigMap) -> Result<Overrides, Trouble> {
    let text = map.data.as_ref().and_then(|data| data.get(KEY));
    Ok(Overrides::read(text.map_or("", String::as_str))?)
}

fn asked(verb: &'static str) -> Asked {
    Asked::new(verb, "configmaps", "")
}
