//! The authority of a control plane that makes its own certificates gets a successor: agents are connected meanwhile,
//! changes come, and agents connect again and again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::cluster::Api;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};
use tonic::Code;

use crate::cluster::identity::{pod_token, tidy};
use crate::cluster::support::secure::{Following, OWN_NAME, SecurePlane};
use crate::cluster::support::with_world;
use crate::cluster::support::world::{DEADLINE, NAMESPACE, product};

const SECRET: &str = "kplane/kplane-certificates";
/// Pause between two changes.
const PAUSE: Duration = Duration::from_millis(500);

/// An authority, and a certificate of it for the control plane.
struct Successor(PathBuf);

impl Successor {
    fn make(folder: &Path) -> Result<Self> {
        let certs = folder.join("successor");
        let mut command = Command::new(&product()?.control_plane);
        command.args(["certs", "init", "--host", OWN_NAME]).arg(&certs);
        let made = command.output()?;
        ensure!(made.status.success(), "{made:?}");
        Ok(Self(certs))
    }

    fn read(&self, file: &str) -> Result<String> {
        fs::read_to_string(self.0.join(file)).context("a file of the successor")
    }

    /// Returns the change of the Secret by which clients learn of the successor.
    fn published(&self) -> Result<Value> {
        Ok(json!({ "stringData": {
            "next-ca.crt": self.read("ca.crt")?, "next-ca.key": self.read("ca.key")?,
        }}))
    }

    /// Returns the change of the Secret after which the successor signs.
    fn signing(&self, predecessor: &str) -> Result<Value> {
        Ok(json!({
            "data": { "next-ca.crt": null, "next-ca.key": null },
            "stringData": {
                "ca.crt": self.read("ca.crt")?, "ca.key": self.read("ca.key")?,
                "tls.crt": self.read("server.crt")?, "tls.key": self.read("server.key")?,
                "previous-ca.crt": predecessor,
            },
        }))
    }
}

/// Returns the authorities that agents accept.
fn bundle(api: &Api) -> Result<String> {
    let map = api.get("ConfigMap", "kplane/kplane-ca")?;
    let bundle = map.and_then(|map| Some(map["data"]["ca.crt"].as_str()?.to_owned()));
    bundle.context("no bundle")
}

/// Makes a Service, and notes its name.
fn change(api: &Api, made: &mut Vec<String>) -> Result<()> {
    std::thread::sleep(PAUSE);
    let name = format!("rotation-{}", made.len());
    api.create(&json!({
        "kind": "Service", "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": { "ports": [{ "port": 80 }] },
    }))?;
    made.push(name);
    Ok(())
}

/// Wants a stream to be open, and all Services to have come.
fn has_missed_nothing(stream: &Following, made: &[String]) -> Result<()> {
    eventually(DEADLINE, "no change is missed", || {
        let seen = stream.services();
        let missed: Vec<_> = made.iter().filter(|name| !seen.contains(*name)).collect();
        ensure!(missed.is_empty(), "{missed:?} of {}", made.len());
        anyhow::Ok(())
    })?;
    ensure!(!stream.is_over(), "the stream has ended");
    Ok(())
}

pub(crate) fn the_authority_gets_a_successor_while_agents_work() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let trusted = world.cluster.folder().join("rotation");
        fs::create_dir_all(&trusted)?;
        let start = |replica| SecurePlane::start_own(world, replica, &trusted);
        let token = pod_token(api, "kplane-nodeagent", "agent-1", "node-1", "kplane")?;
        let other = pod_token(api, "kplane-nodeagent", "agent-2", "node-2", "kplane")?;
        let greets = |plane: &SecurePlane, trusted: &Path| {
            let code = plane.caller_who_trusts(trusted, &other).hello("node-2")?;
            ensure!(code == Code::Ok, "{code:?}");
            anyhow::Ok(())
        };
        let first = start(0)?;
        eventually(DEADLINE, "the control plane serves", || {
            fs::write(trusted.join("ca.crt"), bundle(api)?)?;
            greets(&first, &trusted)
        })?;
        let old = bundle(api)?;
        let agent = first.caller_who_trusts(&trusted, &token);
        let stream = agent.speak_for("node-1")?.context("a stream")?.follow();

        // The successor is published. A replica that starts does it at once.
        let successor = Successor::make(&trusted)?;
        api.patch("Secret", SECRET, &successor.published()?)?;
        let second = start(1)?;
        let (mut made, mut failed) = (Vec::new(), None);
        let both = eventually(DEADLINE, "the successor is published", || {
            change(api, &mut made)?;
            failed = failed.take().or(greets(&first, &trusted).err());
            let both = bundle(api)?;
            ensure!(both.contains(&old) && both != old, "{both}");
            anyhow::Ok(both)
        })?;
        fs::write(trusted.join("ca.crt"), both)?;
        eventually(DEADLINE, "the other replica serves", || {
            greets(&second, &trusted)
        })?;

        // It signs: the old authority stays in the bundle.
        api.patch("Secret", SECRET, &successor.signing(&old)?)?;
        for plane in [&first, &second] {
            eventually(DEADLINE, "the successor signs", || {
                change(api, &mut made)?;
                let known = greets(&first, &trusted).and_then(|()| greets(&second, &trusted));
                failed = failed.take().or(known.err());
                let strict = plane.caller_who_trusts(&successor.0, &other);
                ensure!(
                    strict.speak_for("node-2")?.is_ok(),
                    "the old authority signs"
                );
                anyhow::Ok(())
            })?;
        }
        failed.map_or(Ok(()), Err)?;
        has_missed_nothing(&stream, &made)?;
        tidy(api)
    })
}
