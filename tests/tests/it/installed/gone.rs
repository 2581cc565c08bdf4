//! What is left of kplane in a cluster, and on its nodes.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use kplane_tests::real::RealCluster;
use kplane_tests::wait::eventually;
use serde_json::Value;

use crate::installed::support::{DEADLINE, step};
use crate::installed::typed::typed_with;

/// Prints what a Service proxy may leave on a node, one a line: tables, chains and jumps to them, sets, devices with their
/// addresses, files, programs. Devices of Pods come and go, and are left out, as are link-local addresses, which a reboot
/// changes.
const SHOW: &str = r#"
    nft list tables
    for family in iptables ip6tables; do
        $family-save | grep -e '^:KUBE' -e '^-A [A-Z]* .*-j KUBE' -e kplane |
            sed 's/ \[.*//' | sort | uniq -c | sed "s/^/$family/"
    done
    ipset list -name | sed 's/^/set /'
    ip -brief address show | grep -v -e ^veth | sed 's/@if[0-9]*//' |
        awk '{ print "device", $1; for (i = 3; i <= NF; i++) if ($i !~ /^fe80:/) print $1, $i }'
    find /var/lib/kplane* /run/kplane* /etc/kplane* /opt/kplane*
    for family in -4 -6; do
        ip $family rule list | grep -v -e 'lookup local' -e 'lookup main' -e 'lookup default' | sed "s/^/rule $family /"
        ip $family route list table all | grep ' table 27504 ' | sed "s/^/route $family /"
    done
    pgrep -l '^kp-'
    true"#;

/// Chains of iptables with a name per Service or endpoint: they differ between two moments.
const OF_SERVICES: [&str; 5] = [
    "KUBE-SVC-",
    "KUBE-SEP-",
    "KUBE-SVL-",
    "KUBE-EXT-",
    "KUBE-FW-",
];

/// The traces of Service proxies: on each node, and of kplane in the API.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Traces {
    nodes: BTreeMap<String, BTreeSet<String>>,
    objects: BTreeSet<String>,
    /// Labels and taints of each Node, without taints of controllers.
    marks: BTreeMap<String, (Value, Vec<Value>)>,
    /// Labels and specification of kube-proxy's DaemonSet.
    kube_proxy: Option<(Value, Value)>,
}

impl Traces {
    /// Collects the traces before kplane is there. Nodes see the files of this machine, where other tests run agents: what
    /// those left would hide what kplane leaves on a node.
    pub(crate) fn before(cluster: &RealCluster) -> Result<Self> {
        for node in cluster.nodes() {
            node.exec("rm", &["-rf", "/var/lib/kplane", "/run/kplane"])?;
        }
        let before = Self::of(cluster)?;
        let mut traces = before.nodes.values().flatten();
        let ours = traces.find(|trace| trace.contains("kplane"));
        ensure!(ours.is_none(), "{ours:?} before kplane is there");
        Ok(before)
    }

    /// Collects the traces.
    pub(crate) fn of(cluster: &RealCluster) -> Result<Self> {
        let mut nodes = BTreeMap::new();
        for node in cluster.nodes() {
            let shown = node.exec("sh", &["-c", SHOW])?;
            let lines = shown.lines().map(|line| line.trim().to_owned());
            let of_services = |line: &String| OF_SERVICES.iter().any(|it| line.contains(it));
            let lines = lines.filter(|line| !of_services(line));
            nodes.insert(node.name().to_owned(), lines.collect());
        }
        let mark = |node: &Value| {
            let metadata = &node["metadata"];
            let taints = node["spec"]["taints"]
                .as_array()
                .into_iter()
                .flatten()
                .filter(|taint| !taint.to_string().contains("node.kubernetes.io/"));
            let name = metadata["name"].as_str().unwrap_or_default().to_owned();
            (
                name,
                (metadata["labels"].clone(), taints.cloned().collect()),
            )
        };
        let api = cluster.api();
        let kube_proxy = api.get("DaemonSet", "kube-system/kube-proxy")?;
        Ok(Self {
            nodes,
            objects: objects(cluster)?,
            marks: api.list("Node", None)?.iter().map(mark).collect(),
            kube_proxy: kube_proxy
                .map(|set| (set["metadata"]["labels"].clone(), set["spec"].clone())),
        })
    }
}

/// Wants traces of kplane on all nodes and in the API: those that [`removed`] must not find.
pub(crate) fn seen(cluster: &RealCluster) -> Result<()> {
    let now = Traces::of(cluster)?;
    for (node, traces) in &now.nodes {
        let shows = traces.iter().any(|trace| trace.contains("kplane"));
        ensure!(shows, "no trace of kplane on {node}: {traces:?}");
    }
    ensure!(!now.objects.is_empty(), "no object of kplane");
    Ok(())
}

/// Removes kplane in the documented way, and wants the cluster to be as it was.
pub(crate) fn removed(cluster: &RealCluster, before: &Traces) -> Result<()> {
    let said = step("  kpctl uninstall", || {
        typed_with(cluster, "kpctl uninstall", &["--yes"])
    })?;
    for node in before.nodes.keys() {
        let line = format!("rules and cache of {node}");
        ensure!(said.contains(&line), "{said}");
    }
    step("  helm uninstall", || {
        let uninstall = "helm uninstall kplane --namespace kplane";
        typed_with(cluster, uninstall, &["--wait"])
    })?;
    step("  the namespace deleted", || {
        let delete = "kubectl delete namespace kplane";
        typed_with(cluster, delete, &["--timeout=2m"])
    })?;
    eventually(DEADLINE, "nothing is left of kplane", || {
        let after = Traces::of(cluster)?;
        for (node, now) in &after.nodes {
            let then = &before.nodes[node];
            let differ: Vec<_> = now.symmetric_difference(then).collect();
            ensure!(differ.is_empty(), "{node} has changed: {differ:?}");
        }
        ensure!(after == *before, "before: {before:?}\nafter: {after:?}");
        Ok(())
    })
}

/// Returns the objects of any kind that kplane's name is in. Events are left out, which the API server forgets.
fn objects(cluster: &RealCluster) -> Result<BTreeSet<String>> {
    let list = ["api-resources", "--verbs=list", "--output=name"];
    let kinds = cluster.kubectl(&list)?;
    let kinds: Vec<&str> = kinds.lines().filter(|kind| !kind.starts_with("events")).collect();
    ensure!(kinds.len() > 20, "{kinds:?}");
    let kinds = kinds.join(",");
    let all = cluster.kubectl(&["get", &kinds, "--all-namespaces", "--output=name"])?;
    Ok(all.lines().filter(|name| name.contains("kplane")).map(str::to_owned).collect())
}
