//! The kubeconfig: which files, which context, and whether it can be used. The rules are kubectl's.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use hyper_util::client::proxy::matcher::Matcher;
use kplane_model::one_line;
use kplane_tls::is_this_machine;
use kube::Config;
use kube::config::{AuthInfo, Cluster, Context, Kubeconfig, KubeconfigError as KubeError};

use crate::args::{KUBECONFIG, Place};

/// Largest kubeconfig in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// The part of the environment that names kubeconfigs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    /// The value of `KUBECONFIG`.
    pub(crate) variable: Option<OsString>,
    /// The user's home folder.
    pub(crate) home: Option<PathBuf>,
}

impl Environment {
    /// Returns the environment of this process.
    pub(crate) fn current() -> Self {
        Self {
            variable: env::var_os(KUBECONFIG),
            home: env::home_dir(),
        }
    }
}

/// The result of reading the kubeconfig.
pub(super) enum Selection {
    /// A context that can be used.
    Selected(Box<Selected>),
    /// No kubeconfig, or none that names a cluster, for this reason.
    Nothing(String),
}

/// A context of a kubeconfig.
pub(super) struct Selected {
    /// The API server and the user's credentials.
    pub(super) config: Config,
    /// Name of the context.
    pub(super) context: String,
    /// The files, for errors.
    pub(super) place: String,
}

/// A kubeconfig that cannot be used. The text is one line, and contains no credentials.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KubeconfigError {
    /// The file does not exist or cannot be read.
    #[error("cannot read the kubeconfig {}: {source}", file.display())]
    Unreadable { file: PathBuf, source: io::Error },
    /// The file is not a kubeconfig.
    #[error(
        "{place} is not a kubeconfig: {reason}. Write it again, for example with kubectl config"
    )]
    NotAKubeconfig { place: String, reason: String },
    /// Flags ask for a cluster, but no kubeconfig names any.
    #[error("there is no cluster to ask: {reason}. Name one with --kubeconfig and --context")]
    NoCluster { reason: String },
    /// The kubeconfig has no entry of that name.
    #[error(
        "the kubeconfig {place} has no {what} {name:?}. kubectl config get-contexts lists the \
         contexts; --context selects one"
    )]
    Dangling {
        place: String,
        /// `context`, `cluster` or `user`.
        what: &'static str,
        name: String,
    },
    /// The address of the API server is missing or invalid.
    #[error(
        "the kubeconfig {place}: {address:?} is not the address of an API server; use a form such \
         as https://192.0.2.1:6443"
    )]
    Address { place: String, address: String },
    /// A certificate or key is invalid.
    #[error("the kubeconfig {place}: {what} cannot be used: {reason}")]
    Material {
        place: String,
        what: &'static str,
        reason: String,
    },
    /// The user acts as another one, which the control plane cannot check.
    #[error(
        "the kubeconfig {place}: context {context:?} acts as another user (as:), and the control \
         plane cannot check that. Use a context of that user's own"
    )]
    Impersonation { place: String, context: String },
}

/// Reads the files, and selects the context.
pub(super) fn select(
    place: &Place,
    environment: &Environment,
) -> Result<Selection, KubeconfigError> {
    let nothing = |reason: String| {
        if place.names_cluster {
            Err(KubeconfigError::NoCluster { reason })
        } else {
            Ok(Selection::Nothing(reason))
        }
    };
    let files = files(place.kubeconfig.as_deref(), environment);
    let all = listing(&files);
    let mut merged = Kubeconfig::default();
    let mut found = Vec::new();
    for file in files {
        match read(&file) {
            Err(KubeconfigError::Unreadable { source, .. })
                if source.kind() == io::ErrorKind::NotFound && place.kubeconfig.is_none() => {}
            kubeconfig => {
                let place = file.display().to_string();
                let next = merged.merge(kubeconfig?);
                merged = next.map_err(|error| explain(&place, &error))?;
                found.push(file);
            }
        }
    }
    if found.is_empty() {
        return nothing(match all.as_str() {
            "" => "there is no kubeconfig".to_owned(),
            all => format!("there is no kubeconfig ({all} does not exist)"),
        });
    }
    let found = listing(&found);
    let current = merged.current_context.clone();
    let Some(context) = place.context.clone().or(current) else {
        return nothing(format!("the kubeconfig {found} has no current-context"));
    };
    let selected = resolve(merged, context, found)?;
    Ok(Selection::Selected(Box::new(selected)))
}

/// Returns the files to merge: that of the flag, or those of `KUBECONFIG`, or the default.
fn files(flag: Option<&Path>, environment: &Environment) -> Vec<PathBuf> {
    if let Some(flag) = flag {
        return vec![flag.to_owned()];
    }
    let variable = environment.variable.clone().unwrap_or_default();
    let paths = env::split_paths(&variable);
    let named: Vec<PathBuf> = paths.filter(|path| !path.as_os_str().is_empty()).collect();
    if !named.is_empty() {
        return named;
    }
    let home = environment.home.iter();
    home.map(|home| home.join(".kube/config")).collect()
}

fn listing(files: &[PathBuf]) -> String {
    let names: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
    names.join(", ")
}

/// Reads one file. Relative paths in it become paths relative to its folder.
fn read(file: &Path) -> Result<Kubeconfig, KubeconfigError> {
    let unreadable = |source| KubeconfigError::Unreadable {
        file: file.to_owned(),
        source,
    };
    let place = file.display().to_string();
    if file.metadata().map_err(unreadable)?.len() > MAX_BYTES {
        return Err(KubeconfigError::NotAKubeconfig {
            place,
            reason: format!("it is larger than {MAX_BYTES} bytes"),
        });
    }
    let mut kubeconfig = match Kubeconfig::read_from(file) {
        Err(KubeError::ReadConfig(source, _)) => return Err(unreadable(source)),
        read => read.map_err(|error| explain(&place, &error))?,
    };
    // kubectl takes an empty name for none.
    kubeconfig.current_context = kubeconfig.current_context.filter(|name| !name.is_empty());
    Ok(kubeconfig)
}

/// Finds the entries of a context, and loads the certificates of its cluster.
fn resolve(
    mut kubeconfig: Kubeconfig,
    context: String,
    place: String,
) -> Result<Selected, KubeconfigError> {
    let dangling = |what, name: &str| KubeconfigError::Dangling {
        place: place.clone(),
        what,
        name: name.to_owned(),
    };
    let entry = find_context(&kubeconfig, &context).ok_or_else(|| dangling("context", &context))?;
    let cluster = find_cluster(&kubeconfig, &entry.cluster)
        .ok_or_else(|| dangling("cluster", &entry.cluster))?;
    let user = entry.user.as_deref().filter(|user| !user.is_empty());
    let known = |user: &&str| kubeconfig.auth_infos.iter().any(|entry| entry.name == *user);
    // Requests would silently be anonymous.
    if let Some(user) = user.filter(|user| !known(user)) {
        return Err(dangling("user", user));
    }
    check_address(&place, cluster.server.as_deref().unwrap_or_default())?;
    let explicit_proxy = cluster.proxy_url.as_ref().is_some_and(|url| !url.is_empty());
    kubeconfig.current_context = Some(context.clone());
    let mut config = Config::try_from(kubeconfig).map_err(|error| explain(&place, &error))?;
    if !explicit_proxy && !wants_proxy(&config.cluster_url) {
        config.proxy_url = None;
    }
    if impersonates(&config.auth_info) {
        return Err(KubeconfigError::Impersonation { place, context });
    }
    Ok(Selected {
        config,
        context,
        place,
    })
}

fn find_context<'a>(kubeconfig: &'a Kubeconfig, name: &str) -> Option<&'a Context> {
    kubeconfig.contexts.iter().find(|entry| entry.name == name)?.context.as_ref()
}

fn find_cluster<'a>(kubeconfig: &'a Kubeconfig, name: &str) -> Option<&'a Cluster> {
    kubeconfig.clusters.iter().find(|entry| entry.name == name)?.cluster.as_ref()
}

fn check_address(place: &str, address: &str) -> Result<(), KubeconfigError> {
    let url = address.parse::<http::Uri>().ok();
    let is_known = url.is_some_and(|url| {
        matches!(url.scheme_str(), Some("http" | "https"))
            && url.host().is_some_and(|host| !host.is_empty())
    });
    is_known.then_some(()).ok_or_else(|| KubeconfigError::Address {
        place: place.to_owned(),
        address: one_line(address),
    })
}

/// Returns whether `HTTPS_PROXY` and `NO_PROXY` ask for a proxy to this server. The crate kube compares `NO_PROXY`
/// with the address of the proxy instead.
fn wants_proxy(server: &http::Uri) -> bool {
    let is_here = is_this_machine(server.host().unwrap_or_default());
    !is_here && Matcher::from_env().intercept(server).is_some()
}

fn impersonates(user: &AuthInfo) -> bool {
    user.impersonate.is_some()
        || user.impersonate_uid.is_some()
        || user.impersonate_groups.is_some()
        || user.impersonate_user_extra.is_some()
}

/// Explains an error of the crate kube.
pub(super) fn explain(place: &str, error: &KubeError) -> KubeconfigError {
    let material = |what, reason: String| KubeconfigError::Material {
        place: place.to_owned(),
        what,
        reason: one_line(&reason),
    };
    match error {
        KubeError::LoadCertificateAuthority(error) => {
            material("certificate-authority", error.to_string())
        }
        KubeError::ParseCertificates(error) => material("certificate-authority", error.to_string()),
        KubeError::LoadClientCertificate(error) => {
            material("client-certificate", error.to_string())
        }
        KubeError::LoadClientKey(error) => material("client-key", error.to_string()),
        KubeError::ParseProxyUrl(error) => material("the URL of the proxy", error.to_string()),
        KubeError::Parse(error) => not_a_kubeconfig(place, &error.to_string()),
        error => not_a_kubeconfig(place, &error.to_string()),
    }
}

fn not_a_kubeconfig(place: &str, reason: &str) -> KubeconfigError {
    // The text after the arrow quotes the file, and with it the credentials.
    let reason = reason.split("-->").next().unwrap_or_default();
    KubeconfigError::NotAKubeconfig {
        place: place.to_owned(),
        reason: one_line(reason.trim_start_matches("error: ")),
    }
}

#[cfg(test)]
mod tests;
