//! Runs programs to their end, with limits on their time and output.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// First pause between two checks whether a program that closed its output has ended. Each pause is twice as
/// long as the one before, up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_micros(100);
/// Longest pause between two checks.
const PAUSE_MAX: Duration = Duration::from_millis(50);
/// Longest part of a program's standard error that is kept, in bytes.
const COMPLAINT_BYTES: u64 = 1_000;

/// Limits of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessLimits {
    /// Time after which the program is killed.
    pub(crate) within: Duration,
    /// Most bytes on the program's standard output.
    pub(crate) output_bytes: u64,
}

/// A program that failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program could not be started, or its pipes failed.
    #[error("cannot be run: {0}")]
    Io(#[from] io::Error),
    /// The program exceeded its time and was killed.
    #[error("did not end within {0:?}")]
    TimedOut(Duration),
    /// The program printed more than its limit.
    #[error("printed more than {0} bytes")]
    TooLong(u64),
    /// The program ended with a failure.
    #[error("failed ({status}): {complaint}")]
    Failed {
        /// The exit status.
        status: ExitStatus,
        /// The beginning of the program's standard error, on one line.
        complaint: String,
    },
}

impl RunError {
    /// Returns whether the program complained about a missing privilege.
    pub(crate) fn is_denied(&self) -> bool {
        let signs = ["Permission denied", "Operation not permitted"];
        matches!(self, Self::Failed { complaint, .. } if signs.iter().any(|s| complaint.contains(s)))
    }
}

/// Runs a program in the calling thread's network namespace, and returns its output.
///
/// # Errors
/// [`RunError`].
pub(crate) fn run(
    program: &Path,
    arguments: &[&str],
    input: &[u8],
    limits: ProcessLimits,
) -> Result<Vec<u8>, RunError> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (closes, closed) = channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            // A program that fails may not read all of its input. Its exit code reports that.
            stdin.map(|mut pipe| pipe.write_all(input))
        });
        let output = scope.spawn(move || {
            let output = read(stdout, limits.output_bytes);
            // The receiver is gone if the program was killed.
            let _ = closes.send(());
            output
        });
        let complaint = scope.spawn(move || read(stderr, COMPLAINT_BYTES));
        let status = wait(&mut child, &closed, limits.within);
        let output = output.join().unwrap_or_default();
        let complaint = complaint.join().unwrap_or_default();
        let status = status?;
        if output.len() as u64 > limits.output_bytes {
            return Err(RunError::TooLong(limits.output_bytes));
        }
        if !status.success() {
            let text = String::from_utf8_lossy(&complaint);
            let words: Vec<&str> = text.split_whitespace().collect();
            let complaint = words.join(" ");
            return Err(RunError::Failed { status, complaint });
        }
        Ok(output)
    })
}

/// Reads a pipe up to one byte more than the limit, and closes it.
fn read(pipe: Option<impl Read>, limit: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // After an error, the bytes read so far are kept.
        let _ = pipe.take(limit + 1).read_to_end(&mut bytes);
    }
    bytes
}

/// Waits for a program to end. Programs rarely close their output earlier, so a closed output means that the
/// program is ending.
fn wait(
    child: &mut Child,
    closed: &Receiver<()>,
    within: Duration,
) -> Result<ExitStatus, RunError> {
    let start = Instant::now();
    // A timeout here is handled in the loop below.
    let _ = closed.recv_timeout(within);
    let mut pause = PAUSE_MIN;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if start.elapsed() >= within {
            child.kill()?;
            child.wait()?;
            return Err(RunError::TimedOut(within));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ProcessLimits = ProcessLimits {
        within: Duration::from_secs(10),
        output_bytes: 1_000_000,
    };

    fn shell(script: &str, input: &[u8], limits: ProcessLimits) -> Result<Vec<u8>, RunError> {
        run(Path::new("/bin/sh"), &["-c", script], input, limits)
    }

    #[test]
    fn large_texts_pass_both_ways() {
        let text = vec![b'x'; 900_000];
        assert_eq!(shell("cat", &text, LIMITS).unwrap(), text);
    }

    #[test]
    fn failures_say_why() {
        let error = shell("echo no way >&2; exit 3", &[b'x'; 500_000], LIMITS).unwrap_err();
        assert_eq!(error.to_string(), "failed (exit status: 3): no way");
        assert!(!error.is_denied());
        let denied = shell("echo nat: Permission denied >&2; exit 4", b"", LIMITS);
        assert!(denied.unwrap_err().is_denied());
        let missing = run(Path::new("/no/such/program"), &[], b"", LIMITS);
        assert!(matches!(missing, Err(RunError::Io(_))));
    }

    #[test]
    fn limits_hold() {
        let brief = ProcessLimits {
            within: Duration::from_millis(50),
            ..LIMITS
        };
        let error = shell("exec sleep 60", b"", brief).unwrap_err();
        assert!(matches!(error, RunError::TimedOut(_)), "{error}");
        let little = ProcessLimits {
            output_bytes: 10,
            ..LIMITS
        };
        let error = shell("exec yes", b"", little).unwrap_err();
        assert!(matches!(error, RunError::TooLong(10)), "{error}");
    }
}
