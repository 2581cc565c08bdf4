//! What users of other proxies reported about Services, with the right answers, from objects to packets.
//!
//! | report | test |
//! |---|---|
//! | kubernetes 135334: a Pod is in two slices while the controller moves it | `endpoints_in_two_slices_serve_as_their_conditions_say` |
//! | kubernetes 117193: conditions that disagree, or are missing | the same |
//! | kubernetes 105987, 111929, talos 12802: slices of several managers, before their Service | `slices_of_two_managers_precede_their_service` |
//! | kubernetes 119791: Services share a load balancer's address | `a_shared_address_has_source_ranges_for_one_service` |
//! | kubernetes 20092, 65574: one number for several protocols | `one_node_port_number_serves_three_protocols` |
//! | kubernetes 73157, 80297, 88316: addresses of the other family | `addresses_of_the_other_family_disturb_nothing` |
//! | kubernetes 63617, 54885: a health check port that is a node port | `a_health_check_port_that_is_a_node_port_disturbs_nothing` |
//! | traefik 13481: a port without endpoints beside one with some | `combined::a30_nothing_but_ready_endpoints_of_ports` |
//! | antrea 1570: a sticky client's endpoint drains | `affinity::a11_an_endpoint_that_goes_..` |
//! | kubernetes 89263: preStop hooks of many Pods at once | `prestop::hooks_are_answered_at_their_bound_at_the_latest` |

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use kplane_model::{Family, Protocol};
use kplane_tests::support::cluster::delete;
use kplane_tests::support::objects::{
    addresses, load_balancer, service, slices, with_endpoints, with_pods,
};
use kplane_tests::support::{At, Client, Seen, Setup, ask, ep, hit, refused, svc};
use serde_json::{Value, json};

use super::combined::{cluster, reaches};

/// Returns slices of another manager of a Service.
fn further_slices(service: &Value, pods: &[(&str, Value)]) -> Vec<Value> {
    let mut further = slices(service, pods);
    for slice in &mut further {
        let name = format!(
            "z-{}",
            slice["metadata"]["name"].as_str().unwrap_or_default()
        );
        slice["metadata"]["name"] = json!(name);
    }
    further
}

fn conditions(ready: bool, serving: bool, terminating: bool) -> Value {
    json!({"conditions": {"ready": ready, "serving": serving, "terminating": terminating}})
}

pub(crate) fn endpoints_in_two_slices_serve_as_their_conditions_say() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let (ready, draining) = (conditions(true, true, false), conditions(false, true, true));
    let mut objects = with_endpoints(service(1), &[("a", ready.clone())]);
    objects.extend(further_slices(
        &service(1),
        &[("a", draining.clone()), ("b", ready.clone())],
    ));
    objects.extend(with_endpoints(service(2), &[("a", draining)]));
    objects.extend(further_slices(&service(2), &[("a", ready)]));
    objects.extend(with_endpoints(
        service(3),
        &[("c", json!({"conditions": {}}))],
    ));
    objects.extend(with_endpoints(
        service(4),
        &[("c", conditions(false, true, false))],
    ));
    cluster.apply(&objects)?;
    for client in [Client::PodHere, Client::PodThere] {
        reaches(&world.net, client, 1, At::ClusterIp, &["a", "b"])?;
        reaches(&world.net, client, 2, At::ClusterIp, &["a"])?;
        reaches(&world.net, client, 3, At::ClusterIp, &["c"])?;
        let to = svc(4).address(At::ClusterIp, Family::V4, 1);
        refused(&world.net, client, Protocol::Tcp, to)?;
    }
    Ok(())
}

pub(crate) fn slices_of_two_managers_precede_their_service() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let stale = slices(&service(1), &[("a", json!({}))]);
    cluster.apply(&stale)?;
    cluster.apply(&further_slices(&service(1), &[("c", json!({}))]))?;
    cluster.apply(&[service(1)])?;
    reaches(&world.net, Client::PodHere, 1, At::ClusterIp, &["a", "c"])?;
    cluster.change(stale.iter().map(delete).collect::<Result<_>>()?)?;
    reaches(&world.net, Client::PodHere, 1, At::ClusterIp, &["c"])
}

pub(crate) fn a_shared_address_has_source_ranges_for_one_service() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let mut closed = load_balancer(2);
    closed["spec"]["ports"][0]["port"] = json!(7001);
    closed["status"]["loadBalancer"]["ingress"] =
        json!(addresses(1, At::LoadBalancer).map(|ip| json!({"ip": ip})));
    for (ranges, is_open) in [
        (["203.0.113.0/24", "2001:db8::/64"], false),
        (["172.30.0.3/32", "fd30::3/128"], true),
    ] {
        closed["spec"]["loadBalancerSourceRanges"] = json!(ranges);
        cluster.apply(&with_pods(load_balancer(1), &["a"]))?;
        cluster.apply(&with_pods(closed.clone(), &["c"]))?;
        reaches(&world.net, Client::Outside, 1, At::LoadBalancer, &["a"])?;
        for family in Family::ALL {
            let shared = svc(1).address(At::LoadBalancer, family, 1).ip();
            let to = SocketAddr::new(shared, 7001);
            let seen = ask(&world.net, Client::Outside, Protocol::Tcp, to)?;
            let is_hit = matches!(seen, Seen::Hit { .. });
            ensure!(
                is_hit == is_open && !seen.is_refused(),
                "{ranges:?}: {to}: {seen}"
            );
        }
    }
    Ok(())
}

pub(crate) fn one_node_port_number_serves_three_protocols() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let all = [
        (Protocol::Tcp, "c"),
        (Protocol::Udp, "a"),
        (Protocol::Sctp, "c"),
    ];
    for (number, (protocol, pod)) in (1..).zip(all) {
        let mut service = load_balancer(number);
        service["spec"]["ports"][0]["protocol"] = json!(protocol.to_string());
        service["spec"]["ports"][0]["nodePort"] = json!(svc(1).node_port());
        if protocol == Protocol::Udp {
            service["spec"]["externalTrafficPolicy"] = json!("Local");
        }
        cluster.apply(&with_pods(service, &[pod]))?;
    }
    for family in Family::ALL {
        let to = svc(1).address(At::NodePort, family, 1);
        for (protocol, pod) in all {
            let seen = ask(&world.net, Client::Outside, protocol, to)?;
            let Seen::Hit { endpoint, source } = seen else {
                anyhow::bail!("{protocol} to {to}: {seen}");
            };
            let is_masqueraded = Client::Outside.is_masqueraded(source);
            ensure!(
                endpoint.ip() == ep(pod).address(family).ip()
                    && is_masqueraded == (protocol != Protocol::Udp),
                "{protocol} to {to}: {endpoint} from {source}"
            );
        }
    }
    Ok(())
}

pub(crate) fn addresses_of_the_other_family_disturb_nothing() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let mut single = load_balancer(1);
    let [v4, _] = addresses(1, At::ClusterIp);
    single["spec"]["clusterIPs"] = json!([v4]);
    single["spec"]["ipFamilies"] = json!(["IPv4"]);
    single["spec"]["externalIPs"] = json!(addresses(1, At::ExternalIp));
    cluster.apply(&with_pods(single, &["a"]))?;
    for at in [At::LoadBalancer, At::ExternalIp, At::ClusterIp] {
        let to = svc(1).address(at, Family::V4, 1);
        hit(&world.net, Client::Outside, Protocol::Tcp, to)?;
    }
    Ok(())
}

pub(crate) fn a_health_check_port_that_is_a_node_port_disturbs_nothing() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let mut local = load_balancer(2);
    local["spec"]["externalTrafficPolicy"] = json!("Local");
    local["spec"]["healthCheckNodePort"] = json!(svc(1).node_port());
    cluster.apply(&with_pods(load_balancer(1), &["c"]))?;
    cluster.apply(&with_pods(local, &["a"]))?;
    reaches(&world.net, Client::Outside, 1, At::NodePort, &["c"])?;
    reaches(&world.net, Client::Outside, 2, At::NodePort, &["a"])
}
