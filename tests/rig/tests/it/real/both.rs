//! Both families, and kube-proxy in mode iptables.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_rig::client::Probe;
use kplane_rig::real::{self, Balancer, Mode, Options, Proxy, RealCluster};
use kplane_rig::wait::eventually;
use serde_json::json;

/// Proxies take moments to follow, and the machine may be busy.
const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) fn services_of_both_families_are_served_in_mode_iptables() -> Result<()> {
    let cluster = RealCluster::start(&Options {
        dual_stack: true,
        proxy: Proxy::KubeProxy(Mode::Iptables),
        ..Options::default()
    })?;
    let api = cluster.api();
    api.apply(&real::deployment("default", "web", 2))?;
    api.apply(&json!({
        "kind": "Service",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": {
            "type": "NodePort",
            "ipFamilyPolicy": "RequireDualStack",
            "selector": { "app": "web" },
            "ports": [{ "port": 80, "targetPort": 8080, "nodePort": 30080 }],
        },
    }))?;
    let pods = cluster.wait_for_pods("default", "app=web", 2)?;
    for pod in &pods {
        ensure!(real::ips(pod).len() == 2, "{pod}");
    }
    let service = api.get("Service", "default/web")?.context("it is gone")?;
    let ips = real::ips(&service);
    ensure!(ips.len() == 2, "{service}");
    let pod = pods[0]["metadata"]["name"].as_str().unwrap_or_default();
    let pod = format!("default/{pod}");
    for ip in ips {
        let address = std::net::SocketAddr::new(ip, 80).to_string();
        let answer = eventually(DEADLINE, &format!("{address} answers"), || {
            cluster.exec(&pod, &["/pod", "connect", &address])
        })?;
        ensure!(answer.starts_with("web-"), "{answer}");
    }
    let node = cluster.node("node-1")?;
    let client = cluster.client()?;
    for ip in &node.spec().ips {
        let probe = Probe::tcp((*ip, 30080).into());
        let what = format!("the node port of {ip} answers");
        eventually(DEADLINE, &what, || probe.reply(&client))?;
    }
    let images = node.images()?;
    ensure!(images.iter().any(|name| name == real::POD), "{images:?}");
    let tables = node.exec("iptables-save", &["-t", "nat"])?;
    ensure!(tables.contains("KUBE-SERVICES"), "{tables}");
    balanced(&cluster)
}

/// A Service of type LoadBalancer gets addresses of both families, which lead to its Pods until it is deleted.
fn balanced(cluster: &RealCluster) -> Result<()> {
    let _balancer = Balancer::start(cluster)?;
    let api = cluster.api();
    api.apply(&json!({
        "kind": "Service",
        "metadata": { "name": "balanced", "namespace": "default" },
        "spec": {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "ipFamilyPolicy": "RequireDualStack",
            "selector": { "app": "web" },
            "ports": [{ "port": 80, "targetPort": 8080 }],
        },
    }))?;
    let ips = eventually(DEADLINE, "the Service has two addresses", || {
        let service = api.get("Service", "default/balanced")?.context("it is gone")?;
        let ingress = service["status"]["loadBalancer"]["ingress"].as_array();
        let ips: Vec<IpAddr> = ingress
            .into_iter()
            .flatten()
            .filter_map(|it| it["ip"].as_str()?.parse().ok())
            .collect();
        ensure!(ips.len() == 2, "{service}");
        Ok(ips)
    })?;
    for ip in ips {
        let probe = Probe::tcp((ip, 80).into());
        let what = format!("{ip} answers");
        eventually(DEADLINE, &what, || probe.reply(cluster.ns()))?;
    }
    api.delete("Service", "default/balanced")?;
    eventually(DEADLINE, "the load balancer lets go of it", || {
        let left = api.get("Service", "default/balanced")?;
        ensure!(left.is_none(), "it is there");
        Ok(())
    })
}
