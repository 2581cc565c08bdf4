//! `kp-controlplane certs`: an authority of kplane's own, for machines without a cluster.
//!
//! ```text
//! DIR/ca.crt  ca.key              the authority, made once
//!     server.crt  server.key      the control plane's
//!     nodes/NAME.crt  .key        of an agent: CN=system:node:NAME, O=system:nodes
//!     users/NAME.crt  .key        of a user: CN=NAME, O=kplane:admins if the user may act
//! ```
//!
//! Keys have mode 0600 and never leave their file. The authority's key is only needed to make certificates; keep
//! it off the nodes.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::Subcommand;
use kplane_tls::Subject;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};

use crate::cert_issuer::{self, DAY, Pair};
use crate::identity::ADMINS;

/// Lifetime of all other certificates.
const CERTIFICATE: Duration = Duration::from_secs(365 * DAY);

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make an authority and the control plane's certificate. An existing authority is kept
    Init {
        /// Folder of the certificates
        dir: PathBuf,
        /// Name or IP address at which agents and kpctl reach the control plane; repeat it for several. localhost is
        /// always among them
        #[arg(long, value_name = "NAME")]
        host: Vec<String>,
    },
    /// Make certificates of agents, for nodes of these names
    Node {
        /// Folder of the certificates
        dir: PathBuf,
        /// Names of Nodes
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Make certificates of users of kpctl
    User {
        /// Folder of the certificates
        dir: PathBuf,
        /// Names of users
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// The users may act: approve deletions
        #[arg(long)]
        admin: bool,
    },
}

/// A step that failed. The text names the file and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum CertsError {
    /// A file or folder cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The authority cannot be read.
    #[error("cannot read {}: {source}; run `kp-controlplane certs init` first", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A name cannot be part of a file name or a certificate.
    #[error("{name:?} is no valid name: use letters, digits, '-', '_' and '.'")]
    Name {
        /// The name.
        name: String,
    },
    /// The library cannot make a certificate.
    #[error("cannot make the certificate {what}: {source}")]
    Make {
        /// The certificate.
        what: String,
        /// The library's error.
        source: rcgen::Error,
    },
}

/// Runs a command of the program.
pub fn main(command: &Command) -> ExitCode {
    match run(command) {
        Ok(files) => {
            for file in files {
                println!("{}", file.display());
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("kp-controlplane: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command. Returns the files that it wrote.
///
/// # Errors
/// [`CertsError`]; files written before stay.
pub fn run(command: &Command) -> Result<Vec<PathBuf>, CertsError> {
    match command {
        Command::Init { dir, host } => init(dir, host),
        Command::Node { dir, names } => many(dir, "nodes", names, Subject::of_node),
        Command::User { dir, names, admin } => many(dir, "users", names, |name| Subject {
            name: name.to_owned(),
            groups: admin.then(|| ADMINS.to_owned()).into_iter().collect(),
        }),
    }
}

fn init(dir: &Path, hosts: &[String]) -> Result<Vec<PathBuf>, CertsError> {
    folder(dir)?;
    let mut written = Vec::new();
    if !dir.join("ca.key").exists() {
        let made = Pair::authority(SystemTime::now()).map_err(make("of the authority"))?;
        written.extend(save(dir, "ca", &made)?);
    }
    let authority = authority(dir)?;
    let names: Vec<String> = ["localhost", "127.0.0.1", "::1"]
        .map(str::to_owned)
        .into_iter()
        .chain(hosts.iter().cloned())
        .collect();
    let params = cert_issuer::control_plane(&names).map_err(make("of the control plane"))?;
    written.extend(issue(dir, "server", params, &authority)?);
    Ok(written)
}

/// Makes one certificate for each name, in a folder inside `dir`.
fn many(
    dir: &Path,
    inside: &str,
    names: &[String],
    subject: impl Fn(&str) -> Subject,
) -> Result<Vec<PathBuf>, CertsError> {
    for name in names {
        check(name)?;
    }
    let authority = authority(dir)?;
    let dir = dir.join(inside);
    folder(&dir)?;
    let mut written = Vec::new();
    for name in names {
        let mut params = CertificateParams::default();
        let Subject { name: user, groups } = subject(name);
        params.distinguished_name.push(DnType::CommonName, user);
        for group in groups {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        written.extend(issue(&dir, name, params, &authority)?);
    }
    Ok(written)
}

/// Makes a certificate with a new key.
fn issue(
    dir: &Path,
    name: &str,
    params: CertificateParams,
    authority: &Issuer<'_, KeyPair>,
) -> Result<[PathBuf; 2], CertsError> {
    let made = cert_issuer::issue(authority, params, SystemTime::now(), CERTIFICATE);
    save(dir, name, &made.map_err(make(name))?)
}

/// Reads the authority of a folder.
fn authority(dir: &Path) -> Result<Issuer<'static, KeyPair>, CertsError> {
    let read = |name: &str| {
        let path = dir.join(name);
        fs::read_to_string(&path).map_err(|source| CertsError::Read { path, source })
    };
    let (key, certificate) = (read("ca.key")?, read("ca.crt")?);
    let pair = Pair { certificate, key };
    pair.issuer().map_err(make("with the authority"))
}

fn make(what: &str) -> impl Fn(rcgen::Error) -> CertsError {
    let what = what.to_owned();
    move |source| CertsError::Make {
        what: what.clone(),
        source,
    }
}

/// Checks a name that becomes part of a file name.
fn check(name: &str) -> Result<(), CertsError> {
    let fine = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let is_ip = name.parse::<IpAddr>().is_ok();
    if !name.is_empty() && !name.starts_with('.') && name.chars().all(fine) && !is_ip {
        return Ok(());
    }
    Err(CertsError::Name {
        name: name.to_owned(),
    })
}

/// Creates a folder that only its owner may enter.
fn folder(path: &Path) -> Result<(), CertsError> {
    let mut builder = DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(path);
    made.map_err(|source| CertsError::Write {
        path: path.to_owned(),
        source,
    })
}

/// Writes a certificate and its key.
fn save(dir: &Path, name: &str, made: &Pair) -> Result<[PathBuf; 2], CertsError> {
    let files = ["crt", "key"].map(|kind| dir.join(format!("{name}.{kind}")));
    let [certificate_file, key_file] = &files;
    write(key_file, &made.key, 0o600)?;
    write(certificate_file, &made.certificate, 0o644)?;
    Ok(files)
}

/// Writes a file whole or not at all.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), CertsError> {
    let failed = |source| CertsError::Write {
        path: path.to_owned(),
        source,
    };
    let new = path.with_extension("new");
    // A file that an interrupted run left may have another mode.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let mut options = File::options();
    let opened = options.write(true).create_new(true).mode(mode).open(&new);
    let mut file = opened.map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    fs::rename(&new, path).map_err(failed)
}
