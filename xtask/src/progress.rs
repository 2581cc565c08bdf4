//! Shows how far a long build is.

use std::io::{BufRead as _, BufReader, IsTerminal as _};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Interval on a terminal, where each line takes the place of the last one, and in a log.
const INTERVALS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// What a build has done.
#[derive(Debug, Default)]
struct Progress {
    crates: usize,
    programs: usize,
}

/// Runs a build of cargo that makes a number of programs, and shows every second how far it is; every 30 seconds in a log.
///
/// # Errors
/// Cargo cannot be started, or fails.
pub(crate) fn watched(command: &mut Command, programs: usize) -> Result<()> {
    command.args(["--quiet", "--message-format=json-render-diagnostics"]);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    let messages = BufReader::new(child.stdout.take().context("cargo has no output")?);
    let (sender, lines) = channel();
    thread::spawn(move || {
        messages.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    let is_terminal = std::io::stderr().is_terminal();
    let interval = INTERVALS[usize::from(!is_terminal)];
    let (started, mut next, mut done) = (Instant::now(), interval, Progress::default());
    loop {
        match lines.recv_timeout(next.saturating_sub(started.elapsed())) {
            Ok(line) => done.read(&line),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if started.elapsed() >= next {
            next = started.elapsed() + interval;
            let text = done.text(started.elapsed(), programs);
            if is_terminal { eprint!("\r{text}\x1b[K") } else { eprintln!("{text}") }
        }
    }
    let status = child.wait()?;
    if is_terminal {
        eprintln!();
    }
    ensure!(status.success(), "cargo build: {status}");
    Ok(())
}

impl Progress {
    /// Takes in a message of cargo.
    fn read(&mut self, line: &str) {
        let message: Value = serde_json::from_str(line).unwrap_or_default();
        if message["reason"] == "compiler-artifact" {
            self.crates += 1;
            self.programs += usize::from(message["executable"].is_string());
        }
    }

    fn text(&self, elapsed: Duration, programs: usize) -> String {
        let (minutes, seconds) = (elapsed.as_secs() / 60, elapsed.as_secs() % 60);
        let Self {
            crates,
            programs: linked,
        } = self;
        format!(
            "{minutes} min {seconds:02} s: {crates} crates compiled, {linked} of {programs} programs linked"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_and_programs_are_counted() {
        let mut done = Progress::default();
        for line in [
            r#"{"reason":"compiler-artifact","executable":null}"#,
            r#"{"reason":"build-script-executed"}"#,
            r#"{"reason":"compiler-artifact","executable":"/target/dist/kpctl"}"#,
            "no message",
        ] {
            done.read(line);
        }
        let text = done.text(Duration::from_secs(192), 3);
        assert_eq!(
            text,
            "3 min 12 s: 2 crates compiled, 1 of 3 programs linked"
        );
    }

    #[test]
    fn a_build_that_fails_is_an_error() {
        let failed = watched(Command::new("sh").args(["-c", "exit 3"]), 1);
        assert!(failed.unwrap_err().to_string().contains("exit status: 3"));
        watched(Command::new("sh").args(["-c", "echo '{}'"]), 1).unwrap();
    }
}
