//! The program as people start it: exit codes, messages, signals.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{ChildStderr, Command, Output, Stdio};

use kplane_rig::process::Process;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80}]}
";

fn binary(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kp-nodeagent"));
    command
        .args(args)
        .env_remove("RUST_LOG")
        .env_remove("NODE_NAME")
        .env_remove("KPLANE_CONTROL_PLANE")
        .stderr(Stdio::piped());
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_wrong_configuration_is_one_line_and_exit_code_1() {
    let cases: [&[&str]; 5] = [
        &[],
        &["--control-plane", "192.0.2.1"],
        &["--masquerade-bit", "77", "--control-plane", "[::1]"],
        &["--cluster-cidr", "x", "--control-plane", "[::1]"],
        &[
            "--standalone",
            "--backend",
            "noop",
            "--manifests",
            "/no/such/folder",
        ],
    ];
    for args in cases {
        let output = binary(args).output().unwrap();
        let stderr = stderr(&output);
        let lines: Vec<_> = stderr.lines().collect();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        assert_eq!(lines.len(), 1, "{args:?}: {stderr}");
        assert!(lines[0].starts_with("kp-nodeagent: "), "{stderr}");
    }
    assert_eq!(
        binary(&["--help"]).stdout(Stdio::null()).status().unwrap().code(),
        Some(0)
    );
}

/// As in kplane's other programs. For --check-config, 2 would say that there are warnings only.
#[test]
fn a_flag_that_does_not_exist_is_exit_code_2_with_a_hint() {
    let typos = [
        ("--standalonee", "'--standalone'"),
        ("--clusterr-cidr=x", "'--cluster-cidr'"),
        ("--clusterr_cidr=x", "'--cluster-cidr'"),
    ];
    for (typo, meant) in typos {
        let output = binary(&[typo]).output().unwrap();
        let stderr = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{typo}: {stderr}");
        let hint = format!("tip: a similar argument exists: {meant}");
        assert!(stderr.contains(&hint), "{typo}: {stderr}");
    }
    let output = binary(&["--check-config", "--standalonee"]).output();
    assert_eq!(output.unwrap().status.code(), Some(1));
}

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

/// A folder with a configuration file and a manifest, and their paths.
fn folder(fields: &str) -> (TempDir, String, String) {
    let folder = TempDir::new().unwrap();
    fs::create_dir(folder.path().join("manifests")).unwrap();
    fs::write(folder.path().join("manifests/web.yaml"), SERVICE).unwrap();
    fs::write(folder.path().join("config.conf"), format!("{HEAD}{fields}")).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (config, manifests) = (path("config.conf"), path("manifests"));
    (folder, config, manifests)
}

/// An agent that runs, and its log.
struct Running {
    child: Process,
    log: std::io::Lines<BufReader<ChildStderr>>,
}

impl Running {
    /// Standalone, without a kernel.
    fn start(config: &str, manifests: &str, flags: &[&str]) -> Self {
        let own = ["--standalone", "--manifests", manifests, "--backend=noop"];
        let mut command = binary(&own);
        command
            .args(["--status-bind-address=", "--cache-dir=", "--config", config])
            .args(flags)
            .env("NODE_NAME", "of-environment");
        Self::spawn(command)
    }

    fn spawn(command: Command) -> Self {
        let mut child = Process::start(command).unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, log }
    }

    /// Lines of the log up to one that says `wanted`, with it.
    fn until(&mut self, wanted: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for line in self.log.by_ref() {
            lines.push(line.unwrap());
            if lines.last().unwrap().contains(wanted) {
                return lines;
            }
        }
        panic!("no line says {wanted:?}: {lines:#?}");
    }

    fn stop(mut self) {
        self.child.signal(Signal::SIGTERM).unwrap();
        self.until("the rules stay");
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn i7_a_wrong_file_is_one_line_for_each_problem_and_exit_code_1() {
    let (_folder, config, manifests) = folder(
        "mode: nftables\nnftables: {syncPeriod: -1s}\noomScoreAdj: 2000\nconntrack: {min: x}\n",
    );
    let args = [
        "--standalone",
        "--manifests",
        &manifests,
        "--config",
        &config,
    ];
    let output = binary(&args).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let expected: String = [
        "conntrack.min: \"x\": must be a whole number from -2147483648 to 2147483647",
        "nftables.syncPeriod: -1s: must be greater than 0",
        "oomScoreAdj: 2000: must be from -1000 to 1000",
    ]
    .iter()
    .map(|line| format!("kp-nodeagent: {config}: {line}\n"))
    .collect();
    assert_eq!(stderr(&output), expected);
}

#[test]
fn i1_what_is_written_is_read_and_written_again_as_the_same() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (first, second) = (path("first"), path("second"));
    let kubeadm = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/kube-proxy-config/tests/data/kubeadm.conf"
    );
    for (from, to) in [(kubeadm, &first), (&*first, &second)] {
        let output = binary(&["--config", from, "--write-config-to", to]).output().unwrap();
        assert_eq!(
            (output.status.code(), stderr(&output)),
            (Some(0), String::new())
        );
    }
    let written = fs::read_to_string(first).unwrap();
    assert!(
        written.contains("  tcpEstablishedTimeout: 24h0m0s\n"),
        "{written}"
    );
    assert_eq!(written, fs::read_to_string(second).unwrap());
    let nowhere = binary(&["--write-config-to", "/no/such/file"]).output().unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(stderr(&nowhere).contains("/no/such/file: cannot be written: No such file"));
}

#[test]
fn i1_help_mentions_the_groups() {
    let output = binary(&["--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for text in [
        "Configuration file:",
        "Rules:",
        "Connection tracking:",
        "Accepted for compatibility with kube-proxy, without effect:",
        "--config <FILE>",
        "[alias: --node-name]",
        "KPLANE_CONTROL_PLANE",
    ] {
        assert!(help.contains(text), "{text}: {help}");
    }
    assert!(!help.contains("--windows-service"));
}

/// I5: one line until the set-up is there, and exit code 0.
#[test]
fn i5_init_only_ends() {
    let output = binary(&["--init-only", "--conntrack-max-per-core=0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

/// The command line of kubeadm's DaemonSet; where the control plane is comes from the environment.
#[test]
fn i1_i2_kube_proxys_command_line_starts_an_agent() {
    let (_folder, config, _) = folder("mode: ipvs\nhealthzBindAddress: 127.0.0.1:0\n");
    let mut command = binary(&["--config", &config, "--hostname-override=Node-7", "--v=2"]);
    command
        .args([
            "--backend=noop",
            "--iptables-masquerade-bit=3",
            "--cache-dir=",
        ])
        .env("KPLANE_CONTROL_PLANE", "http://127.0.0.1:1");
    let mut agent = Running::spawn(command);
    let lines = agent.until("agent starts").join("\n");
    for text in [
        "node=node-7",
        "--iptables-masquerade-bit",
        "mode ipvs: Kubernetes has deprecated it",
    ] {
        assert!(lines.contains(text), "{text}: {lines}");
    }
    agent.stop();
}

#[test]
fn i3_the_log_level_follows_the_file_and_the_rest_is_said() {
    let fields = "mode: nftables\nhealthzBindAddress: 127.0.0.1:0\noomScoreAdj: 444\n";
    let (folder, config, manifests) = folder(fields);
    let mut agent = Running::start(&config, &manifests, &[]);
    let started = agent.until("update applied").join("\n");
    assert!(started.contains("node=of-environment"), "{started}");
    assert!(!started.contains("DEBUG"), "{started}");
    let score = fs::read_to_string(format!("/proc/{}/oom_score_adj", agent.child.id()));
    assert_eq!(
        score.unwrap().trim(),
        "444",
        "raising it needs no privilege"
    );

    let next = folder.path().join("next");
    let write = |fields: &str| {
        fs::write(&next, format!("{HEAD}{fields}")).unwrap();
        fs::rename(&next, &config).unwrap();
    };
    write("mode: nftables\nconntrack: [1]\n");
    let refused = agent.until("keeps the old configuration").join("\n");
    assert!(
        refused.contains("conntrack: must be a mapping, not a list"),
        "{refused}"
    );
    write(&format!(
        "{fields}logging: {{verbosity: 6}}\nconntrack: {{min: 7}}\n"
    ));
    let applied = agent.until("these fields are applied");
    let restart = applied.iter().find(|line| line.contains("restart the agent"));
    assert!(restart.unwrap().contains("conntrack.min"), "{applied:?}");
    assert!(
        applied.last().unwrap().contains("logging.verbosity"),
        "{applied:?}"
    );
    // What the control plane says every few seconds is logged now.
    agent.until("TRACE");
    agent.stop();
}

/// Exit code and standard output.
fn check_config(config: &str) -> (Option<i32>, String) {
    let mut command = binary(&["--check-config", "--config", config]);
    let output = command.stdout(Stdio::piped()).output().unwrap();
    let stdout = String::from_utf8(output.stdout.clone()).unwrap();
    (output.status.code(), stdout)
}

/// A file without a mode means something else to kube-proxy.
#[test]
fn i7_what_a_file_means_is_told_before_it_counts() {
    let (_folder, config, _) = folder("clusterCIDR: 10.0.0.0/8\n");
    let (code, stdout) = check_config(&config);
    assert_eq!(code, Some(2), "{stdout}");
    let warning = stdout
        .lines()
        .find(|l| l.starts_with("warning: mode is not set"))
        .unwrap_or_else(|| panic!("{stdout}"));
    for part in ["No longer served: ", "127.0.0.1", "nodePortAddresses: ["] {
        assert!(warning.contains(part), "{part}: {warning}");
    }
    let (_folder, config, _) = folder("mode: iptables\nclusterCIDR: 10.0.0.0/8\n");
    let (code, stdout) = check_config(&config);
    assert_eq!(code, Some(0), "{stdout}");
    let (_folder, config, _) = folder("mode: wrong\n");
    assert_eq!(check_config(&config), (Some(1), String::new()));
}

#[test]
fn cleanup_is_safe_twice() {
    for _ in 0..2 {
        let output = binary(&["--cleanup", "--backend", "noop"]).output().unwrap();
        assert_eq!(
            (output.status.code(), stderr(&output)),
            (Some(0), String::new())
        );
    }
}

#[test]
fn signals_end_the_program_in_order() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("web.yaml"), SERVICE).unwrap();
    let folder = folder.path().to_str().unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut child = binary(&["--standalone", "--manifests", folder, "--backend", "noop"])
            .args([
                "--healthz-bind-address",
                "127.0.0.1:0",
                "--metrics-bind-address",
                "127.0.0.1:0",
                "--status-bind-address",
                "",
            ])
            .args(["--log-format", "json", "--node-name", "n1", "--cache-dir="])
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let applied = log.find(|line| line.as_ref().unwrap().contains("update applied"));
        let line: serde_json::Value = serde_json::from_str(&applied.unwrap().unwrap()).unwrap();
        assert_eq!(line["fields"]["services"], 1, "{line}");
        kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
        let rest: Vec<_> = log.map(Result::unwrap).collect();
        assert!(
            rest.iter().any(|line| line.contains("the rules stay")),
            "{rest:?}"
        );
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}

/// A folder that cannot be made stands for disks that are full or read-only.
#[test]
fn a_cache_that_cannot_be_written_is_one_warning() {
    let folder = TempDir::new().unwrap();
    let manifests = folder.path().join("manifests");
    fs::create_dir(&manifests).unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    fs::write(manifests.join("web.yaml"), SERVICE).unwrap();
    let mut child = binary(&["--standalone", "--backend=noop", "--manifests"])
        .arg(&manifests)
        .args([
            "--node-name=n1",
            "--status-bind-address=",
            "--healthz-bind-address=",
        ])
        .args(["--metrics-bind-address=", "--cache-dir"])
        .arg(file.join("below"))
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let says = |line: &str| line.contains("cannot write the cache");
    let first = log.by_ref().map(|line| line.unwrap()).find(|line| says(line));
    assert!(first.is_some_and(|line| line.contains("WARN")));
    // It is written once more at the end.
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    let rest: Vec<_> = log.map(|line| line.unwrap()).collect();
    assert!(!rest.iter().any(|line| says(line)), "{rest:#?}");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
