//! The program as people start it: exit codes, messages, signals.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80}]}
";

fn binary(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kp-nodeagent"));
    command
        .args(args)
        .env_remove("RUST_LOG")
        .env_remove("NODE_NAME")
        .stderr(Stdio::piped());
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_wrong_configuration_is_one_line_and_exit_code_1() {
    let cases: [&[&str]; 5] = [
        &[],
        &["--no-such-flag"],
        &["--masquerade-bit", "77", "--control-plane", "a"],
        &["--cluster-cidr", "x", "--control-plane", "a"],
        &[
            "--standalone",
            "--backend",
            "noop",
            "--manifests",
            "/no/such/folder",
        ],
    ];
    for args in cases {
        let output = binary(args).output().unwrap();
        let stderr = stderr(&output);
        let lines: Vec<_> = stderr.lines().collect();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        assert_eq!(lines.len(), 1, "{args:?}: {stderr}");
        assert!(lines[0].starts_with("kp-nodeagent: "), "{stderr}");
    }
    assert_eq!(
        binary(&["--help"])
            .stdout(Stdio::null())
            .status()
            .unwrap()
            .code(),
        Some(0)
    );
}

#[test]
fn cleanup_is_safe_twice() {
    for _ in 0..2 {
        let output = binary(&["--cleanup", "--backend", "noop"])
            .output()
            .unwrap();
        assert_eq!(
            (output.status.code(), stderr(&output)),
            (Some(0), String::new())
        );
    }
}

#[test]
fn signals_end_the_program_in_order() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("web.yaml"), SERVICE).unwrap();
    let folder = folder.path().to_str().unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut child = binary(&["--standalone", "--manifests", folder, "--backend", "noop"])
            .args([
                "--healthz-bind-address",
                "127.0.0.1:0",
                "--metrics-bind-address",
                "127.0.0.1:0",
                "--status-bind-address",
                "",
            ])
            .args(["--log-format", "json", "--node-name", "n1"])
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let applied = log.find(|line| line.as_ref().unwrap().contains("update applied"));
        let line: serde_json::Value = serde_json::from_str(&applied.unwrap().unwrap()).unwrap();
        assert_eq!(line["fields"]["services"], 1, "{line}");
        kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
        let rest: Vec<_> = log.map(Result::unwrap).collect();
        assert!(
            rest.iter().any(|line| line.contains("the rules stay")),
            "{rest:?}"
        );
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}
