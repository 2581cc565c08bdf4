//! The input of the guest's shell: paths, and the command to run.

use std::env;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

/// The first program of the guest, in the initramfs.
pub(super) const INIT: &str = include_str!("init.sh");
/// The script that the first program starts, with the file system of the host as root.
pub(super) const MAIN: &str = include_str!("main.sh");

/// Variables of this process that a command inside gets, too.
const PASSED_ON: [&str; 6] = ["PATH", "HOME", "LANG", "TERM", "CI", "REQUIRE_NETNS"];
/// Prefixes of further such variables.
const PASSED_ON_PREFIXES: [&str; 3] = ["CARGO", "RUST", "KPLANE_"];

/// Variables for both scripts.
pub(super) struct Settings<'a> {
    /// Folder of kernel modules, by version.
    pub(super) modules: &'a Path,
    /// `run` or `shell`.
    pub(super) mode: &'a str,
    /// Whether the guest has a network device.
    pub(super) network: bool,
    /// The folder whose changes stay.
    pub(super) writable: Option<&'a Path>,
}

impl Settings<'_> {
    pub(super) fn text(&self) -> Result<String> {
        let modules = quoted(self.modules.as_os_str())?;
        let writable = self.writable.map_or(OsStr::new(""), Path::as_os_str);
        let (mode, writable) = (self.mode, quoted(writable)?);
        let network = if self.network { "1" } else { "" };
        Ok(format!(
            "MODULES={modules}\nMODE={mode}\nWRITABLE={writable}\nNETWORK={network}\n"
        ))
    }
}

/// Returns a script that becomes the command, in its folder, with its variables and those passed
/// on.
pub(super) fn command(command: &Command, here: &Path, inside: &str) -> Result<String> {
    let passed_on = env::vars().filter(|(name, _)| {
        PASSED_ON.contains(&name.as_str())
            || PASSED_ON_PREFIXES.iter().any(|it| name.starts_with(it))
    });
    let mut text = format!("export {inside}=1\n");
    for (name, value) in passed_on {
        text += &format!("export {name}={}\n", quoted(OsStr::new(&value))?);
    }
    for (name, value) in command.get_envs() {
        let name = name.to_str().context("a variable's name is not UTF-8")?;
        text += &match value {
            Some(value) => format!("export {name}={}\n", quoted(value)?),
            None => format!("unset {name}\n"),
        };
    }
    let folder = command.get_current_dir().unwrap_or(here);
    text += &format!("cd {}\nexec", quoted(folder.as_os_str())?);
    for word in [command.get_program()].into_iter().chain(command.get_args()) {
        text += " ";
        text += &quoted(word)?;
    }
    Ok(text + "\n")
}

/// Returns one quoted word of the shell, whatever its content.
fn quoted(word: &OsStr) -> Result<String> {
    let word = word.to_str().context("not UTF-8")?;
    Ok(format!("'{}'", word.replace('\'', r"'\''")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shell_gets_every_word_as_it_was() {
        let mut nasty = Command::new("printf");
        nasty.args(["%s|%s|%s", "a b", "it's", "$HOME;`x`\n\\"]);
        nasty.env("KPLANE_TEST", "'quoted'").current_dir("/");
        let script = command(&nasty, Path::new("/nowhere"), "KPLANE_VM").unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]);
        let output = crate::process::output(shell).unwrap();
        assert_eq!(output, "a b|it's|$HOME;`x`\n\\");
    }
}
