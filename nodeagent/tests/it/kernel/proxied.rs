//! The userspace proxy in front of the kernel, as the real program: successors, crashes, and other programs.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use kplane_rig::kernel::{in_netns, nft};
use kplane_rig::link::Route;
use kplane_rig::netns::NetNs;
use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::agent::Agent;
use crate::support::eventually;

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The node's address, at which the servers are.
pub(crate) const NODE: Ipv4Addr = Ipv4Addr::new(172, 20, 0, 1);

/// ClusterIPs of the Services.
const WEB: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 11);

/// The proxy's address.
const PROXY: Ipv4Addr = Ipv4Addr::new(169, 254, 107, 112);

const ASKS: &str = "annotations: {kplane.io/data-path: userspace}";

/// Connections that stay open.
const OPEN: usize = 200;

/// A node with one link, from which its own programs ask.
pub(crate) fn node() {
    let links = NetNs::current("node").unwrap().netlink().unwrap();
    links.up("lo").unwrap();
    links.bridge("eth0").unwrap();
    links.add_address("eth0", NODE.into(), 24).unwrap();
    links.up("eth0").unwrap();
    links
        .add_route(&Route::default_via(Ipv4Addr::new(172, 20, 0, 254).into()))
        .unwrap();
}

/// Starts a server that sends everything back; returns its port.
fn echo() -> u16 {
    let listener = TcpListener::bind((NODE, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    send_back(listener);
    port
}

/// Serves a listener: all that clients send goes back to them.
pub(crate) fn send_back(listener: TcpListener) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut buffer = [0; 64];
                while let Ok(count @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..count]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

fn service(name: &str, metadata: &str, ip: Ipv4Addr, port: u16) -> String {
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop, {metadata}}}\nspec: {{clusterIP: {ip}, \
         clusterIPs: [{ip}], ports: [{{port: 80}}]}}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: \
         {{name: {name}-x, namespace: shop, labels: {{kubernetes.io/service-name: {name}}}}}\naddressType: IPv4\nports: \
         [{{name: '', port: {port}}}]\nendpoints: [{{addresses: [{NODE}]}}]\n"
    )
}

fn connect(to: Ipv4Addr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::from((to, 80)), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn exchange(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"ping")?;
    stream.read_exact(&mut [0; 4])
}

/// A client that connects again and again.
struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
    thread: JoinHandle<std::io::Result<()>>,
}

impl Load {
    fn start(to: Ipv4Addr) -> Self {
        let (stop, done) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(0)),
        );
        let (ends, count) = (stop.clone(), done.clone());
        let thread = std::thread::spawn(move || {
            while !ends.load(Relaxed) {
                exchange(&mut connect(to)?)?;
                count.fetch_add(1, Relaxed);
            }
            Ok(())
        });
        Self { stop, done, thread }
    }

    fn progresses(&self) {
        let before = self.done.load(Relaxed);
        eventually("clients connect", || {
            let is_over = self.thread.is_finished() || self.done.load(Relaxed) > before + 20;
            is_over.then_some(())
        });
    }

    fn end(self) {
        self.stop.store(true, Relaxed);
        self.thread.join().unwrap().unwrap();
    }
}

/// Returns the table that leads to the proxy, or nothing.
fn capture() -> String {
    // In one answer, since the table may go between two.
    let ruleset = nft(&["list", "ruleset", "ip"], "");
    let Some(start) = ruleset.find("table ip kplane-capture {") else {
        return String::new();
    };
    let table = &ruleset[start..];
    let end = table.find("\n}").map_or(table.len(), |end| end + 2);
    // What is left of the lease changes with time.
    table[..end]
        .lines()
        .filter(|line| !line.contains("expires"))
        .collect::<Vec<_>>()
        .join("\n")
}

pub(crate) fn leads(to: Ipv4Addr) {
    let what = format!("{to} leads to the proxy");
    eventually(&what, || capture().contains(&to.to_string()).then_some(()));
}

pub(crate) fn start(folder: &TempDir, flags: &[&str]) -> Agent {
    let run = folder.path().join("run").display().to_string();
    let mut all = vec![
        "--healthz-bind-address=",
        "--metrics-bind-address=",
        // Servers are at the node's own address here.
        "--userspace-services=all",
        "--userspace-endpoints=any",
        "--run-dir",
        &run,
    ];
    all.extend(flags);
    Agent::start_with(&folder.path().join("manifests"), &all)
}

pub(crate) fn manifests(text: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::create_dir(folder.path().join("manifests")).unwrap();
    fs::write(folder.path().join("manifests/all.yaml"), text).unwrap();
    folder
}

pub(crate) fn signal(agent: &Agent, signal: Signal) {
    agent.child.signal(signal).unwrap();
}

pub(crate) fn ends(mut agent: Agent) {
    let status = eventually("the agent ends", || agent.child.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

fn opened(to: Ipv4Addr) -> Vec<TcpStream> {
    let mut streams: Vec<TcpStream> = (0..OPEN).map(|_| connect(to).unwrap()).collect();
    streams.iter_mut().for_each(|stream| exchange(stream).unwrap());
    streams
}

#[test]
fn u57_captured_connections_go_on_with_the_next_agent() {
    in_netns(|| {
        node();
        for flags in [&["--backend", "userspace"], &["--backend", "nftables"]] {
            let folder = manifests(&service("web", ASKS, WEB, echo()));
            let flags = [&flags[..], &["--drain-timeout", "60s"]].concat();
            let mut agent = start(&folder, &flags);
            agent.until("update applied");
            leads(WEB);
            let before = capture();
            let mut streams = opened(WEB);
            let load = Load::start(WEB);
            load.progresses();
            // The next one starts while this one runs.
            let mut next = start(&folder, &flags);
            ends(agent);
            next.until("update applied");
            leads(WEB);
            assert_eq!(capture(), before, "the rules lead to the same socket");
            load.progresses();
            streams.iter_mut().for_each(|stream| exchange(stream).unwrap());
            // The next one comes later. Meanwhile the kernel serves new connections.
            signal(&next, Signal::SIGTERM);
            eventually("the table is gone", || capture().is_empty().then_some(()));
            load.progresses();
            streams.iter_mut().for_each(|stream| exchange(stream).unwrap());
            let mut last = start(&folder, &flags);
            ends(next);
            last.until("update applied");
            leads(WEB);
            load.progresses();
            streams.iter_mut().for_each(|stream| exchange(stream).unwrap());
            load.end();
            drop(streams);
            last.stop();
        }
    });
}

/// Without a proxy there is nothing to hand over, and two agents on a node are a mistake.
#[test]
fn an_agent_without_a_proxy_stays() {
    in_netns(|| {
        node();
        let folder = manifests(&service("web", "", WEB, 9));
        let mut first = start(&folder, &[]);
        first.until("update applied");
        let mut second = start(&folder, &[]);
        second.until("the agent that runs hands over nothing");
        second.until(
            "another kp-nodeagent programs this network namespace; waiting up to 30s for it to end",
        );
        assert!(first.child.try_wait().unwrap().is_none());
        second.stop();
        first.stop();
    });
}

#[test]
fn a_crash_leaves_services_of_the_kernel_untouched_and_no_service_unserved() {
    in_netns(|| {
        node();
        let port = echo();
        let both = [
            service("web", ASKS, WEB, port),
            service("other", "", OTHER, port),
        ];
        let folder = manifests(&both.concat());
        let mut agent = start(&folder, &[]);
        agent.until("update applied");
        leads(WEB);
        let (mut of_proxy, mut of_kernel) = (opened(WEB), opened(OTHER));
        let load = Load::start(OTHER);
        load.progresses();
        signal(&agent, Signal::SIGKILL);
        agent.child.wait().unwrap();
        eventually("the table is gone", || capture().is_empty().then_some(()));
        load.progresses();
        of_kernel.iter_mut().for_each(|stream| exchange(stream).unwrap());
        load.end();
        // The kernel serves it from now on. Connections of the proxy have ended, and their clients know.
        drop(opened(WEB));
        assert!(of_proxy.iter_mut().all(|stream| exchange(stream).is_err()));
    });
}

/// Its sockets still take connections, but nothing moves their data.
#[test]
fn a_hung_agent_leaves_its_services_to_the_kernel_until_it_goes_on() {
    let opened = || {
        let text = scrape();
        let name = "kplane_agent_proxy_opened_total ";
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line[name.len()..].parse::<u64>().unwrap()
    };
    let is_served = || {
        let mut stream = connect(WEB).ok()?;
        let soon = Some(Duration::from_millis(200));
        stream.set_read_timeout(soon).unwrap();
        exchange(&mut stream).ok()
    };
    for flags in [&["--backend", "userspace"][..], &[]] {
        in_netns(|| {
            node();
            let folder = manifests(&service("web", ASKS, WEB, echo()));
            let metrics = "--metrics-bind-address=127.0.0.1:10249";
            let mut agent = start(&folder, &[flags, &[metrics]].concat());
            agent.until("update applied");
            leads(WEB);
            eventually("the proxy serves", || {
                is_served()?;
                (opened() > 0).then_some(())
            });
            signal(&agent, Signal::SIGSTOP);
            eventually("the kernel serves", is_served);
            assert!(!capture().is_empty(), "the rules are still there");
            signal(&agent, Signal::SIGCONT);
            let before = opened();
            eventually("the proxy serves again", || {
                is_served()?;
                (opened() > before).then_some(())
            });
            agent.stop();
        });
    }
}

/// What a tenant may write: its Services, and EndpointSlices with any address, also that of the node.
#[test]
fn a_service_gets_the_proxy_if_the_operator_lets_it_and_its_endpoints_are_pods() {
    let folder = manifests(&service("web", ASKS, WEB, 9));
    let started = |flags: &[&str]| {
        let none = ["--healthz-bind-address=", "--metrics-bind-address="];
        let flags = [&none[..], flags].concat();
        let mut agent = Agent::start_with(&folder.path().join("manifests"), &flags);
        agent.until("update applied");
        agent
    };
    in_netns(|| {
        node();
        let port = echo();
        fs::write(
            folder.path().join("manifests/all.yaml"),
            service("web", ASKS, WEB, port),
        )
        .unwrap();
        for flags in [
            &[][..],
            &["--userspace-services=games", "--userspace-endpoints=any"],
            &["--userspace-services=shop"],
            &[
                "--userspace-services=all",
                "--userspace-endpoints=172.20.0.0/16",
            ],
        ] {
            let agent = started(flags);
            exchange(&mut connect(WEB).unwrap()).unwrap();
            assert_eq!(capture(), "", "{flags:?}");
            agent.stop();
        }
        let agent = started(&["--userspace-services=shop", "--userspace-endpoints=any"]);
        leads(WEB);
        agent.stop();
    });
}

#[test]
fn the_proxys_address_comes_back_after_another_program_removed_it() {
    in_netns(|| {
        node();
        let folder = manifests(&service("web", ASKS, WEB, echo()));
        let mut agent = start(&folder, &["--backend", "userspace"]);
        agent.until("update applied");
        leads(WEB);
        exchange(&mut connect(WEB).unwrap()).unwrap();
        let v6: IpAddr = "fd6b:706c:616e:6500::1".parse().unwrap();
        let own = || {
            fs::read_to_string("/proc/thread-self/net/fib_trie")
                .unwrap()
                .contains(&PROXY.to_string())
        };
        let own_v6 = || {
            let all = fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap();
            all.contains("fd6b706c616e65000000000000000001")
        };
        assert!(own() && own_v6());
        let links = NetNs::current("node").unwrap().netlink().unwrap();
        links.delete_address("lo", PROXY.into(), 32).unwrap();
        links.delete_address("lo", v6, 128).unwrap();
        eventually("the addresses are back", || {
            (own() && own_v6()).then_some(())
        });
        exchange(&mut connect(WEB).unwrap()).unwrap();
        agent.stop();
    });
}

/// Returns the addresses at which sockets of this network namespace wait for clients.
fn listeners() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    // A TCP socket that listens is in state 10, and a UDP socket without a peer in state 7 (include/net/tcp_states.h).
    for (file, state) in [("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")] {
        let text = fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap();
        for line in text.lines().skip(1) {
            let mut words = line.split_whitespace();
            let (address, its_state) = (words.nth(1).unwrap(), words.nth(1).unwrap());
            if its_state == state {
                found.insert(format!("{file} {address}"));
            }
        }
    }
    found
}

#[test]
fn u6_ten_thousand_services_have_four_listeners() {
    const SERVICES: u16 = 10_000;
    in_netns(|| {
        node();
        let port = echo();
        let before = listeners();
        let mut text = String::new();
        for number in 0..SERVICES {
            let [high, low] = number.to_be_bytes();
            let ip = Ipv4Addr::new(10, 97, high, low);
            write!(text, "{}", service(&format!("web-{number}"), "", ip, port)).unwrap();
        }
        let folder = manifests(&text);
        let mut agent = start(&folder, &["--backend", "userspace"]);
        agent.until("update applied");
        let [high, low] = (SERVICES - 1).to_be_bytes();
        let last = Ipv4Addr::new(10, 97, high, low);
        leads(last);
        exchange(&mut connect(last).unwrap()).unwrap();
        let own: Vec<String> = listeners().difference(&before).cloned().collect();
        assert_eq!(own.len(), 4, "{own:?}");
        agent.stop();
    });
}

fn scrape() -> String {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, 10_249)).unwrap();
    let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn u56_services_that_ask_for_the_proxy_have_metrics_of_their_own() {
    in_netns(|| {
        node();
        let services = [
            service("web", ASKS, WEB, echo()),
            service("other", "", OTHER, echo()),
        ];
        let folder = manifests(&services.concat());
        let metrics = "--metrics-bind-address=127.0.0.1:10249";
        let mut agent = start(&folder, &["--backend", "userspace", metrics]);
        agent.until("update applied");
        leads(WEB);
        leads(OTHER);
        for to in [WEB, OTHER, OTHER] {
            exchange(&mut connect(to).unwrap()).unwrap();
        }
        let text = scrape();
        let web =
            "namespace=\"shop\",service=\"web\",port=\"\",protocol=\"TCP\",ip_family=\"IPv4\"";
        let of_web = format!("kplane_agent_proxy_service_opened_total{{{web}}} 1");
        for line in [of_web.as_str(), "kplane_agent_proxy_opened_total 3"] {
            assert!(text.contains(line), "no {line} in\n{text}");
        }
        assert!(!text.contains("service=\"other\""), "{text}");
        agent.stop();
    });
}
