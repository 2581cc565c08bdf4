//! The contenders, and how each is started: with one thread, on one processor.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use kplane_tests::process::Process;

use crate::proxies::place::Place;
use crate::proxies::programs::{Programs, pinned};
use crate::proxies::target::{PROXY, Target};

/// A way from clients to servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Contender {
    /// No proxy: the kernel forwards.
    Direct,
    /// Mode nftables of kplane: DNAT in the kernel.
    Nftables,
    /// The userspace proxy behind rules: way (b) of U51.
    Captured,
    /// The userspace proxy on a socket at a node port: way (a) of U51.
    Sockets,
    /// HAProxy.
    Haproxy,
    /// The same with `option splice-auto`.
    HaproxySplice,
    /// nginx with its module stream.
    Nginx,
    /// socat, with a process for each connection.
    Socat,
}

impl Contender {
    /// Its name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Direct => "no proxy",
            Self::Nftables => "kernel DNAT (kplane nftables)",
            Self::Captured => "**kplane userspace, captured**",
            Self::Sockets => "**kplane userspace, socket**",
            Self::Haproxy => "HAProxy",
            Self::HaproxySplice => "HAProxy, splice-auto",
            Self::Nginx => "nginx stream",
            Self::Socat => "socat",
        }
    }

    /// The address at which clients reach a target.
    pub(crate) fn address(self, target: Target) -> SocketAddr {
        let number = target.number();
        match self {
            Self::Direct => target.endpoints()[0],
            Self::Nftables | Self::Captured => SocketAddr::from((cluster_ip(target), 80)),
            Self::Sockets => SocketAddr::from((PROXY, node_port(target))),
            _ => SocketAddr::from((PROXY, port(number))),
        }
    }

    /// Starts it; `None` if there is no process.
    pub(crate) fn start(
        self,
        place: &Place,
        programs: &Programs,
        target: Target,
        folder: &Path,
    ) -> Result<Option<Process>> {
        let command = match self {
            Self::Direct => return Ok(None),
            Self::Nftables => agent("nftables", folder)?,
            Self::Captured => agent("userspace", folder)?,
            Self::Sockets => agent("userspace-loopback", folder)?,
            Self::Haproxy => haproxy(programs, false, folder)?,
            Self::HaproxySplice => haproxy(programs, true, folder)?,
            Self::Nginx => nginx(programs, folder)?,
            Self::Socat => socat(programs, target)?,
        };
        Ok(Some(logged(command, self, place, folder)?))
    }
}

fn logged(
    mut command: Command,
    contender: Contender,
    place: &Place,
    folder: &Path,
) -> Result<Process> {
    let log = folder.join(format!("{contender:?}.log"));
    let log = File::create(&log).with_context(|| log.display().to_string())?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    place.proxy.command(command)
}

fn port(number: u8) -> u16 {
    8000 + u16::from(number)
}

fn node_port(target: Target) -> u16 {
    30_000 + u16::from(target.number())
}

fn cluster_ip(target: Target) -> Ipv4Addr {
    Ipv4Addr::new(10, 96, 0, 10 + target.number())
}

fn agent(backend: &str, folder: &Path) -> Result<Command> {
    let manifests = folder.join("manifests.yaml");
    let text: String = Target::ALL.into_iter().map(manifest).collect();
    fs::write(&manifests, text)?;
    let mut agent = pinned(&crate::program("kp-nodeagent")?);
    agent
        .args(["--standalone", "--node-name", "bench"])
        .arg("--manifests")
        .arg(manifests)
        .args(["--backend", backend])
        .args(["--bind-address", &PROXY.to_string()])
        .args(["--nodeport-addresses", "10.177.1.0/24"]);
    Ok(agent)
}

pub(crate) fn manifest(target: Target) -> String {
    let name = format!("{target:?}").to_lowercase();
    let protocol = if target.is_udp() { "UDP" } else { "TCP" };
    let endpoints = target.endpoints();
    let addresses = endpoints.iter().map(|at| {
        format!(
            "- {{addresses: [{}], conditions: {{ready: true}}}}\n",
            at.ip()
        )
    });
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: bench}}\nspec:\n  type: NodePort\n  \
         clusterIP: {ip}\n  clusterIPs: [{ip}]\n  ipFamilies: [IPv4]\n  ports:\n  - {{name: p, protocol: {protocol}, \
         port: 80, targetPort: {server}, nodePort: {node}}}\n---\napiVersion: discovery.k8s.io/v1\nkind: \
         EndpointSlice\nmetadata:\n  name: {name}\n  namespace: bench\n  labels: {{kubernetes.io/service-name: \
         {name}}}\naddressType: IPv4\nports:\n- {{name: p, protocol: {protocol}, port: {server}}}\nendpoints:\n{}---\n",
        addresses.collect::<String>(),
        ip = cluster_ip(target),
        server = target.server_port(),
        node = node_port(target),
    )
}

/// HAProxy as its documentation has it, with one thread, and another server for each attempt after the first.
fn haproxy(programs: &Programs, splice: bool, folder: &Path) -> Result<Command> {
    let splice = if splice { "  option splice-auto\n" } else { "" };
    let mut text = format!(
        "global\n  nbthread 1\n  maxconn 6000\ndefaults\n  mode tcp\n{splice}  retries 3\n  option redispatch 1\n  \
         timeout connect 1s\n  timeout client 60s\n  timeout server 60s\n"
    );
    for target in Target::ALL.into_iter().filter(|target| !target.is_udp()) {
        writeln!(
            text,
            "listen {target:?}\n  bind {PROXY}:{} backlog 4096",
            port(target.number())
        )?;
        for (number, at) in target.endpoints().iter().enumerate() {
            writeln!(text, "  server s{number} {at}")?;
        }
    }
    let file = folder.join("haproxy.cfg");
    fs::write(&file, text)?;
    let mut command = programs.command("haproxy")?;
    command.arg("-db").arg("-f").arg(file);
    Ok(command)
}

/// nginx as its documentation has it, in one process.
fn nginx(programs: &Programs, folder: &Path) -> Result<Command> {
    let module = programs.stream_module().context("nginx has no module stream")?;
    let mut text = format!(
        "load_module {};\ndaemon off;\nmaster_process off;\nworker_processes 1;\nerror_log stderr crit;\npid \
         {}/nginx.pid;\nevents {{ worker_connections 9000; }}\nstream {{\nproxy_connect_timeout 1s;\n",
        module.display(),
        folder.display(),
    );
    for target in Target::ALL {
        let number = target.number();
        let servers = target
            .endpoints()
            .iter()
            .fold(String::new(), |text, at| format!("{text}server {at}; "));
        let kind = match target {
            Target::Datagrams => "udp; proxy_timeout 30s",
            Target::Lookups => "udp; proxy_timeout 5s; proxy_responses 1",
            _ => "backlog=4096; proxy_timeout 60s",
        };
        writeln!(
            text,
            "upstream u{number} {{ {servers}}}\nserver {{ listen {PROXY}:{} {kind}; proxy_pass u{number}; }}",
            port(number)
        )?;
    }
    text.push_str("}\n");
    let file = folder.join("nginx.conf");
    fs::write(&file, text)?;
    let mut command = programs.command("nginx")?;
    command.arg("-p").arg(folder).arg("-c").arg(file);
    command.args(["-e", "stderr"]);
    Ok(command)
}

fn socat(programs: &Programs, target: Target) -> Result<Command> {
    let mut command = programs.command("socat")?;
    let port = port(target.number());
    let listen = format!("TCP4-LISTEN:{port},fork,reuseaddr,backlog=4096");
    command.args([listen, format!("TCP4:{}", target.endpoints()[0])]);
    Ok(command)
}
