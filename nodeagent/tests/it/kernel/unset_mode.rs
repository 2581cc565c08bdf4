//! kube-proxy's file without a mode, on a node that kube-proxy served.

use std::fs;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::agent::{Agent, binary};
use kplane_rig::kernel::in_netns;

const FILE: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
                    healthzBindAddress: 127.0.0.1:1\nmetricsBindAddress: 127.0.0.1:2\n";
const RULES: &str = "*nat\n:KUBE-NODEPORTS - [0:0]\n\
                     -A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j RETURN\nCOMMIT\n";

/// Before it counts and when it does.
#[test]
fn i7_what_is_served_no_more_is_told() {
    in_netns(|| {
        for line in [
            "ip link set lo up".to_owned(),
            "ip address add 192.0.2.7/32 dev lo".to_owned(),
            format!("printf '{RULES}' | iptables-nft-restore"),
        ] {
            let done = Command::new("sh").args(["-c", &line]).status().unwrap();
            assert!(done.success(), "{line}");
        }
        let folder = TempDir::new().unwrap();
        let config = folder.path().join("config.conf");
        fs::write(&config, FILE).unwrap();
        let config = config.to_str().unwrap();
        let output = binary(&["--check-config", "--config", config]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let stdout = String::from_utf8(output.stdout).unwrap();
        let reported = "No longer served: node ports 30080 on 127.0.0.1, 192.0.2.7, except";
        assert!(stdout.contains(reported), "{stdout}");

        let manifests = TempDir::new().unwrap();
        let mut agent = Agent::start_with(manifests.path(), &["--config", config]);
        let lines = agent.until("update applied");
        let text = |line: &Value| line["fields"]["message"].to_string();
        let warned = lines.iter().find(|line| text(line).contains(reported));
        assert_eq!(warned.unwrap()["level"], "WARN", "{lines:#?}");
        agent.stop();
    });
}
