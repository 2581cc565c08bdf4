//! The program, started as people start it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{ChildStderr, Command, Stdio};

use kplane_rig::process::Process;
use nix::sys::signal::Signal;
use serde_json::Value;

pub(crate) fn binary(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kp-nodeagent"));
    command
        .args(["--cache-dir="])
        .args(args)
        .env_remove("RUST_LOG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// An agent of its own, with its log.
pub(crate) struct Agent {
    pub(crate) child: Process,
    log: std::io::Lines<BufReader<ChildStderr>>,
}

impl Agent {
    pub(crate) fn start(manifests: &Path) -> Self {
        Self::start_with(manifests, &["--healthz-bind-address", ""])
    }

    pub(crate) fn start_with(manifests: &Path, flags: &[&str]) -> Self {
        let mut command = binary(&["--standalone", "--manifests"]);
        command
            .arg(manifests)
            .args(["--node-name", "n1", "--log-format", "json"])
            .args(["--status-bind-address", ""])
            .args(flags);
        Self::spawn(command)
    }

    /// Starts a program whose standard error is piped.
    pub(crate) fn spawn(command: Command) -> Self {
        let mut child = Process::start(command).unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, log }
    }

    /// Reads the log up to the line with this message; returns everything up to it.
    pub(crate) fn until(&mut self, message: &str) -> Vec<Value> {
        let mut lines = Vec::new();
        for line in &mut self.log {
            let line: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let found = line["fields"]["message"] == message;
            lines.push(line);
            if found {
                return lines;
            }
        }
        panic!("the agent ended without saying {message:?}: {lines:#?}");
    }

    pub(crate) fn stop(mut self) {
        self.child.signal(Signal::SIGTERM).unwrap();
        self.log.by_ref().for_each(drop);
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

pub(crate) fn has(lines: &[Value], message: &str) -> bool {
    let text = |line: &Value| line["fields"]["message"].as_str().unwrap_or_default().to_owned();
    lines.iter().any(|line| text(line).contains(message))
}
