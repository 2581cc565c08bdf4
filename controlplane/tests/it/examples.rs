//! The example clients of `examples/`, as docs/tools.md has a person build and run them, with the real program and a
//! folder of manifests.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kplane_http::client::until;
use kplane_rig::loopback::unused;
use kplane_rig::privilege::{available, require_tool};
use kplane_rig::process::Process;
use tempfile::TempDir;

use crate::support::secure::Certs;

/// A deadline far above any step of these tests.
const DEADLINE: Duration = Duration::from_secs(60);
const NODES: &str = "
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: node-1}}
- {apiVersion: v1, kind: Node, metadata: {name: node-2}}
";

/// A Service with these endpoints, each an address and its node.
fn manifest(name: &str, octet: u8, endpoints: &[(&str, &str)]) -> String {
    let mut text = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
         spec: {{clusterIP: 10.96.0.{octet}, clusterIPs: [10.96.0.{octet}], ports: [{{name: http, port: 80}}]}}\n\
         ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
         metadata: {{name: {name}-1, namespace: shop, labels: {{kubernetes.io/service-name: {name}}}}}\n\
         ports: [{{name: http, port: 8080}}]\nendpoints:\n"
    );
    for (address, node) in endpoints {
        text += &format!(
            "- {{addresses: [{address}], nodeName: {node}, conditions: {{ready: true}}}}\n"
        );
    }
    text
}

/// A control plane with a folder.
struct Plane {
    folder: TempDir,
    status: SocketAddr,
    flags: Vec<String>,
    program: Option<Process>,
}

impl Plane {
    async fn start(flags: Vec<String>) -> Self {
        let mut plane = Self {
            folder: TempDir::new().unwrap(),
            status: unused(),
            flags,
            program: None,
        };
        plane.put("nodes", NODES);
        // The picture is doubted while there is no Service at all.
        plane.put("other", &manifest("other", 99, &[("10.244.9.9", "node-2")]));
        plane.run().await;
        plane
    }

    /// Starts the program, in place of the one that runs, which is killed.
    async fn run(&mut self) {
        self.program = None;
        let http = unused();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kp-controlplane"));
        command
            .arg("--manifests")
            .arg(self.folder.path())
            .arg(format!("--agent-listen={}", unused()))
            .arg(format!("--status-listen={}", self.status))
            .arg(format!("--http-listen={http}"))
            .args(&self.flags)
            .stderr(Stdio::null());
        self.program = Some(Process::start(command).unwrap());
        until(http, "/readyz", |reply| {
            reply.is_some_and(|reply| reply.status == 200)
        })
        .await;
    }

    /// Writes a file at once.
    fn put(&self, name: &str, text: &str) {
        let fresh = self.folder.path().join(".fresh");
        fs::write(&fresh, text).unwrap();
        fs::rename(fresh, self.folder.path().join(format!("{name}.yaml"))).unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.folder.path().join(format!("{name}.yaml"))).unwrap();
    }

    /// Returns the flag with the address, by the name that the certificate has.
    fn server(&self) -> String {
        format!("localhost:{}", self.status.port())
    }
}

/// Returns the flags of a control plane with certificates.
fn tls(certs: &Certs) -> Vec<String> {
    let flag = |flag: &str, file: &str| format!("--{flag}={}", certs.file(file).display());
    vec![
        flag("tls-cert-file", "server.crt"),
        flag("tls-private-key-file", "server.key"),
        flag("client-ca-file", "ca.crt"),
    ]
}

/// A client and its lines.
struct Client {
    lines: Receiver<String>,
    _program: Process,
}

impl Client {
    fn start(mut command: Command) -> Self {
        command.stdout(Stdio::piped());
        let mut program = Process::start(command).unwrap();
        let stdout = BufReader::new(program.stdout.take().unwrap());
        let (send, lines) = channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The test may be over.
                let _ = send.send(line);
            }
        });
        Self {
            lines,
            _program: program,
        }
    }

    fn prints(&self, expected: &[&str]) {
        for expected in expected {
            let line = self.lines.recv_timeout(DEADLINE);
            assert_eq!(line.as_deref(), Ok(*expected));
        }
    }

    /// Skips lines until one has this part.
    fn until(&self, part: &str) -> String {
        loop {
            let line = self
                .lines
                .recv_timeout(DEADLINE)
                .unwrap_or_else(|error| panic!("{part:?}: {error}"));
            if line.contains(part) {
                return line;
            }
        }
    }
}

/// Runs a client that ends by itself, and returns what it says about that.
fn refused(command: &Command) -> String {
    let mut bounded = Command::new("timeout");
    bounded.arg("60").arg(command.get_program());
    bounded.args(command.get_args());
    let envs = command.get_envs();
    bounded.envs(envs.filter_map(|(name, value)| Some((name, value?))));
    let output = bounded.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn checkout() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {output:?}");
    Ok(())
}

/// Generates the packages that the examples use, and returns their folder; `None` if this machine lacks a tool and may
/// lack it.
fn clients() -> Option<&'static Path> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || {
        if !require_tool("go").unwrap() || !require_tool("python3").unwrap() {
            return None;
        }
        available(generate(&[])).unwrap()?;
        Some(checkout().join("target/clients"))
    };
    MADE.get_or_init(make).as_deref()
}

/// Runs `cargo xtask clients`, as it was built beside the control plane.
fn generate(args: &[&str]) -> anyhow::Result<()> {
    let program = Path::new(env!("CARGO_BIN_EXE_kp-controlplane")).with_file_name("xtask");
    let mut command = Command::new(&program);
    let output = command
        .arg("clients")
        .args(args)
        .output()
        .with_context(|| format!("{}: run `cargo build`", program.display()))?;
    ensure!(output.status.success(), "{command:?}: {output:?}");
    Ok(())
}

/// Installs the Python package with the oldest libraries that it accepts, and returns the Python that has it; `None` as
/// for [`clients`].
fn python() -> Option<&'static Path> {
    static INSTALLED: OnceLock<Option<PathBuf>> = OnceLock::new();
    let clients = clients()?;
    let install = || {
        let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("examples-python");
        let mut create = Command::new("python3");
        run(create.args(["-m", "venv", "--clear"]).arg(&venv))?;
        let oldest = ["grpcio==1.76.0", "protobuf==6.31.1"];
        let mut pip = Command::new(venv.join("bin/pip"));
        run(pip.args(["install", "--quiet"]).arg(clients.join("python")).args(oldest))?;
        Ok(venv.join("bin/python"))
    };
    let install = || available(install()).unwrap();
    INSTALLED.get_or_init(install).as_deref()
}

/// Returns the Python example for node-1.
fn watch_node(python: &Path, server: &str, flags: &[String]) -> Command {
    let mut command = Command::new(python);
    command
        .arg(checkout().join("examples/python/watch_node.py"))
        .args(["node-1", "--server", server])
        .args(flags);
    command
}

/// Builds the Go example outside of the checkout; `None` as for [`clients`].
fn go() -> Option<PathBuf> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    clients()?;
    let build = || {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("watchnode");
        let go = |words: &[&str]| {
            let mut go = Command::new("go");
            go.current_dir(checkout().join("examples/go"));
            run(go.args(words).env("GOFLAGS", "-mod=readonly"))
        };
        go(&["build", "-buildvcs=false", "-o", program.to_str().unwrap()])?;
        go(&["vet", "./...", "github.com/kplane/kplane/api/kplanev1"])?;
        Ok(program)
    };
    let build = || available(build()).unwrap();
    BUILT.get_or_init(build).clone()
}

fn watch_in_go(program: &Path, server: &str, flags: &[String]) -> Command {
    let mut command = Command::new(program);
    command.args(["-server", server]).args(flags).arg("node-1");
    command
}

#[test]
fn the_packages_for_clients_have_kplanes_version_and_the_same_bytes_each_time() {
    let (Some(clients), Some(python)) = (clients(), python()) else {
        return;
    };
    let again = TempDir::new().unwrap();
    generate(&["--out", again.path().to_str().unwrap()]).unwrap();
    run(Command::new("diff").arg("-r").args([clients, again.path()])).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let of_go = fs::read_to_string(clients.join("go/kplanev1/doc.go")).unwrap();
    assert!(of_go.ends_with(&format!("const Version = \"{version}\"\n")));
    let check = "import sys, importlib.metadata as m, kplane_api; files = list(map(str, m.files('kplane-api'))); \
                 assert kplane_api.__version__ == m.version('kplane-api') == sys.argv[1], m.version('kplane-api'); \
                 assert {'kplane_api/py.typed', 'kplane_api/v1/desired_pb2.pyi'} < set(files), files";
    run(Command::new(python).args(["-c", check, version])).unwrap();
}

#[tokio::test]
async fn the_python_example_prints_a_node_and_its_changes_with_a_token_over_tls() {
    let Some(python) = python() else {
        return;
    };
    let certs = Certs::new(&["node-1"], &["alice"]);
    let write = |name: &str, text: &str| {
        fs::write(certs.file(name), text).unwrap();
        certs.file(name).display().to_string()
    };
    let tokens = write("tokens.csv", "secret,tool,1\nother,stranger,2\n");
    let rules = "rules: [{users: [tool], verbs: [get], paths: [/kplane/desired/node-1]}]";
    let rules = write("rules.yaml", rules);
    let mut flags = tls(&certs);
    flags.push(format!("--token-auth-file={tokens}"));
    flags.push(format!("--authorization-file={rules}"));
    let plane = Plane::start(flags).await;
    let token = |text: &str| {
        let file = write(&format!("token-{text}"), &format!("{text}\n"));
        let ca = certs.file("ca.crt").display().to_string();
        ["--ca", &ca, "--token-file", &file].map(str::to_owned)
    };

    let client = Client::start(watch_node(python, &plane.server(), &token("secret")));
    client.prints(&["+ shop/other:http/TCP (IPV4) 10.96.0.99:80 -> 10.244.9.9:8080"]);
    let local = ("10.244.1.5", "node-1");
    plane.put("web", &manifest("web", 10, &[local]));
    let web = "shop/web:http/TCP (IPV4)";
    let added = format!("+ {web} 10.96.0.10:80 -> 10.244.1.5:8080; on this node 10.244.1.5:8080");
    client.prints(&[&added]);
    plane.put(
        "web",
        &manifest("web", 10, &[local, ("10.244.2.7", "node-2")]),
    );
    client.prints(&[&format!(
        "~ {web} 10.96.0.10:80 -> 10.244.1.5:8080 10.244.2.7:8080; on this node 10.244.1.5:8080"
    )]);
    plane.remove("web");
    client.prints(&[&format!("- {web}")]);

    let said = refused(&watch_node(python, &plane.server(), &token("other")));
    assert!(said.starts_with("PERMISSION_DENIED"), "{said}");
    assert!(said.contains("/kplane/desired/node-1"), "{said}");
}

#[tokio::test]
async fn the_python_example_continues_after_a_restart_of_the_control_plane() {
    let Some(python) = python() else {
        return;
    };
    let mut plane = Plane::start(Vec::new()).await;
    let client = Client::start(watch_node(python, &plane.server(), &[]));
    client.until("+ shop/other");
    plane.put("web", &manifest("web", 10, &[("10.244.2.7", "node-2")]));
    client.prints(&["+ shop/web:http/TCP (IPV4) 10.96.0.10:80 -> 10.244.2.7:8080"]);
    // A control plane that is away deletes nothing, and nothing is printed twice.
    plane.program = None;
    plane.put("web", &manifest("web", 10, &[("10.244.2.8", "node-2")]));
    plane.run().await;
    client.prints(&["~ shop/web:http/TCP (IPV4) 10.96.0.10:80 -> 10.244.2.8:8080"]);
}

#[tokio::test]
async fn the_go_example_prints_a_node_and_its_changes_with_a_certificate() {
    let Some(program) = go() else {
        return;
    };
    let certs = Certs::new(&["node-1"], &["alice"]);
    let plane = Plane::start(tls(&certs)).await;
    let pair = certs.pair("users/alice");
    let flags: Vec<String> = [
        ("-ca", certs.file("ca.crt")),
        ("-certificate", pair.certificate),
        ("-key", pair.key),
    ]
    .into_iter()
    .flat_map(|(flag, file)| [flag.to_owned(), file.display().to_string()])
    .collect();
    let client = Client::start(watch_in_go(&program, &plane.server(), &flags));
    let web = "  shop/web:http/TCP/IPV4 10.96.0.10:80 ->";
    client.until("shop/other:http/TCP/IPV4");
    plane.put("web", &manifest("web", 10, &[("10.244.2.7", "node-2")]));
    client.until(&format!("{web} 10.244.2.7:8080"));
    plane.put("web", &manifest("web", 10, &[("10.244.2.8", "node-2")]));
    client.until(&format!("{web} 10.244.2.8:8080"));
    plane.remove("web");
    client.until("node-1 at revision");
    client.prints(&["  shop/other:http/TCP/IPV4 10.96.0.99:80 -> 10.244.9.9:8080"]);
    plane.put("web", &manifest("web", 10, &[("10.244.2.9", "node-2")]));
    // Nothing was printed of the Service that was gone.
    let next = client.until("");
    assert!(next.starts_with("node-1 at revision"), "{next}");
}
