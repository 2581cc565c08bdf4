//! A real browser: Debian's Chromium without a window, in a network namespace, as a test drives it.
//!
//! ```no_run
//! use kplane_rig::browser::{Browser, Key, Look};
//! use kplane_rig::netns::NetNs;
//!
//! fn main() -> anyhow::Result<()> {
//!     let ns = NetNs::new("viewer")?; // in which a server listens
//!     let browser = Browser::start(&ns)?;
//!     let tab = browser.tab()?;
//!     assert_eq!(tab.open("http://127.0.0.1:8080/")?, 200);
//!     assert_eq!(tab.text("document.title")?, "Fleet");
//!     tab.press(Key::Tab)?;
//!     assert!(tab.focus()?.is_visible);
//!     tab.look(Look { dark: true, ..Look::NARROW })?;
//!     tab.screenshot("narrow.png".as_ref())?;
//!     assert_eq!(tab.complaints(), []); // nothing on the console, nothing that the page's policy refused
//!     Ok(())
//! }
//! ```
//!
//! The browser is spoken to over a pipe, in the protocol of its developer tools. So there is no port that a page could
//! reach, and Chromium ends with the process that holds the pipe, even if that is killed.
//!
//! Pages are trusted here as much as tests are: Chromium's sandbox is off, because Chromium refuses it to root. The
//! namespace has no way to other networks, so a page that asks for an external asset cannot get it, and
//! [`Tab::requests`] shows that it tried.

mod keys;
mod notes;
mod tab;
mod wire;

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tempfile::TempDir;

pub use self::keys::Key;
pub use self::notes::Note;
pub use self::tab::{Cost, Element, Focus, Look, Tab};
use self::wire::Wire;
use crate::netns::NetNs;
use crate::privilege;
use crate::process::{self, Process};
use crate::wait::eventually;

/// The program, and its package in Debian.
pub const PROGRAM: (&str, &str) = ("chromium", "chromium");

/// Time for one question to the browser on a busy machine, such as the first page that it opens.
const DEADLINE: Duration = Duration::from_secs(30);
/// Time in which a browser ends by itself.
const GRACE: Duration = Duration::from_secs(10);

/// Runs the program of the arguments with its standard input and output as the descriptors that Chromium's pipe has.
const WITH_PIPE: &str = "exec \"$@\" 3<&0 4>&1 </dev/null >&2";

/// Chromium's options. Most switch off what would ask other hosts or differ between machines.
const OPTIONS: [&str; 15] = [
    "--headless",
    "--remote-debugging-pipe",
    // Chromium refuses to start as root with its sandbox.
    "--no-sandbox",
    // Containers have a small /dev/shm.
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--mute-audio",
    "--lang=en-US",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--hide-scrollbars",
];

/// Ends a test here unless a browser can be started, as [`needed`](privilege::needed) does.
///
/// # Errors
/// The browser is missing.
pub fn need() -> Result<()> {
    let (program, package) = PROGRAM;
    let found = privilege::is_on_path(program)
        .then_some(())
        .with_context(|| format!("{program} is missing: apt-get install {package}"));
    privilege::needed(found)
}

/// A running browser with a new profile. Dropping it ends the browser and removes the profile.
#[derive(Debug)]
pub struct Browser {
    wire: Arc<Wire>,
    reader: Option<JoinHandle<()>>,
    process: Process,
    profile: TempDir,
}

impl Browser {
    /// Starts a browser in a namespace.
    ///
    /// # Errors
    /// Chromium could not be started, or did not answer; the message has the end of its log.
    pub fn start(ns: &NetNs) -> Result<Self> {
        let profile = TempDir::with_prefix("kplane-browser-").context("create a profile")?;
        let log = profile.path().join("log");
        let mut command = command(profile.path(), &log)?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = ns.command(command)?;
        let input = process.stdin.take().context("the browser's input")?;
        let output = process.stdout.take().context("the browser's output")?;
        let (wire, reader) = Wire::start(input, output)?;
        let browser = Self {
            wire,
            reader: Some(reader),
            process,
            profile,
        };
        let answer = browser.wire.ask(None, "Browser.getVersion", &[]);
        answer.with_context(|| format!("start chromium: {}", process::last_words(&log)))?;
        Ok(browser)
    }

    /// Opens a tab that shares no cookies, cache or other state with any other tab.
    ///
    /// # Errors
    /// The browser has ended or does not answer.
    pub fn tab(&self) -> Result<Tab> {
        Tab::new(&self.wire)
    }

    /// Returns the folder that the browser writes to.
    pub fn profile(&self) -> &Path {
        self.profile.path()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.wire.close();
        let ended = eventually(GRACE, "the browser ends", || {
            match self.process.try_wait() {
                Ok(None) => Err("it is running"),
                _ => Ok(()),
            }
        });
        if ended.is_err() {
            // It is reaped when the process is dropped.
            let _ = self.process.kill();
        }
        // The reader ends with the browser's last process. If it panicked, nobody waits for an answer any more.
        let _ = self.reader.take().map(JoinHandle::join);
        // Processes of tabs outlive the first one for a moment, and write into the profile.
        let alone = eventually(GRACE, "all processes end", || {
            match processes_of(self.profile.path()) {
                Ok(none) if none.is_empty() => Ok(()),
                others => Err(format!("{others:?}")),
            }
        });
        if let Err(error) = alone {
            eprintln!("{}: {error:#}", self.profile.path().display());
        }
        let removed = eventually(
            GRACE,
            "the profile is removed",
            || match fs::remove_dir_all(self.profile.path()) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            },
        );
        if let Err(error) = removed {
            eprintln!("{}: {error:#}", self.profile.path().display());
        }
    }
}

/// Returns the processes of the browser with a profile: those whose arguments contain its path.
///
/// # Errors
/// `/proc` cannot be read.
pub fn processes_of(profile: &Path) -> Result<Vec<i32>> {
    let path = profile.to_string_lossy();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Ok(number) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        // A process may end meanwhile.
        let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&arguments).contains(&*path) {
            found.push(number);
        }
    }
    Ok(found)
}

fn command(profile: &Path, log: &Path) -> Result<Command> {
    let mut command = process::logging("sh".as_ref(), log)?;
    command
        .args(["-c", WITH_PIPE, "sh", PROGRAM.0])
        .args(OPTIONS)
        .arg(format!("--user-data-dir={}", profile.display()))
        // Chromium and its libraries keep some files outside of the profile.
        .env("HOME", profile)
        .env("XDG_CONFIG_HOME", profile)
        .env("XDG_CACHE_HOME", profile)
        .env_remove("DBUS_SESSION_BUS_ADDRESS");
    Ok(command)
}
