//! kpctl on its way through a real API server. No kubelet forwards ports here, so the way ends there; up to that
//! point every missing piece is named, with what to do.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Error, Result, ensure};
use kplane_tests::cluster::{Cluster, OWN_ADDRESS, Options, objects};
use kplane_tests::topology::NodeSpec;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::support::world::product;

const NAMESPACE: &str = "kplane";
const RIGHTS: &str = "deploy/kubernetes/rbac.yaml";
/// The API server learns of changed rights a moment later.
const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) fn each_missing_piece_on_the_way_to_the_control_plane_is_named() -> Result<()> {
    let way = Way::start()?;
    let admin = way.cluster.kubeconfig();
    way.says(
        &admin,
        &["no control plane runs in namespace kplane", "--show-labels"],
    )?;
    credentials(&way)?;
    let poor = rights(&way)?;
    pods(&way, &poor)?;
    authority(&way, &poor)?;
    forwarding(&way, &poor)
}

/// Credentials that do not work, and servers that do not answer.
fn credentials(way: &Way) -> Result<()> {
    let cluster = &way.cluster;
    let wrong = cluster.token_kubeconfig("wrong", "no-such-token")?;
    way.says(
        &wrong,
        &["does not accept your credentials (401)", "auth whoami"],
    )?;
    let text = fs::read_to_string(cluster.kubeconfig())?;
    let folder = cluster.folder();
    let closed = folder.join("kubeconfig-closed");
    fs::write(&closed, text.replace(":6443", ":6444"))?;
    way.says(&closed, &["cannot be reached: connection refused"])?;
    let other = folder.join("kubeconfig-other-authority");
    let authority = "\"certificate-authority-data\": \"Cg==\", \"x\":";
    fs::write(
        &other,
        text.replace("\"certificate-authority\":", authority),
    )?;
    way.says(&other, &["cannot be used", "UnknownIssuer"])?;
    let broken = folder.join("kubeconfig-broken");
    fs::write(&broken, "users: [")?;
    way.says(&broken, &["is not a kubeconfig", "kubeconfig-broken"])
}

/// Without rights the way is refused; with those of the manifest it goes on.
fn rights(way: &Way) -> Result<PathBuf> {
    let cluster = &way.cluster;
    way.kubectl(&["apply", "--filename", &way.manifest()?])?;
    cluster.api().apply(&json!({
        "kind": "ServiceAccount", "metadata": { "name": "poor", "namespace": NAMESPACE },
    }))?;
    let poor = cluster.account_kubeconfig("kplane/poor")?;
    let grant = "create rolebinding kpctl-USER --role=kpctl";
    way.says(&poor, &["does not let you list pods (403", RIGHTS, grant])?;
    let binding = ["create", "rolebinding", "kpctl-poor", "--role=kpctl"];
    let account = ["--serviceaccount=kplane:poor", "--namespace", NAMESPACE];
    way.kubectl(&[&binding[..], &account].concat())?;
    eventually(DEADLINE, "the rights count", || {
        way.says(&poor, &["no control plane runs in namespace kplane"])
    })?;
    Ok(poor)
}

/// Pods that do not run are named with their state.
fn pods(way: &Way, poor: &Path) -> Result<()> {
    let ips = vec![OWN_ADDRESS];
    let spec = NodeSpec {
        name: "node-1".to_owned(),
        ips,
        pod_cidrs: Vec::new(),
    };
    way.cluster.add_node(&spec, "a")?;
    for name in ["a-slow", "b-ready"] {
        let mut pod = objects::pod(NAMESPACE, name, "x", "node-1");
        pod["metadata"]["labels"] = json!({
            "app.kubernetes.io/name": "kplane",
            "app.kubernetes.io/component": "controlplane",
        });
        way.cluster.api().create(&pod)?;
    }
    way.says(
        poor,
        &[
            "no pod of the control plane runs",
            "a-slow (Pending), b-ready (Pending)",
        ],
    )?;
    way.run_pod("a-slow", "False")?;
    way.run_pod("b-ready", "True")
}

/// Without the authority of the control plane, its certificate cannot be checked.
fn authority(way: &Way, poor: &Path) -> Result<()> {
    let check = "cannot check the certificate of the control plane";
    way.says(
        poor,
        &[
            check,
            "ConfigMap kplane/kplane-ca does not exist",
            "get configmap",
        ],
    )?;
    way.publish(&json!({ "other.crt": "x" }))?;
    way.says(
        poor,
        &[check, "ConfigMap kplane/kplane-ca has no key ca.crt"],
    )?;
    way.publish(&json!({ "ca.crt": "x" }))?;
    way.says(
        poor,
        &["ConfigMap kplane/kplane-ca contains no certificate"],
    )?;
    let kubeconfig: Value = serde_json::from_slice(&fs::read(poor)?)?;
    let file = &kubeconfig["clusters"][0]["cluster"]["certificate-authority"];
    let authority = fs::read_to_string(file.as_str().context("no authority")?)?;
    way.publish(&json!({ "ca.crt": authority }))
}

/// All pods are tried, the ready one first, and each has its reason.
fn forwarding(way: &Way, poor: &Path) -> Result<()> {
    let error = way.error(poor, &[])?;
    let place = |pod: &str| error.find(pod).with_context(|| error.clone());
    ensure!(place("b-ready: ")? < place("a-slow: ")?, "{error}");
    ensure!(
        error.contains(":10250") && error.contains("refused"),
        "{error}"
    );
    // No authority is needed for plain text.
    let plain = way.error(poor, &["--insecure"])?;
    ensure!(plain.contains(":10250"), "{plain}");
    let rules = json!({ "rules": [{ "apiGroups": [""], "resources": ["pods", "configmaps"],
        "verbs": ["get", "list"] }] });
    way.cluster.api().patch("Role", "kplane/kpctl", &rules)?;
    eventually(DEADLINE, "the right is gone", || {
        way.says(
            poor,
            &[
                "does not let you get and create pods/portforward (403",
                RIGHTS,
            ],
        )
    })
}

/// A cluster, and kpctl in its namespace of the network.
struct Way {
    cluster: Cluster,
}

impl Way {
    fn start() -> Result<Self> {
        let cluster = Cluster::start(&Options::default())?;
        Ok(Self { cluster })
    }

    /// What kpctl says when it fails.
    fn error(&self, kubeconfig: &Path, args: &[&str]) -> Result<String> {
        let mut kpctl = Command::new(&product()?.kpctl);
        for name in [
            "KPLANE_SERVER",
            "KPLANE_NAMESPACE",
            "KPLANE_TOKEN_FILE",
            "HTTPS_PROXY",
        ] {
            kpctl.env_remove(name);
        }
        kpctl.arg("status").arg("--kubeconfig").arg(kubeconfig);
        kpctl.args(args).stdin(Stdio::null());
        let output = self.cluster.ns().run(|| Ok(kpctl.output()?))?;
        let text = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(1), "{}: {text}", output.status);
        ensure!(text.lines().count() == 1, "{text}");
        Ok(text)
    }

    fn says(&self, kubeconfig: &Path, words: &[&str]) -> Result<()> {
        let text = self.error(kubeconfig, &[])?;
        ensure!(words.iter().all(|word| text.contains(word)), "{text}");
        Ok(())
    }

    fn kubectl(&self, args: &[&str]) -> Result<String> {
        let mut kubectl = self.cluster.programs().command("kubectl");
        let config = self.cluster.kubeconfig();
        kubectl.arg("--kubeconfig").arg(config).args(args);
        self.cluster.ns().output(kubectl)
    }

    fn manifest(&self) -> Result<String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
        let path = root.context("tests lies in a checkout")?.join(RIGHTS);
        Ok(path.display().to_string())
    }

    /// Lets a pod run, ready or not.
    fn run_pod(&self, name: &str, ready: &str) -> Result<()> {
        let status = json!({
            "phase": "Running", "conditions": [{ "type": "Ready", "status": ready }],
        });
        let key = format!("{NAMESPACE}/{name}");
        self.cluster.api().patch_status("Pod", &key, &status)?;
        Ok(())
    }

    /// Publishes the authority of the control plane.
    fn publish(&self, data: &Value) -> Result<()> {
        let api = self.cluster.api();
        let found = api.get("ConfigMap", "kplane/kplane-ca")?;
        if found.is_some() {
            api.delete("ConfigMap", "kplane/kplane-ca")?;
        }
        api.create(&json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": { "name": "kplane-ca", "namespace": NAMESPACE },
            "data": data,
        }))?;
        Ok::<_, Error>(())
    }
}
