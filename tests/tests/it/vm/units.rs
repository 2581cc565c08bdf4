//! The unit file of an agent alone, under the machine's own systemd.

use std::env;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use kplane_tests::client::Probe;
use kplane_tests::client::Protocol;
use kplane_tests::echo::Pool;
use kplane_tests::link::Route;
use kplane_tests::netns::NetNs;
use kplane_tests::process::{Process, output};
use kplane_tests::wait::eventually;

use crate::vm::node::PATIENCE;
use crate::vm::{MACHINE, NODE_AGENT};

const UNIT: &str = "kp-nodeagent-standalone.service";
const KUBELET: &str = "kubelet.service";
const NFTABLES: &str = "nftables.service";
/// What the machine starts instead of all that it has.
const TARGET: &str = "kplane-test.target";
const SYSTEM: &str = "/etc/systemd/system";
/// The endpoint, on the machine itself.
const POD: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);
const SERVICE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 80)), 80);
/// Parts of a start that this test does not need and that take long here.
const MASKED: [&str; 8] = [
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
    "systemd-journal-flush.service",
    "systemd-tmpfiles-setup.service",
    "systemd-tmpfiles-setup-dev.service",
    "systemd-sysusers.service",
    "systemd-binfmt.service",
    "systemd-timesyncd.service",
];
/// A kubelet that needs a Service.
const NEEDS: &str = "\
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'until busybox nc -w 1 10.96.0.80 80 </dev/null | grep -q web; do sleep 0.1; done'
";
const OBJECTS: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.96.0.80, clusterIPs: [10.96.0.80], ipFamilies: [IPv4], ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.244.1.1], conditions: {ready: true}}]
";

/// systemd starts the agent before kubelet, with nftables.service beside it, which removes all tables whenever it
/// starts again. The agent comes back when it is killed.
pub(crate) fn a_unit_serves_before_kubelet_and_after_nftables_and_agent_start_again() -> Result<()>
{
    let machine = MACHINE.get().context("no machine")?;
    let netlink = machine.netlink()?;
    netlink.add_address("lo", POD.into(), 32)?;
    netlink.add_route(&Route::to("10.96.0.0/16".parse()?).dev("lo").source(POD.into()))?;
    let pool = Pool::new()?;
    let _server = pool.serve(
        machine,
        "web",
        Protocol::Tcp,
        SocketAddr::new(POD.into(), 8080),
    )?;
    install()?;
    let systemd = Systemd::start(machine)?;
    let probe = Probe::tcp(SERVICE);
    let served = |what: &str| eventually(PATIENCE, what, || probe.reply(machine));
    systemd.active(&[UNIT, KUBELET, NFTABLES])?;
    served("the Service answers")?;
    let [agent, kubelet] = [UNIT, KUBELET].map(|unit| systemd.started(unit));
    ensure!(agent? <= kubelet?, "kubelet started before the agent");

    let before = systemd.pid()?;
    systemd.ctl(&["restart", NFTABLES])?;
    served("nftables.service has started again")?;
    ensure!(systemd.pid()? == before, "the agent started again");

    systemd.ctl(&["kill", "--signal", "KILL", UNIT])?;
    eventually(PATIENCE, "another agent", || {
        let now = systemd.pid()?;
        ensure!(now != before && now != "0", "process {now}");
        Ok::<_, anyhow::Error>(())
    })?;
    served("the agent has started again")?;
    systemd.active(&[UNIT])?;
    systemd.ctl(&["stop", UNIT])?;
    probe.reply(machine).context("the agent has been stopped")?;
    Ok(())
}

/// Installs programs and units as the archive has them; all changes end with the machine.
fn install() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let units = root.context("a checkout")?.join("deploy/systemd");
    let system = Path::new(SYSTEM);
    fs::copy(units.join(UNIT), system.join(UNIT)).context("copy the unit")?;
    fs::write(system.join(KUBELET), NEEDS)?;
    let wants = format!("[Unit]\nWants={UNIT} {KUBELET} {NFTABLES}\n");
    fs::write(system.join(TARGET), wants)?;
    for unit in MASKED {
        symlink("/dev/null", system.join(unit)).with_context(|| unit.to_owned())?;
    }
    let agent = env::var_os(NODE_AGENT).context(NODE_AGENT)?;
    // Not a link: the unit must not see home directories.
    fs::copy(agent, "/usr/local/bin/kp-nodeagent").context("copy the agent")?;
    fs::create_dir_all("/etc/kplane/services")?;
    fs::write("/etc/kplane/services/web.yaml", OBJECTS)?;
    let options = "KPLANE_OPTIONS=--manifests /etc/kplane/services --node-name node-1 \
                   --cluster-cidr 10.244.0.0/16\n";
    fs::write("/etc/kplane/kp-nodeagent.env", options)?;
    Ok(())
}

/// systemd, as the first process of a PID namespace.
struct Systemd {
    unshare: Process,
}

impl Systemd {
    fn start(machine: &NetNs) -> Result<Self> {
        let mut command = Command::new("unshare");
        command
            .args(["--fork", "--pid", "--kill-child", "--mount-proc"])
            .args(["/lib/systemd/systemd", "--system", "--unit", TARGET])
            .env("container", "kplane-test")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let unshare = machine.command(command)?;
        Ok(Self { unshare })
    }

    /// Waits until units are active, and says of one that is not why.
    fn active(&self, units: &[&str]) -> Result<()> {
        for unit in units {
            let good = eventually(PATIENCE, &format!("{unit} is active"), || {
                self.ctl(&["is-active", unit])
            });
            if let Err(error) = good {
                let status = self.ctl(&["status", "--no-pager", "--full", unit]);
                bail!("{error}\n{status:?}");
            }
        }
        Ok(())
    }

    fn started(&self, unit: &str) -> Result<u64> {
        let text = self.show("ExecMainStartTimestampMonotonic", unit)?;
        let time = text.parse();
        time.with_context(|| format!("{unit} started at {text}"))
    }

    fn pid(&self) -> Result<String> {
        self.show("MainPID", UNIT)
    }

    fn show(&self, property: &str, unit: &str) -> Result<String> {
        let text = self.ctl(&["show", "--property", property, "--value", unit])?;
        Ok(text.trim().to_owned())
    }

    /// Runs systemctl where systemd sees its process, or it refuses the call.
    fn ctl(&self, words: &[&str]) -> Result<String> {
        let pid = self.unshare.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        let first = children.split_whitespace().next().context("no systemd")?;
        let mut command = Command::new("nsenter");
        command.args(["--target", first, "--pid", "--mount", "systemctl"]).args(words);
        output(command)
    }
}
