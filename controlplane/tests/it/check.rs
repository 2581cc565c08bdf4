//! `kp-controlplane --check`: its output before a folder is used.

use std::process::Command;

use tempfile::TempDir;

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.10
  externalIPs: [192.0.2.1, 203.0.113.1]
  ports: [{port: 80}]
";

/// A start on this folder would be partial; the output reports that, with the reason.
#[test]
fn a_start_that_would_be_partial_is_announced() {
    let folder = TempDir::new().unwrap();
    let check = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kp-controlplane"));
        let output = command.arg("--check").arg(folder.path()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let partial = "incomplete: a control plane that starts with this input removes nothing that is \
                   missing: ";
    assert!(check().starts_with(&format!("{partial}there is no Service; ")));
    std::fs::write(folder.path().join("web.yaml"), SERVICE.to_owned() + "# ha").unwrap();
    let text = check();
    assert!(
        text.contains("web.yaml ends in the middle of a line"),
        "{text}"
    );
    let slice = "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                 metadata: {name: web-1, namespace: shop}\naddressType: IPv4\n";
    std::fs::write(folder.path().join("web.yaml"), SERVICE.to_owned() + slice).unwrap();
    let text = check();
    assert!(!text.contains(partial), "{text}");
}

/// A5: the Service is served, except for addresses that the operator does not allow.
#[test]
fn a5_external_ips_are_checked_as_they_would_be_served() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("web.yaml"), SERVICE).unwrap();
    let check = |flags: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kp-controlplane"))
            .arg("--check")
            .arg(folder.path())
            .args(flags)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.code(), text)
    };
    let (code, text) = check(&[]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = check(&["--external-ip-cidr", "192.0.2.0/24,2001:db8::/32"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("Service shop/web: spec.externalIPs: 203.0.113.1 is outside"),
        "{text}"
    );
    assert!(
        text.contains("1 Services with 0 endpoints would be served; 1 errors"),
        "{text}"
    );
    let (code, text) = check(&["--allow-external-ips=false"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("switched off"), "{text}");
}

/// Addresses in logs are printed as plain addresses, because programs read logs too.
#[test]
fn json_logs_have_no_debug_text() {
    use std::io::{BufRead as _, BufReader};
    use std::net::SocketAddr;
    use std::process::Stdio;

    let folder = TempDir::new().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_kp-controlplane"))
        .arg("--manifests")
        .arg(folder.path())
        .args(["--log-format", "json", "--agent-listen", "127.0.0.1:0"])
        .args([
            "--status-listen",
            "127.0.0.1:0",
            "--http-listen",
            "127.0.0.1:0",
        ])
        .env_remove("RUST_LOG")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let serving = log.find(|line| line.as_ref().unwrap().contains("\"serving\""));
    let _ = child.kill();
    let _ = child.wait();
    let line: serde_json::Value = serde_json::from_str(&serving.unwrap().unwrap()).unwrap();
    for field in ["agents", "status", "http"] {
        let text = line["fields"][field].as_str().unwrap_or_default();
        assert!(text.parse::<SocketAddr>().is_ok(), "{field} in {line}");
    }
}
