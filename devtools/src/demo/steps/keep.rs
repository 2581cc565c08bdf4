//! Keeps the demo running, so that the user can inspect it.

use std::env;
use std::io::{Read as _, stdin};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_rig::process::Process;
use kplane_rig::userns::Entry;

use super::super::interrupt::{self, Interrupted};
use super::super::screen::{Screen, Tone};
use super::super::stage::Stage;
use super::super::world::Role;
use super::load::star;

/// Prints how to enter the namespaces, and waits for Ctrl-C.
pub(crate) fn wait(screen: &Screen, stage: &Stage, entry: Entry) -> Result<()> {
    let inside = |pid: u32| match entry {
        Entry::Privileged => format!("nsenter -t {pid} -n"),
        Entry::UserNamespace => format!("nsenter -t {pid} -U -n --preserve-credentials"),
    };
    let line = |what: &str, command: String| {
        screen.line(format!("  {}", screen.paint(Tone::Faint, what)));
        screen.line(format!("    {command}"));
    };
    screen.gap();
    screen.line(screen.paint(Tone::Strong, "Everything is still running. Look inside:"));
    let pids = stage.cast.pids();
    let programs = stage.cast.programs();
    if let Some((_, pid)) = pids.first() {
        let kpctl = programs.kpctl.display();
        line(
            "the fleet, as it changes",
            format!("{} {kpctl} status --watch", inside(*pid)),
        );
        line(
            "one Service",
            format!("{} {kpctl} get services", inside(*pid)),
        );
    }
    if let Some((node, pid)) = pids.get(1) {
        let rules = format!("{} nft list table ip kplane", inside(*pid));
        line(&format!("the rules of {node}"), rules);
    }
    let holders = holders(stage)?;
    for (who, holder) in &holders {
        line(who, format!("{} bash", inside(holder.id())));
    }
    if let Some(service) = star(&stage.objects, None).map(|port| &port.port) {
        let (ip, port) = (service.cluster_ip, service.port);
        let what = format!("in there: who answers for {}?", service.key.service);
        line(&what, format!("head -1 < /dev/tcp/{ip}/{port}"));
    }
    let manifests = stage.manifests().display().to_string();
    line("manifests: edit them, and watch the fleet", manifests);
    line("logs", stage.cast.logs().display().to_string());
    let all: Vec<String> = pids
        .iter()
        .map(|(name, pid)| format!("{name} {pid}"))
        .collect();
    line("processes", all.join(", "));
    screen.gap();
    screen.line(screen.paint(Tone::Strong, "Ctrl-C ends it and cleans up."));
    screen.flush();
    loop {
        if let Err(Interrupted) = interrupt::sleep(Duration::from_secs(60)) {
            interrupt::clear();
            return Ok(());
        }
    }
}

/// Starts processes whose only purpose is to be in the namespaces of callers, so that these have a
/// process id.
fn holders(stage: &Stage) -> Result<Vec<(String, Process)>> {
    let mut holders = Vec::new();
    for role in [Role::Client, Role::Pod] {
        let mut callers = stage.world.callers.iter();
        if let Some(caller) = callers.find(|caller| caller.role == role) {
            let mut command = Command::new(env::current_exe().context("find this program")?);
            command.arg("hold").stdin(Stdio::piped());
            let who = match role {
                Role::Pod => format!("a shell in a pod on {}", caller.node),
                _ => format!(
                    "a shell on a client outside, which sends via {}",
                    caller.node
                ),
            };
            holders.push((who, caller.ns.command(command)?));
        }
    }
    Ok(holders)
}

/// Does nothing until standard input ends, which happens when the parent process ends.
pub(crate) fn hold() -> ExitCode {
    let mut nothing = Vec::new();
    // The result does not matter: standard input has ended.
    let _ = stdin().read_to_end(&mut nothing);
    ExitCode::SUCCESS
}
