//! The userspace proxy behind a chain of iptables with a lease, as the real program (U51).

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use kplane_rig::kernel::in_netns;
use kplane_rig::link::Route;
use kplane_rig::netns::NetNs;
use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::agent::{Agent, binary};
use super::proxied::{PATIENCE, eventually, manifests, send_back, signal, start};

/// Addresses of the node: at the first ones are servers, and nothing listens at the second ones.
const NODE: [IpAddr; 2] = [v4([172, 20, 0, 1]), v6(1)];
const DEAD: [IpAddr; 2] = [v4([172, 20, 0, 2]), v6(2)];
/// Addresses of a client behind a link.
const CLIENT: [IpAddr; 2] = [v4([172, 20, 0, 254]), v6(0xfe)];
/// ClusterIPs.
const WEB: [IpAddr; 2] = [
    v4([10, 96, 0, 10]),
    IpAddr::V6(Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, 0x10)),
];

/// Node ports of TCP and of UDP.
const PORTS: [u16; 2] = [30_080, 30_081];

/// The port of servers.
const SERVER: u16 = 8080;

/// Connections to a Service half of whose endpoints are dead: without another attempt, one of them fails almost certainly.
const CONNECTIONS: usize = 12;

/// Longest time for which a lease may hold after a crash, with the time that a busy machine needs.
const LEASE: Duration = Duration::from_secs(4);

/// Time after which a datagram counts as lost, and a connection as hanging.
const LOST: Duration = Duration::from_secs(1);

const NOTHING: [&str; 0] = [];

const BY_IPTABLES: [&str; 4] = ["--backend", "userspace", "--userspace-capture", "iptables"];
const ASKS: &str = "annotations: {kplane.io/data-path: userspace}";

const fn v4([a, b, c, d]: [u8; 4]) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(a, b, c, d))
}

const fn v6(last: u16) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0, 0, 0, 0, 0, 0, last))
}

fn output(program: &str, arguments: &str) -> String {
    let mut command = Command::new(program);
    let output = command.args(arguments.split_whitespace()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Makes this namespace a node that uses one kind of iptables. Returns a client behind a link.
fn node(kind: &str) -> NetNs {
    for tool in ["iptables", "ip6tables"] {
        output(&format!("{tool}-{kind}"), "-t mangle -N KUBE-IPTABLES-HINT");
    }
    let here = NetNs::current("node").unwrap();
    let client = NetNs::new("client").unwrap();
    let links = here.netlink().unwrap();
    links.up("lo").unwrap();
    links.veth("eth0", &client, "eth0").unwrap();
    let there = client.netlink().unwrap();
    for index in [0, 1] {
        let len = [24, 64][index];
        for ip in [NODE[index], DEAD[index]] {
            links.add_address("eth0", ip, len).unwrap();
        }
        there.add_address("eth0", CLIENT[index], len).unwrap();
    }
    links.up("eth0").unwrap();
    there.up("eth0").unwrap();
    for index in [0, 1] {
        there.add_route(&Route::default_via(NODE[index])).unwrap();
        links.add_route(&Route::default_via(CLIENT[index])).unwrap();
    }
    client
}

/// Starts servers of TCP and UDP in both families that send everything back. Returns their port.
fn echo() -> u16 {
    let port = SERVER;
    for ip in NODE {
        send_back(TcpListener::bind((ip, port)).unwrap());
    }
    for ip in NODE {
        let socket = UdpSocket::bind((ip, port)).unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            loop {
                if let Ok((count, from)) = socket.recv_from(&mut buffer) {
                    let _ = socket.send_to(&buffer[..count], from);
                }
            }
        });
    }
    port
}

/// Returns a Service with the ClusterIPs and node ports. Its endpoints are at addresses of the node.
fn web(metadata: &str, port: u16, endpoints: &[[IpAddr; 2]]) -> String {
    let [tcp, udp] = PORTS;
    let mut text = format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop, {metadata}}}\nspec: {{type: NodePort, \
         ipFamilyPolicy: RequireDualStack, ipFamilies: [IPv4, IPv6], clusterIP: '{}', clusterIPs: ['{}', '{}'], ports: \
         [{{name: t, port: 80, nodePort: {tcp}}}, {{name: u, port: 80, protocol: UDP, nodePort: {udp}}}]}}\n",
        WEB[0], WEB[0], WEB[1]
    );
    for (index, family) in ["IPv4", "IPv6"].into_iter().enumerate() {
        let addresses = endpoints
            .iter()
            .map(|ips| format!("{{addresses: ['{}']}}", ips[index]));
        let addresses: Vec<String> = addresses.collect();
        write!(
            text,
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: web-{index}, namespace: shop, \
             labels: {{kubernetes.io/service-name: web}}}}\naddressType: {family}\nports: [{{name: t, port: {port}}}, \
             {{name: u, port: {port}, protocol: UDP}}]\nendpoints: [{}]\n",
            addresses.join(", ")
        )
        .unwrap();
    }
    text
}

/// Returns a Service without node port, at the address of this number.
fn small(number: u16, port: u16) -> String {
    let ip = small_ip(number);
    let server = NODE[0];
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s-{number}, namespace: shop, {ASKS}}}\nspec: {{clusterIP: {ip}, \
         clusterIPs: [{ip}], ports: [{{port: 80}}]}}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: \
         {{name: s-{number}, namespace: shop, labels: {{kubernetes.io/service-name: s-{number}}}}}\naddressType: IPv4\nports: \
         [{{name: '', port: {port}}}]\nendpoints: [{{addresses: [{server}]}}]\n"
    )
}

fn small_ip(number: u16) -> Ipv4Addr {
    let [high, low] = number.to_be_bytes();
    Ipv4Addr::new(10, 97, high, low)
}

fn tcp(to: SocketAddr, limit: Duration) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(b"ping")?;
    stream.read_exact(&mut [0; 4])
}

/// Sends a datagram with a new socket, and waits for the answer.
fn udp(to: SocketAddr, limit: Duration) -> std::io::Result<()> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(limit))?;
    socket.connect(to)?;
    socket.send(b"ping")?;
    socket.recv(&mut [0; 4]).map(drop)
}

type Ask = fn(SocketAddr, Duration) -> std::io::Result<()>;

/// Returns all places of the Service, and how to ask there: TCP and UDP in turn.
fn places() -> Vec<(SocketAddr, Ask)> {
    let mut all: Vec<(SocketAddr, Ask)> = Vec::new();
    for index in [0, 1] {
        all.push((SocketAddr::new(WEB[index], 80), tcp));
        all.push((SocketAddr::new(WEB[index], 80), udp));
        all.push((SocketAddr::new(NODE[index], PORTS[0]), tcp));
        all.push((SocketAddr::new(NODE[index], PORTS[1]), udp));
    }
    all
}

fn ask_all() {
    for (to, ask) in places() {
        for _ in 0..CONNECTIONS {
            ask(to, PATIENCE).unwrap_or_else(|error| panic!("{to}: {error}"));
        }
    }
}

/// Returns what leads to the proxy: all rules that name the chain, in order, and the entries of its sets.
fn captured(kind: &str) -> Vec<String> {
    let mut found = Vec::new();
    for tool in ["iptables", "ip6tables"] {
        let text = output(&format!("{tool}-{kind}-save"), "");
        let ours = text.lines().filter(|line| line.contains("KPLANE"));
        found.extend(ours.map(|line| line.split(" [").next().unwrap().to_owned()));
    }
    let sets = output("ipset", "save");
    let ours = sets.lines().filter(|line| line.contains(" KPLANE"));
    // A lease has another time left at each moment.
    let ours = ours.filter(|line| !line.starts_with("add") || !line.contains("LEASE"));
    let ours: BTreeSet<&str> = ours.filter(|line| line.starts_with("add")).collect();
    found.extend(ours.into_iter().map(str::to_owned));
    found
}

/// Returns whether table nat leads to the chain before it leads to endpoints.
fn is_first(kind: &str) -> bool {
    ["iptables", "ip6tables"].iter().all(|tool| {
        let text = output(&format!("{tool}-{kind}-save"), "-t nat");
        let at = |chain: &str, to: &str| {
            let mut lines = text.lines();
            lines.position(|line| line.starts_with(&format!("-A {chain} ")) && line.ends_with(to))
        };
        ["PREROUTING", "OUTPUT"].iter().all(|chain| {
            let own = at(chain, "-j KPLANE-CAPTURE");
            own.is_some() && own < at(chain, "-j KUBE-SERVICES")
        })
    })
}

fn begin(folder: &TempDir, flags: &[&str]) -> Agent {
    let ports = "--nodeport-addresses=172.20.0.0/24,fd20::/64";
    let mut agent = start(folder, &[&[ports], flags].concat());
    agent.until("update applied");
    agent
}

fn lead(kind: &str) -> usize {
    let captured = captured(kind).into_iter();
    let places = captured.filter(|line| line.starts_with("add") && line.contains("PLACES"));
    places.count()
}

fn leads(kind: &str, count: usize) {
    eventually("the places lead to the proxy", || {
        (lead(kind) == count && is_first(kind)).then_some(())
    });
}

#[test]
fn u37_no_connection_fails_while_an_endpoint_refuses_with_iptables() {
    for kind in ["legacy", "nft"] {
        in_netns(|| {
            let client = node(kind);
            let folder = manifests(&web("", echo(), &[NODE, DEAD]));
            let agent = begin(&folder, &BY_IPTABLES);
            leads(kind, 4);
            ask_all();
            let of_client = || {
                ask_all();
                Ok(())
            };
            client.run(of_client).unwrap();
            agent.stop();
            assert_eq!(captured(kind), NOTHING);
            assert!(!output("ipset", "list -name").contains("KPLANE"));
            assert!(output(&format!("iptables-{kind}-save"), "").contains("-A KUBE-SERVICES"));
        });
    }
}

/// Asks again and again until the Service answers. Returns how long that took.
fn recovers(since: Instant, (to, ask): (SocketAddr, Ask), is_lossy: bool) -> Duration {
    loop {
        let answer = ask(to, LOST);
        if answer.is_ok() {
            return since.elapsed();
        }
        // The kernel refuses at once, but only some datagrams (`icmp_ratelimit`).
        let kind = answer.unwrap_err().kind();
        let is_refused = matches!(
            kind,
            ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset
        );
        assert!(
            is_refused || is_lossy && kind == ErrorKind::WouldBlock,
            "{to}: {kind}"
        );
        assert!(since.elapsed() < LEASE, "{to} is not served");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn u51_after_a_crash_the_kernel_serves_when_the_lease_is_over() {
    in_netns(|| {
        let client = node("legacy");
        let folder = manifests(&web(ASKS, echo(), &[NODE]));
        let flags = ["--backend", "iptables", "--userspace-capture", "iptables"];
        let mut agent = begin(&folder, &flags);
        leads("legacy", 4);
        ask_all();
        let before = captured("legacy");
        signal(&agent, Signal::SIGKILL);
        agent.child.wait().unwrap();
        let killed = Instant::now();
        let of_client = std::thread::scope(|scope| {
            let all = places().into_iter().zip([false, true].into_iter().cycle());
            let all: Vec<_> = all
                .map(|(place, is_udp)| {
                    let client = &client;
                    let ask = move || Ok(recovers(killed, place, is_udp));
                    scope.spawn(move || client.run(ask).unwrap())
                })
                .collect();
            let all = all.into_iter().map(|one| one.join().unwrap());
            all.collect::<Vec<Duration>>()
        });
        println!("served again after {of_client:?}");
        ask_all();
        assert_eq!(captured("legacy"), before, "the rules are still there");
        // The next agent replaces them.
        let agent = begin(&folder, &flags);
        leads("legacy", 4);
        ask_all();
        agent.stop();
        assert_eq!(captured("legacy"), NOTHING);
    });
}

#[test]
fn i4_cleanup_removes_chain_and_sets_of_an_agent_that_was_killed() {
    in_netns(|| {
        let _client = node("legacy");
        let folder = manifests(&web("", echo(), &[NODE]));
        let mut agent = begin(&folder, &BY_IPTABLES);
        leads("legacy", 4);
        signal(&agent, Signal::SIGKILL);
        agent.child.wait().unwrap();
        let clean = || {
            let mut command = binary(&["--cleanup"]);
            let output = command.args(BY_IPTABLES).output().unwrap();
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{errors}");
            String::from_utf8(output.stdout).unwrap()
        };
        let removed = clean();
        for name in [
            "iptables-legacy chain KPLANE-CAPTURE in table nat",
            "ip6tables-legacy chain KPLANE-CAPTURE in table nat",
            "IP set KPLANE-LEASE",
            "IP set KPLANE-6-PLACES",
        ] {
            assert!(
                removed.contains(&format!("removed: kplane's {name}\n")),
                "{removed}"
            );
        }
        assert_eq!(captured("legacy"), NOTHING);
        assert_eq!(output("ipset", "list -name"), "");
        let rest = output("iptables-legacy-save", "");
        assert!(!rest.contains("KUBE-SERVICES"), "{removed}{rest}");
        assert_eq!(clean(), "there was nothing to remove\n");
    });
}

#[test]
fn c11_what_others_do_to_the_chain_is_repaired() {
    in_netns(|| {
        let _client = node("legacy");
        let folder = manifests(&web("", echo(), &[NODE]));
        let flags = [&BY_IPTABLES[..], &["--iptables-probe-interval=1s"]].concat();
        let agent = begin(&folder, &flags);
        leads("legacy", 4);
        let before = captured("legacy");
        let changes: [(&str, &str); 5] = [
            ("iptables-legacy", "-t nat -F KPLANE-CAPTURE"),
            ("iptables-legacy", "-t nat -F"),
            ("ip6tables-legacy", "-t nat -I PREROUTING -j KUBE-SERVICES"),
            ("ipset", "flush KPLANE-PLACES"),
            ("ipset", "add KPLANE-6-TCP 1234"),
        ];
        for (program, arguments) in changes {
            output(program, arguments);
            eventually(&format!("{program} {arguments} is repaired"), || {
                (captured("legacy") == before && is_first("legacy")).then_some(())
            });
        }
        ask_all();
        agent.stop();
    });
}

#[test]
fn u51_a_thousand_services_have_the_rules_of_one() {
    const SERVICES: u16 = 1_000;
    in_netns(|| {
        let _client = node("legacy");
        let port = echo();
        let folder = manifests(&small(0, port));
        let flags = ["--backend", "iptables", "--userspace-capture", "iptables"];
        let agent = begin(&folder, &flags);
        let leads = |count| {
            let all_lead = || (lead("legacy") == count).then_some(());
            eventually("the places lead to the proxy", all_lead);
        };
        leads(1);
        let rules = || {
            let lines = captured("legacy").into_iter();
            lines
                .filter(|line| line.starts_with("-A"))
                .collect::<Vec<_>>()
        };
        let before = rules();
        let all: String = (0..SERVICES).map(|number| small(number, port)).collect();
        fs::write(folder.path().join("manifests/all.yaml"), all).unwrap();
        leads(SERVICES.into());
        assert_eq!(rules(), before);
        tcp((small_ip(SERVICES - 1), 80).into(), PATIENCE).unwrap();
        agent.stop();
    });
}

/// Processes of the node may use node ports on loopback addresses, and other machines may not.
fn check_loopback(service: &str, flags: &[&str], has_begun: fn(), is_served: bool) {
    let client = node("legacy");
    echo();
    let folder = manifests(service);
    let ranges = "--nodeport-addresses=172.20.0.0/24,fd20::/64,localhost";
    let mut agent = start(&folder, &[&[ranges], flags].concat());
    agent.until("update applied");
    has_begun();
    let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for ip in loopback.into_iter().filter(|_| is_served) {
        tcp((ip, PORTS[0]).into(), PATIENCE).unwrap_or_else(|error| panic!("{ip}: {error}"));
        udp((ip, PORTS[1]).into(), PATIENCE).unwrap_or_else(|error| panic!("{ip}: {error}"));
    }
    for ip in loopback.into_iter().filter(|_| !is_served) {
        let short = Duration::from_millis(300);
        tcp((ip, PORTS[0]).into(), short).expect_err("an endpoint of another node answers");
    }
    // A machine that sends packets to loopback addresses to the node.
    let links = client.netlink().unwrap();
    let _ = links.delete_address("lo", loopback[0], 8);
    client
        .sysctl(&[("net/ipv4/conf/all/route_localnet", "1")])
        .unwrap();
    let ask = || {
        let to = SocketAddr::new(loopback[0], PORTS[0]);
        let outcome = TcpStream::connect_timeout(&to, Duration::from_millis(300));
        let error = outcome.expect_err("another machine is served");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        Ok(())
    };
    client.run(ask).unwrap();
    agent.stop();
}

#[test]
fn u22_node_ports_on_loopback_addresses_with_either_kind() {
    // Of the second Service, the only endpoints are on another node: a policy Local does not lead there (K7).
    let services = |port| {
        let all = web("", port, &[NODE]);
        let local = all
            .replace(
                "type: NodePort",
                "type: NodePort, externalTrafficPolicy: Local",
            )
            .replace("']}", "'], nodeName: n2}");
        [all, local]
    };
    for (index, is_served) in [(0, true), (1, false)] {
        in_netns(|| {
            let service = services(SERVER)[index].clone();
            check_loopback(&service, &BY_IPTABLES, || leads("legacy", 4), is_served);
        });
        in_netns(|| {
            let service = services(SERVER)[index].clone();
            check_loopback(&service, &["--backend", "userspace"], || (), is_served);
        });
    }
}

#[test]
fn u51_what_iptables_cannot_do_is_refused_by_name() {
    in_netns(|| {
        let _client = node("legacy");
        let folder = manifests(&web(ASKS, echo(), &[NODE]));
        let flags = [&BY_IPTABLES[..], &["--userspace-transparent"]].concat();
        let mut agent = start(&folder, &flags);
        let status = eventually("the agent ends", || agent.child.try_wait().unwrap());
        assert!(!status.success());
        let log = agent.rest();
        assert!(
            log.contains("--userspace-transparent needs nf_tables"),
            "{log}"
        );
        // The kernel goes on serving.
        let mut agent = start(&folder, &["--userspace-capture", "iptables"]);
        let log = agent.until("update applied");
        let problem = "--userspace-capture iptables cannot come before mode nftables";
        let mut warnings = log.iter().map(ToString::to_string);
        assert!(warnings.any(|line| line.contains(problem)), "{log:#?}");
        tcp((WEB[0], 80).into(), PATIENCE).unwrap();
        agent.stop();
    });
}
