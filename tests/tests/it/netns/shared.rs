//! One address for several Services: on ports and protocols of their own, or contested.

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Family, Protocol, Severity};
use serde_json::{Value, json};

use crate::netns::combined::{cluster, reaches};
use kplane_tests::support::cluster::{Cluster, delete};
use kplane_tests::support::objects::{addresses, load_balancer, service, with_pods};
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{At, Client, Question, SILENCE, Seen, Setup, World, ep, svc};

/// Who owns what two Services want: the older.
const OLD: &str = "2025-01-01T00:00:00Z";
const YOUNG: &str = "2026-01-01T00:00:00Z";

/// Each of three Services has its own port or protocol at the one address, its own policy and its
/// own source ranges.
pub(crate) fn a3_a8_services_share_a_load_balancer_address_on_ports_and_protocols() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let shared = addresses(1, At::LoadBalancer).map(|ip| json!({"ip": ip}));
    let sharing = |number, port: u16, protocol: &str, pod| {
        let mut service = load_balancer(number);
        service["spec"]["ports"][0]["port"] = json!(port);
        service["spec"]["ports"][0]["protocol"] = json!(protocol);
        service["status"]["loadBalancer"]["ingress"] = json!(shared);
        with_pods(service, &[pod])
    };
    let mut objects = [
        sharing(1, 80, "TCP", "a"),
        sharing(2, 81, "TCP", "b"),
        sharing(3, 80, "UDP", "c"),
    ];
    objects[1][0]["spec"]["loadBalancerSourceRanges"] = json!(["192.0.2.0/24", "2001:db8::/32"]);
    objects[2][0]["spec"]["externalTrafficPolicy"] = json!("Local");
    for object in &objects {
        cluster.apply(object)?;
    }
    ensure_no_errors(&cluster)?;
    let ipvs = UnderTest::current()? == UnderTest::Ipvs;
    let expect = |port, protocol, pod: Option<&str>| -> Result<()> {
        for family in Family::ALL {
            let mut to = svc(1).address(At::LoadBalancer, family, 1);
            to.set_port(port);
            let question = Question::new(Client::Outside, protocol, to).timeout(SILENCE);
            let seen = question.ask(&world.net)?;
            let hit = match seen {
                Seen::Hit { endpoint, .. } => Some(endpoint),
                Seen::Silent => None,
                // D4: ports of Services' addresses that nobody has are closed.
                Seen::Refused if ipvs => None,
                other => anyhow::bail!("{question}: {other}"),
            };
            let wanted = pod.map(|pod| ep(pod).address(family));
            ensure!(hit == wanted, "{question}: {hit:?}, not {wanted:?}");
        }
        Ok(())
    };
    expect(80, Protocol::Tcp, Some("a"))?;
    expect(81, Protocol::Tcp, None).context("outside of the ranges of its Service")?;
    expect(80, Protocol::Udp, None).context("its only endpoint is on node-2")?;
    // One goes, another changes: the third does not notice.
    cluster.change(objects[0].iter().map(delete).collect::<Result<_>>()?)?;
    objects[1][0]["spec"]["loadBalancerSourceRanges"] = json!([]);
    objects[2] = sharing(3, 80, "UDP", "b");
    cluster.apply(&objects[1])?;
    cluster.apply(&objects[2])?;
    expect(81, Protocol::Tcp, Some("b"))?;
    expect(80, Protocol::Udp, Some("b"))?;
    expect(80, Protocol::Tcp, None).context("nobody's")
}

/// Two Services with one of a kind of address: the older is served there, the younger told and
/// served everywhere else; when the older goes, the younger takes over.
fn contested(at: At, contest: fn(&mut Value)) -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let wanting = |number, created: &str, pod| {
        let mut service = service(number);
        service["metadata"]["creationTimestamp"] = json!(created);
        contest(&mut service);
        with_pods(service, &[pod])
    };
    let (young, old) = (wanting(1, YOUNG, "a"), wanting(2, OLD, "b"));
    // The younger is there first, and keeps nothing by that.
    cluster.apply(&young)?;
    ensure_no_errors(&cluster)?;
    reaches(&world.net, Client::Outside, 1, at, &["a"])?;
    cluster.apply(&old)?;
    reaches(&world.net, Client::Outside, 1, at, &["b"])?;
    reaches(&world.net, Client::PodHere, 1, At::ClusterIp, &["a"])?;
    reaches(&world.net, Client::PodHere, 2, At::ClusterIp, &["b"])?;
    let issues = cluster.issues();
    let reported = |family: Family| {
        issues.iter().any(|issue| {
            let owner = format!("belongs to test/svc-2:web/TCP ({family})");
            issue.object.name == "svc-1" && issue.reason.contains(&owner)
        })
    };
    ensure!(
        Family::ALL.into_iter().all(reported) && issues.len() == 2,
        "{issues:?}"
    );
    let failures = cluster.failures();
    ensure!(
        failures.is_empty(),
        "no agent sees a conflict: {failures:?}"
    );

    cluster.change(old.iter().map(delete).collect::<Result<_>>()?)?;
    ensure_no_errors(&cluster)?;
    reaches(&world.net, Client::Outside, 1, at, &["a"])
}

pub(crate) fn a5_of_two_services_with_an_external_ip_the_older_is_served_and_the_other_told()
-> Result<()> {
    contested(At::ExternalIp, |service| {
        service["spec"]["externalIPs"] = json!(addresses(1, At::ExternalIp));
    })
}

pub(crate) fn a6_of_two_services_with_a_load_balancer_address_the_older_is_served_and_the_other_told()
-> Result<()> {
    contested(At::LoadBalancer, |service| {
        let ingress = addresses(1, At::LoadBalancer).map(|ip| json!({"ip": ip}));
        service["spec"]["type"] = json!("LoadBalancer");
        service["status"] = json!({"loadBalancer": {"ingress": ingress}});
    })
}

pub(crate) fn a21_of_two_services_with_a_node_port_the_older_is_served_and_the_other_told()
-> Result<()> {
    contested(At::NodePort, |service| {
        service["spec"]["type"] = json!("NodePort");
        service["spec"]["ports"][0]["nodePort"] = json!(svc(1).node_port());
    })
}

/// An externalIP of an older Service does not take a ClusterIP away (CVE-2020-8554).
pub(crate) fn a5_an_external_ip_never_shadows_a_cluster_ip() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let mut thief = service(2);
    thief["metadata"]["creationTimestamp"] = json!(OLD);
    thief["spec"]["externalIPs"] = json!(addresses(1, At::ClusterIp));
    cluster.apply(&with_pods(thief, &["b"]))?;
    let mut victim = service(1);
    victim["metadata"]["creationTimestamp"] = json!(YOUNG);
    cluster.apply(&with_pods(victim, &["a"]))?;
    reaches(&world.net, Client::PodHere, 1, At::ClusterIp, &["a"])?;
    // Besides, it is warned of an address in the range of ClusterIPs.
    let mut issues = cluster.issues();
    issues.retain(|issue| issue.severity == Severity::Error);
    ensure!(
        issues.iter().all(|i| i.object.name == "svc-2") && issues.len() == 2,
        "{issues:?}"
    );
    Ok(())
}

/// What kube-proxy skips is not in the kernel: headless, ExternalName, another's Services (A1); an
/// address of a family that the Service does not have (A2).
pub(crate) fn a1_a2_what_is_not_ours_is_left_alone() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let mut external_name = service(1);
    external_name["spec"]["type"] = json!("ExternalName");
    external_name["spec"]["externalName"] = json!("example.org");
    let mut others = service(2);
    others["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": ""});
    let mut single = service(3);
    single["spec"]["ipFamilies"] = json!(["IPv4"]);
    single["spec"]["clusterIPs"] = json!([addresses(3, At::ClusterIp)[0]]);
    single["spec"]["externalIPs"] = json!(addresses(3, At::ExternalIp));
    for service in [external_name, others, single] {
        cluster.apply(&with_pods(service, &["a"]))?;
    }
    let hits = |number, at, family| served(&world, number, at, family);
    for family in Family::ALL {
        ensure!(
            !hits(1, At::ClusterIp, family)?,
            "an ExternalName is served"
        );
        ensure!(
            !hits(2, At::ClusterIp, family)?,
            "another's Service is served"
        );
        for at in [At::ClusterIp, At::ExternalIp] {
            let seen = hits(3, at, family)?;
            ensure!(seen == (family == Family::V4), "{at:?} in {family}: {seen}");
        }
    }
    Ok(())
}

fn served(world: &World, number: u16, at: At, family: Family) -> Result<bool> {
    let to = svc(number).address(at, family, 1);
    let question = Question::new(Client::PodHere, Protocol::Tcp, to).timeout(SILENCE);
    Ok(matches!(question.ask(&world.net)?, Seen::Hit { .. }))
}

fn ensure_no_errors(cluster: &Cluster) -> Result<()> {
    let issues = cluster.issues();
    let error = issues.iter().find(|i| i.severity == Severity::Error);
    ensure!(error.is_none(), "{error:?}");
    Ok(())
}
