//! `cargo xtask demo --userspace`: the demo's Services on loopback addresses of this machine, without any right and
//! without namespaces. Pods are servers in this process.

mod pods;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use kplane_model::{Family, Protocol};
use kplane_rig::process::Process;
use kplane_rig::wait::eventually;
use owo_colors::OwoColorize as _;

use self::pods::Pods;
use super::manifests::Manifests;
use super::objects::Objects;
use super::show::{Show, aside, say};
use super::{Args, INTERRUPTED, interrupt};

/// Number of steps.
const STEPS: usize = 4;

/// Longest wait for the agent, and for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Time of the load before and after a pod ends.
const LOAD: Duration = Duration::from_millis(1500);

/// The Service whose pod ends under load.
const STAR: &str = "web";

/// The node of `deploy/demo` that this machine plays.
const NODE: &str = "node-1";

/// A place where a ServicePort can be reached on this machine.
#[derive(Clone, Debug)]
struct Listed {
    service: String,
    /// Port name, kind and number, as the agent writes them.
    what: String,
    protocol: Protocol,
    at: SocketAddr,
}

/// Everything that runs.
struct Laptop {
    folder: tempfile::TempDir,
    pods: Pods,
    agent: Option<Process>,
    listed: Vec<Listed>,
}

/// Plays this demo.
pub(super) fn play(args: &Args, programs: &Path) -> Result<ExitCode> {
    interrupt::watch()?;
    let began = Instant::now();
    let mut show = Show::new(STEPS);
    let result = walk(&mut show, args, programs);
    match result {
        Err(error) if error.is::<interrupt::Interrupted>() => {
            say!("demo: interrupted; everything that it started has been ended");
            return Ok(ExitCode::from(INTERRUPTED));
        }
        Err(error) => {
            let wrong = vec![format!("{error:#}")];
            show.check(("the demo", "to go through"), "an error", wrong, began);
        }
        Ok(()) => {}
    }
    show.print(began.elapsed());
    Ok(ExitCode::from(u8::from(!show.all_passed())))
}

fn walk(show: &mut Show, args: &Args, programs: &Path) -> Result<()> {
    show.heading("Start the pods of deploy/demo as servers on loopback addresses, and one agent without rights");
    let source = args.objects.clone().unwrap_or_else(|| crate::workspace().join("deploy/demo"));
    let mut laptop = Laptop::start(programs, &source)?;
    laptop.print();
    show.heading("Call every Service at its address");
    laptop.call_all(show)?;
    show.heading("End a pod under load: connections move to another one");
    laptop.end_a_pod(show)?;
    if args.keep {
        laptop.wait()?;
    }
    show.heading("Clean up");
    laptop.end(show)
}

/// Returns the loopback address that stands for a pod's address: 10.244.1.11 becomes 127.1.1.11.
fn on_loopback(ip: Ipv4Addr) -> Ipv4Addr {
    let [_, _, node, pod] = ip.octets();
    Ipv4Addr::new(127, 1, node, pod)
}

impl Laptop {
    fn start(programs: &Path, source: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("kplane-demo-")
            .tempdir()
            .context("create a folder for manifests")?;
        let mut manifests = Manifests::copy(source, folder.path().join("manifests"))?;
        let objects = Objects::read(&manifests, &[Family::V4])?;
        manifests.edit(move_endpoints)?;
        let pods = Pods::start(&objects)?;
        let hosts = folder.path().join("hosts");
        let agent = start_agent(
            programs,
            &manifests.folder,
            &hosts,
            &folder.path().join("log"),
        )?;
        let expected = objects.services.iter().filter(|service| has_endpoints(service)).count();
        let mut laptop = Self {
            folder,
            pods,
            agent: Some(agent),
            listed: Vec::new(),
        };
        eventually(PATIENCE, "the agent lists all Services", || {
            laptop.listed = list(&fs::read_to_string(&hosts).unwrap_or_default());
            let services: BTreeSet<&str> = laptop.listed.iter().map(|at| &*at.service).collect();
            let count = services.len();
            ensure!(
                count >= expected,
                "the agent lists {count} of {expected} Services"
            );
            Ok(())
        })
        .with_context(|| laptop.last_words())?;
        Ok(laptop)
    }

    fn last_words(&self) -> String {
        kplane_rig::process::last_words(&self.folder.path().join("log"))
    }

    fn print(&self) {
        for at in &self.listed {
            let Listed {
                service, what, at, ..
            } = at;
            say!("    {service:<14} {what:<28} {}", at.cyan());
        }
        let pods = self.pods.len();
        aside!(
            "{pods} servers stand for the pods; endpoints of IPv6 are left out: loopback has one address only"
        );
    }

    /// Calls each place as often as it has endpoints, twice.
    fn call_all(&self, show: &mut Show) -> Result<()> {
        let began = Instant::now();
        let (mut calls, mut wrong) = (0, Vec::new());
        for place in &self.listed {
            interrupt::check()?;
            let mut answers = BTreeMap::<String, usize>::new();
            for _ in 0..12 {
                calls += 1;
                match call(place.protocol, place.at) {
                    Ok(pod) if self.pods.serves(&pod, &place.service) => {
                        *answers.entry(pod).or_default() += 1;
                    }
                    Ok(pod) => wrong.push(format!("{}: {pod} answered", place.at)),
                    Err(error) => wrong.push(format!("{}: {error:#}", place.at)),
                }
            }
            let who: Vec<_> =
                answers.iter().map(|(pod, count)| format!("{pod} {count}x")).collect();
            say!(
                "    {:<14} {:<28} {}",
                place.service,
                place.what,
                who.join(", ")
            );
        }
        let seen = format!("{} of {calls}", calls - wrong.len());
        show.check(
            ("Calls to all Services", "every one answered"),
            seen,
            wrong,
            began,
        );
        Ok(())
    }

    /// Ends a pod of the star while connections come as fast as they can.
    fn end_a_pod(&mut self, show: &mut Show) -> Result<()> {
        let began = Instant::now();
        let star = self
            .listed
            .iter()
            .find(|at| at.service.starts_with(&format!("{STAR}.")))
            .or(self.listed.iter().find(|at| at.protocol == Protocol::Tcp))
            .context("no Service with TCP")?
            .clone();
        let (mut done, mut wrong, mut ended) = (0, Vec::new(), None);
        while began.elapsed() < LOAD * 2 {
            interrupt::check()?;
            if ended.is_none() && began.elapsed() >= LOAD {
                ended = self.pods.end_one_of(&star.service);
                let pod = ended.as_deref().unwrap_or("no pod");
                say!("    {pod} ends now; its EndpointSlice still names it");
            }
            match call(Protocol::Tcp, star.at) {
                Ok(pod) if Some(&pod) == ended.as_ref() => {
                    wrong.push(format!("{pod} answered after its end"));
                }
                Ok(_) => done += 1,
                Err(error) => wrong.push(format!("{error:#}")),
            }
        }
        let seen = format!("{} of {} failed", wrong.len(), done + wrong.len());
        aside!(
            "{seen}; rules of a kernel would have failed one of {} from then on",
            self.pods.count(&star.service) + 1
        );
        show.check(
            ("Connects while a pod ends", "none fails"),
            seen,
            wrong,
            began,
        );
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        let hosts = self.folder.path().join("hosts");
        say!(
            "\n{}",
            "Everything is still running. From another terminal:".bold()
        );
        let curl = self.listed.iter().filter(|at| at.protocol == Protocol::Tcp);
        for place in curl.take(3) {
            say!(
                "  {}\n    curl http://{}/",
                place.service.dimmed(),
                place.at
            );
        }
        say!(
            "  {}\n    cat {}",
            "all addresses".dimmed(),
            hosts.display()
        );
        let manifests = self.folder.path().join("manifests");
        say!(
            "  {}\n    ls {}",
            "Services and endpoints, to edit; the agent follows".dimmed(),
            manifests.display()
        );
        say!("\nCtrl-C ends it.");
        if interrupt::sleep(Duration::MAX).is_err() {
            interrupt::clear();
        }
        Ok(())
    }

    fn end(&mut self, show: &mut Show) -> Result<()> {
        let began = Instant::now();
        let agent = self.agent.take().context("the agent is gone")?;
        let status = agent.terminate(PATIENCE)?;
        let wrong = if status.success() {
            Vec::new()
        } else {
            vec![format!("{status}: {}", self.last_words())]
        };
        let open = self.listed.iter().find(|at| at.protocol == Protocol::Tcp);
        let still = open
            .filter(|at| TcpStream::connect(at.at).is_ok())
            .map(|at| format!("{} still accepts connections", at.at));
        let wrong = wrong.into_iter().chain(still).collect();
        show.check(
            ("The agent ends", "nothing is left"),
            status.to_string(),
            wrong,
            began,
        );
        Ok(())
    }
}

fn has_endpoints(service: &super::objects::Service) -> bool {
    let usable = |endpoint: &kplane_model::Endpoint| endpoint.ready || endpoint.serving;
    service.skipped.is_none() && service.ports.iter().any(|port| port.endpoints.iter().any(usable))
}

/// Moves the endpoints of IPv4 to loopback addresses, and takes those of IPv6 away.
fn move_endpoints(object: &mut serde_json::Value) -> bool {
    if object["kind"] != "EndpointSlice" {
        return false;
    }
    if object["addressType"] != "IPv4" {
        object["endpoints"] = serde_json::Value::Array(Vec::new());
        return true;
    }
    for endpoint in object["endpoints"].as_array_mut().into_iter().flatten() {
        for address in endpoint["addresses"].as_array_mut().into_iter().flatten() {
            if let Some(Ok(ip)) = address.as_str().map(str::parse) {
                *address = on_loopback(ip).to_string().into();
            }
        }
    }
    true
}

fn start_agent(programs: &Path, manifests: &Path, hosts: &Path, log: &Path) -> Result<Process> {
    let mut command: Command = kplane_rig::process::logging(&programs.join("kp-nodeagent"), log)?;
    command.args(["--standalone", "--backend", "userspace-loopback"]);
    command.args([
        "--hostname-override",
        NODE,
        "--nodeport-addresses",
        "127.0.0.0/8",
    ]);
    command.args([
        "--status-bind-address",
        "",
        "--healthz-bind-address",
        "",
        "--metrics-bind-address",
        "",
    ]);
    command.arg("--manifests").arg(manifests).arg("--hosts-file").arg(hosts);
    Process::start(command)
}

/// Reads the file of the agent.
fn list(text: &str) -> Vec<Listed> {
    let mut service = String::new();
    let mut listed = Vec::new();
    for line in text.lines() {
        match line.split_once('\t') {
            Some(("#", place)) => listed.extend(place_of(&service, place)),
            Some((_, names)) => {
                names.split(' ').next().unwrap_or_default().clone_into(&mut service);
            }
            None => line.trim_start_matches("# ").clone_into(&mut service),
        }
    }
    listed
}

fn place_of(service: &str, text: &str) -> Option<Listed> {
    let (what, at) = text.split_once(": ")?;
    Some(Listed {
        service: service.to_owned(),
        what: what.to_owned(),
        protocol: what.rsplit('/').next()?.parse().ok()?,
        at: at.parse().ok()?,
    })
}

/// Asks a place once; returns the name of the pod that answers.
fn call(protocol: Protocol, to: SocketAddr) -> Result<String> {
    let mut answer = String::new();
    match protocol {
        Protocol::Tcp => {
            let mut stream = TcpStream::connect(to)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
            stream.read_to_string(&mut answer)?;
        }
        Protocol::Udp => {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.send_to(b"?", to)?;
            let mut buffer = [0; 512];
            let count = socket.recv(&mut buffer)?;
            answer.push_str(std::str::from_utf8(&buffer[..count])?);
        }
        Protocol::Sctp => return Err(anyhow!("SCTP is not served")),
    }
    let name = answer.lines().last().unwrap_or_default();
    Ok(name.to_owned())
}
