//! The pod that removes kplane's rules from one node. It is made of the agents' own DaemonSet, so that it has their
//! image, configuration and privileges.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{
    Container, HostPathVolumeSource, Pod, PodSpec, SecurityContext, Toleration, Volume, VolumeMount,
};
use serde_json::json;

/// Labels of these pods, as a selector.
pub(crate) const SELECTOR: &str =
    "app.kubernetes.io/name=kplane,app.kubernetes.io/component=cleanup";

/// Longest name of a pod that fits into a label of DNS.
const MAX_NAME: usize = 63;

/// The folder of the agents' cache, in their pods and by default on the host.
const CACHE: &str = "/var/lib/kplane";

/// The lock of the programs of iptables, which an image may have.
const LOCK: &str = "/run/xtables.lock";

/// The path of the cache folder's parent in a pod that removes the folder itself.
const HOST: &str = "/host";

/// The task of a cleanup pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// kube-proxy takes the node over: kplane's rules go once those of kube-proxy are there.
    Return,
    /// kplane leaves the cluster: the folder of the cache goes as well.
    Uninstall {
        /// Whether kube-proxy serves the node. In modes iptables and ipvs the rules are its own then, and stay.
        kube_proxy: bool,
    },
}

/// The program that cleans up.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Program {
    /// As the agents run it.
    OfAgents(Box<DaemonSet>),
    /// An image, with its default configuration.
    Image(String),
}

impl Program {
    /// Returns the program with another image.
    pub(crate) fn with_image(mut self, image: Option<&str>) -> Self {
        let Some(image) = image.map(ToOwned::to_owned) else {
            return self;
        };
        match &mut self {
            Self::OfAgents(set) => {
                let spec = set.spec.template.spec.as_mut();
                let container = spec.and_then(|spec| spec.containers.first_mut());
                if let Some(container) = container {
                    container.image = Some(image);
                }
            }
            Self::Image(ours) => *ours = image,
        }
        self
    }
}

/// Returns the name of a node's cleanup pod.
pub(crate) fn name(node: &str) -> String {
    pod_name("kplane-cleanup", node)
}

/// Returns the name of a node's pod for a task.
pub(crate) fn pod_name(task: &str, node: &str) -> String {
    let name = format!("{task}-{}", node.replace('.', "-"));
    if name.len() <= MAX_NAME && !node.contains('.') {
        return name;
    }
    // Names that are cut or changed stay different by their hash.
    let hash = format!("-{:016x}", fnv(node));
    let head = name.floor_char_boundary(MAX_NAME - hash.len()).min(name.len());
    format!("{}{hash}", &name[..head])
}

/// Returns the pod; `None` if the DaemonSet has no container.
pub(crate) fn pod(program: &Program, purpose: Purpose, namespace: &str, node: &str) -> Option<Pod> {
    let mut spec = match program {
        Program::OfAgents(set) => {
            let template = set.spec.template.spec.clone()?;
            PodSpec {
                containers: vec![template.containers.into_iter().next()?],
                host_network: template.host_network,
                image_pull_secrets: template.image_pull_secrets,
                priority_class_name: template.priority_class_name,
                security_context: template.security_context,
                service_account_name: template.service_account_name,
                volumes: template.volumes,
                ..PodSpec::default()
            }
        }
        Program::Image(image) => PodSpec {
            containers: vec![of_image(image)],
            host_network: Some(true),
            volumes: Some(vec![host_volume("lock", LOCK, "FileOrCreate")]),
            ..PodSpec::default()
        },
    };
    spec.node_name = Some(node.to_owned());
    spec.restart_policy = Some("OnFailure".to_owned());
    spec.automount_service_account_token = Some(false);
    spec.enable_service_links = Some(false);
    spec.tolerations = Some(vec![Toleration {
        operator: Some("Exists".to_owned()),
        ..Toleration::default()
    }]);
    without_identity(&mut spec);
    let mut flags = vec!["--cleanup".to_owned()];
    let (kube_proxy, leaves) = match purpose {
        Purpose::Return => (true, false),
        Purpose::Uninstall { kube_proxy } => (kube_proxy, true),
    };
    if kube_proxy {
        flags.push("--after-kube-proxy".to_owned());
    }
    if leaves {
        flags.push(format!("--cache-dir={}", mount_host(&mut spec)));
    }
    if let Some(container) = spec.containers.first_mut() {
        instead_of_serving(container, flags);
    }
    if matches!(program, Program::Image(_)) && leaves && !kube_proxy {
        of_every_mode(&mut spec);
    }
    let mut pod = Pod {
        spec: Some(spec),
        ..Pod::default()
    };
    pod.metadata.name = Some(name(node));
    pod.metadata.namespace = Some(namespace.to_owned());
    let labels = [
        ("app.kubernetes.io/name", "kplane"),
        ("app.kubernetes.io/component", "cleanup"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()));
    pod.metadata.labels = Some(BTreeMap::from(labels));
    Some(pod)
}

/// Adds the flags of a cleanup. The agent's other flags stay: they say which backend and which settings to remove.
fn instead_of_serving(container: &mut Container, flags: Vec<String>) {
    container.liveness_probe = None;
    container.readiness_probe = None;
    container.startup_probe = None;
    container.lifecycle = None;
    container.ports = None;
    container.termination_message_policy = Some("FallbackToLogsOnError".to_owned());
    let args = container.args.get_or_insert_default();
    args.extend(flags);
}

/// Lets the pod remove what has kube-proxy's names, too, as the rules of modes iptables and ipvs do: the mode is unknown.
/// Beside a kube-proxy of which kpctl does not know, kplane's own names go all the same, and the pod fails.
fn of_every_mode(spec: &mut PodSpec) {
    let mut own = spec.containers.clone();
    for (container, own) in spec.containers.iter_mut().zip(&mut own) {
        own.name = "own-names".to_owned();
        let args = container.args.get_or_insert_default();
        args.push("--cleanup-kube-proxy".to_owned());
    }
    spec.init_containers = Some(own);
}

/// Removes volumes with credentials: a cleanup talks to no other program, and ConfigMaps of the control plane may be
/// gone.
fn without_identity(spec: &mut PodSpec) {
    let volumes = spec.volumes.get_or_insert_default();
    let (identity, others): (Vec<Volume>, Vec<Volume>) =
        volumes.drain(..).partition(|volume| volume.projected.is_some());
    *volumes = others;
    for container in &mut spec.containers {
        let mounts = container.volume_mounts.get_or_insert_default();
        mounts.retain(|mount| identity.iter().all(|volume| volume.name != mount.name));
    }
}

/// Mounts the parent of the cache folder, because a mounted folder itself cannot be removed. Returns the place of the
/// folder in the pod.
fn mount_host(spec: &mut PodSpec) -> String {
    let mounts = spec.containers.iter().flat_map(|container| &container.volume_mounts);
    let cache = mounts
        .flatten()
        .find(|mount| mount.mount_path == CACHE)
        .map(|mount| mount.name.clone());
    let volumes = spec.volumes.get_or_insert_default();
    let at = volumes.iter().position(|volume| Some(&volume.name) == cache.as_ref());
    let volume = at.map(|at| volumes.remove(at));
    let folder = volume
        .and_then(|volume| volume.host_path)
        .map_or_else(|| CACHE.to_owned(), |host| host.path);
    let (parent, name) = folder.trim_end_matches('/').rsplit_once('/').unwrap_or(("", "kplane"));
    let parent = if parent.is_empty() { "/" } else { parent };
    volumes.push(host_volume("host", parent, "Directory"));
    for container in &mut spec.containers {
        let mounts = container.volume_mounts.get_or_insert_default();
        mounts.retain(|mount| Some(&mount.name) != cache.as_ref());
        mounts.push(VolumeMount {
            name: "host".to_owned(),
            mount_path: HOST.to_owned(),
            ..VolumeMount::default()
        });
    }
    format!("{HOST}/{name}")
}

fn host_volume(name: &str, path: &str, kind: &str) -> Volume {
    Volume {
        name: name.to_owned(),
        host_path: Some(HostPathVolumeSource {
            path: path.to_owned(),
            type_: Some(kind.to_owned()),
        }),
        ..Volume::default()
    }
}

/// Returns the FNV-1a hash of a text, which is the same in all versions of kpctl.
fn fnv(text: &str) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(PRIME);
    text.bytes().fold(OFFSET, mix)
}

fn of_image(image: &str) -> Container {
    let context = json!({
        "capabilities": { "drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW", "DAC_OVERRIDE"] },
        "readOnlyRootFilesystem": true, "runAsUser": 0, "allowPrivilegeEscalation": false,
    });
    Container {
        name: "cleanup".to_owned(),
        image: Some(image.to_owned()),
        security_context: serde_json::from_value::<SecurityContext>(context).ok(),
        volume_mounts: Some(vec![VolumeMount {
            name: "lock".to_owned(),
            mount_path: LOCK.to_owned(),
            ..VolumeMount::default()
        }]),
        ..Container::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn agents() -> Program {
        let set = json!({ "spec": { "selector": {}, "template": { "spec": {
            "hostNetwork": true,
            "serviceAccountName": "kplane-nodeagent",
            "initContainers": [{ "name": "init" }],
            "containers": [{
                "name": "agent", "image": "agent:1", "args": ["--config=/etc/kplane/config.conf"],
                "readinessProbe": {},
                "volumeMounts": [
                    { "name": "cache", "mountPath": "/var/lib/kplane" },
                    { "name": "config", "mountPath": "/etc/kube-proxy" },
                    { "name": "identity", "mountPath": "/etc/kplane" },
                ],
            }],
            "volumes": [
                { "name": "cache", "hostPath": { "path": "/srv/cache/kplane-1" } },
                { "name": "identity", "projected": { "sources": [] } },
                { "name": "config", "configMap": { "name": "x" } },
            ],
        } } } });
        Program::OfAgents(Box::new(serde_json::from_value(set).unwrap()))
    }

    fn made(program: &Program, purpose: Purpose) -> Value {
        serde_json::to_value(pod(program, purpose, "kplane", "node-1").unwrap()).unwrap()
    }

    #[test]
    fn the_pod_is_the_agents_with_other_work() {
        let pod = made(&agents(), Purpose::Return);
        let container = &pod["spec"]["containers"][0];
        let args = json!([
            "--config=/etc/kplane/config.conf",
            "--cleanup",
            "--after-kube-proxy"
        ]);
        assert_eq!(container["args"], args);
        assert_eq!(container["image"], "agent:1");
        assert!(container["readinessProbe"].is_null());
        assert!(pod["spec"]["initContainers"].is_null());
        assert_eq!(pod["spec"]["nodeName"], "node-1");
        assert_eq!(pod["metadata"]["name"], "kplane-cleanup-node-1");
        let other = made(&agents().with_image(Some("agent:2")), Purpose::Return);
        let other = &other["spec"]["containers"][0];
        assert_eq!(
            (&other["image"], &other["args"]),
            (&json!("agent:2"), &args)
        );
    }

    #[test]
    fn the_cache_folder_goes_with_its_parent_mounted() {
        let alone = Purpose::Uninstall { kube_proxy: false };
        let pod = made(&agents(), alone);
        let volumes: Vec<&Value> = pod["spec"]["volumes"].as_array().unwrap().iter().collect();
        let paths = volumes.iter().map(|volume| &volume["hostPath"]["path"]);
        assert_eq!(
            paths.collect::<Vec<_>>(),
            [&Value::Null, &json!("/srv/cache")]
        );
        let container = &pod["spec"]["containers"][0];
        let mounts = container["volumeMounts"].as_array().unwrap();
        assert!(
            mounts.iter().all(|mount| mount["name"] != "cache"),
            "{mounts:?}"
        );
        let args = container["args"].as_array().unwrap();
        assert_eq!(args[1..], ["--cleanup", "--cache-dir=/host/kplane-1"]);
        let gone = |mount: &Value| mount["name"] != "identity";
        assert!(mounts.iter().all(gone), "{mounts:?}");
        let bare = made(&Program::Image("agent:2".to_owned()), alone);
        assert_eq!(bare["spec"]["containers"][0]["image"], "agent:2");
        assert_eq!(bare["spec"]["volumes"][1]["hostPath"]["path"], "/var/lib");
        assert_eq!(bare["spec"]["hostNetwork"], true);
    }

    /// After `helm uninstall`, no object says which mode the agents had.
    #[test]
    fn an_image_alone_removes_the_rules_of_every_mode() {
        let image = Program::Image("agent:2".to_owned());
        let args = |kube_proxy| {
            let pod = made(&image, Purpose::Uninstall { kube_proxy });
            let of = |kind: &str| pod["spec"][kind][0]["args"].clone();
            [of("initContainers"), of("containers")]
        };
        let cache = "--cache-dir=/host/kplane";
        let own = json!(["--cleanup", cache]);
        let all = json!(["--cleanup", cache, "--cleanup-kube-proxy"]);
        assert_eq!(args(false), [own, all]);
        // A kube-proxy has taken over what has its names.
        let beside = json!(["--cleanup", "--after-kube-proxy", cache]);
        assert_eq!(args(true), [Value::Null, beside]);
    }

    /// Without the flag, an agent in mode iptables refuses to clean up beside a kube-proxy.
    #[test]
    fn beside_kube_proxy_its_rules_stay() {
        let pod = made(&agents(), Purpose::Uninstall { kube_proxy: true });
        let args = pod["spec"]["containers"][0]["args"].as_array().unwrap();
        let expected = [
            "--cleanup",
            "--after-kube-proxy",
            "--cache-dir=/host/kplane-1",
        ];
        assert_eq!(args[1..], expected);
    }

    #[test]
    fn names_are_labels_of_dns_and_differ() {
        let long = "n".repeat(100);
        let names = ["a.b", "a-b", &long, &format!("{long}x")].map(name);
        for name in &names {
            assert!(name.len() <= MAX_NAME && !name.contains('.'), "{name}");
        }
        let different: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(different.len(), 4);
    }
}
