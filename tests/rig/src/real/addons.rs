//! The objects that every real cluster has: CoreDNS, and kube-proxy as kubeadm installs it.

use std::net::IpAddr;

use anyhow::Result;
use kplane_model::Cidr;
use serde_json::{Value, json};

use super::images::{COREDNS, kube_proxy};
use super::options::Mode;

/// The namespace of everything here.
pub(super) const NAMESPACE: &str = "kube-system";
const RBAC: &str = "rbac.authorization.k8s.io";

const COREFILE: &str = "\
.:53 {
  errors
  health
  ready
  kubernetes cluster.local in-addr.arpa ip6.arpa {
    pods insecure
    ttl 5
  }
  cache 5
}
";

/// Returns CoreDNS and the Service `kube-dns` with the given address.
pub(super) fn coredns(address: IpAddr) -> Vec<Value> {
    let labels = json!({ "k8s-app": "kube-dns" });
    let template = json!({
        "serviceAccountName": "coredns",
        "priorityClassName": "system-cluster-critical",
        "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": 1,
        "tolerations": [{ "key": "CriticalAddonsOnly", "operator": "Exists" }],
        "containers": [{
            "name": "coredns",
            "image": COREDNS,
            "imagePullPolicy": "Never",
            "args": ["-conf", "/etc/coredns/Corefile"],
            "ports": [
                { "name": "dns", "containerPort": 53, "protocol": "UDP" },
                { "name": "dns-tcp", "containerPort": 53, "protocol": "TCP" },
            ],
            "readinessProbe": {
                "httpGet": { "path": "/ready", "port": 8181 }, "periodSeconds": 1,
            },
            "volumeMounts": [{ "name": "config", "mountPath": "/etc/coredns" }],
        }],
        "volumes": [{ "name": "config", "configMap": { "name": "coredns" } }],
    });
    let watch = |group: &str, resources: &[&str]| json!({ "apiGroups": [group], "resources": resources, "verbs": ["list", "watch"] });
    vec![
        account("coredns"),
        json!({
            "kind": "ClusterRole",
            "metadata": { "name": "system:coredns" },
            "rules": [
                watch("", &["services", "pods", "namespaces"]),
                watch("discovery.k8s.io", &["endpointslices"]),
            ],
        }),
        binding("system:coredns", "system:coredns", "coredns"),
        config("coredns", &json!({ "Corefile": COREFILE })),
        json!({
            "kind": "Deployment",
            "metadata": { "name": "coredns", "namespace": NAMESPACE, "labels": labels },
            "spec": {
                "replicas": 1,
                "selector": { "matchLabels": labels },
                "template": { "metadata": { "labels": labels }, "spec": template },
            },
        }),
        json!({
            "kind": "Service",
            "metadata": { "name": "kube-dns", "namespace": NAMESPACE, "labels": labels },
            "spec": {
                "clusterIP": address,
                "selector": labels,
                "ports": [
                    { "name": "dns", "port": 53, "protocol": "UDP" },
                    { "name": "dns-tcp", "port": 53, "protocol": "TCP" },
                ],
            },
        }),
    ]
}

/// Returns kube-proxy with the names, mounts and settings that kubeadm gives it (checked against v1.36's
/// `cmd/kubeadm/app/phases/addons/proxy`).
pub(super) fn kube_proxy_objects(settings: &Value, server: &str) -> Result<Vec<Value>> {
    let name = "kube-proxy";
    let labels = json!({ "k8s-app": name });
    Ok(vec![
        account(name),
        binding("kubeadm:node-proxier", "system:node-proxier", name),
        config(name, &kube_proxy_files(settings, server)?),
        json!({
            "kind": "DaemonSet",
            "metadata": { "name": name, "namespace": NAMESPACE, "labels": labels },
            "spec": {
                "selector": { "matchLabels": labels },
                "updateStrategy": { "type": "RollingUpdate" },
                "template": { "metadata": { "labels": labels }, "spec": kube_proxy_pod()? },
            },
        }),
    ])
}

fn kube_proxy_pod() -> Result<Value> {
    Ok(json!({
        "serviceAccountName": "kube-proxy",
        "priorityClassName": "system-node-critical",
        "hostNetwork": true,
        "nodeSelector": { "kubernetes.io/os": "linux" },
        "tolerations": [{ "operator": "Exists" }],
        "containers": [{
            "name": "kube-proxy",
            "image": kube_proxy()?,
            "imagePullPolicy": "IfNotPresent",
            "command": [
                "/usr/local/bin/kube-proxy",
                "--config=/var/lib/kube-proxy/config.conf",
                "--hostname-override=$(NODE_NAME)",
            ],
            "env": [{
                "name": "NODE_NAME",
                "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } },
            }],
            "securityContext": { "privileged": true },
            "volumeMounts": [
                { "name": "kube-proxy", "mountPath": "/var/lib/kube-proxy" },
                { "name": "xtables-lock", "mountPath": "/run/xtables.lock" },
                { "name": "lib-modules", "mountPath": "/lib/modules", "readOnly": true },
            ],
        }],
        "volumes": [
            { "name": "kube-proxy", "configMap": { "name": "kube-proxy" } },
            {
                "name": "xtables-lock",
                "hostPath": { "path": "/run/xtables.lock", "type": "FileOrCreate" },
            },
            { "name": "lib-modules", "hostPath": { "path": "/lib/modules" } },
        ],
    }))
}

/// Returns the configuration of kube-proxy.
pub(super) fn kube_proxy_config(mode: Mode, localhost: bool, pod_ranges: &[Cidr]) -> Value {
    let ranges: Vec<String> = pod_ranges.iter().map(ToString::to_string).collect();
    let mut config = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode.to_string(),
        "bindAddress": "0.0.0.0",
        "metricsBindAddress": "0.0.0.0:10249",
        "clientConnection": { "kubeconfig": "/var/lib/kube-proxy/kubeconfig.conf" },
        "clusterCIDR": ranges.join(","),
        // The limit of connections belongs to the whole machine.
        "conntrack": { "maxPerCore": 0, "min": 0 },
    });
    if localhost && mode == Mode::Nftables {
        config["nodePortAddresses"] = json!(["primary", "localhost"]);
        config["featureGates"] = json!({ "KubeProxyNFTablesLocalhostNodePorts": true });
    }
    config
}

/// Returns the data of the ConfigMap: the program's configuration and its kubeconfig, as JSON, which is YAML, too.
fn kube_proxy_files(config: &Value, server: &str) -> Result<Value> {
    let account = "/var/run/secrets/kubernetes.io/serviceaccount";
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "default", "cluster": {
            "server": server, "certificate-authority": format!("{account}/ca.crt"),
        } }],
        "users": [{ "name": "default", "user": { "tokenFile": format!("{account}/token") } }],
        "contexts": [{ "name": "default", "context": {
            "cluster": "default", "namespace": "default", "user": "default",
        } }],
        "current-context": "default",
    });
    Ok(json!({
        "config.conf": serde_json::to_string_pretty(config)?,
        "kubeconfig.conf": serde_json::to_string_pretty(&kubeconfig)?,
    }))
}

fn account(name: &str) -> Value {
    json!({ "kind": "ServiceAccount", "metadata": { "name": name, "namespace": NAMESPACE } })
}

fn binding(name: &str, role: &str, account: &str) -> Value {
    json!({
        "kind": "ClusterRoleBinding",
        "metadata": { "name": name },
        "roleRef": { "apiGroup": RBAC, "kind": "ClusterRole", "name": role },
        "subjects": [{ "kind": "ServiceAccount", "name": account, "namespace": NAMESPACE }],
    })
}

fn config(name: &str, data: &Value) -> Value {
    json!({
        "kind": "ConfigMap",
        "metadata": { "name": name, "namespace": NAMESPACE, "labels": { "app": name } },
        "data": data,
    })
}
