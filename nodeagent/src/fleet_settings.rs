//! Settings that the control plane chooses for the node, in place of the agent's own.
//!
//! ```text
//! heartbeat --> Choice::hear --> Bound::wait --> main: starts all parts anew, with the settings over its own
//! ```
//!
//! A rollout (`kpctl rollout`) gives other settings to a share of the nodes. The agent takes them by starting anew
//! inside its process, as with other flags: the kernel's rules stay and serve until the new backend has replaced them.
//! A file keeps the settings, so that a restart without a control plane does not change them back. Settings that the
//! node cannot use are reported to the control plane; the node goes on with those before.

use std::path::{Path, PathBuf};

use kp_controlplane::orders::Settings;
use kplane_model::NodeName;
use kplane_proto::v1 as pb;
use tokio::sync::watch;

use crate::cache;
use kplane_dataplane::backend::Kind;
use kplane_dataplane::backend::iptables::Layout;

/// Greatest bit of the packet mark.
const MAX_BIT: u32 = 31;

/// Longest reason that is reported, in bytes.
const MAX_REASON: usize = 256;

/// Settings in place of the agent's own. Those that are `None` are the agent's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FleetSettings {
    /// The backend.
    pub backend: Option<Kind>,
    /// How a rule of mode iptables finds the Service of an address.
    pub iptables_layout: Option<Layout>,
    /// Bit of the packet mark that asks for masquerading.
    pub masquerade_bit: Option<u8>,
}

impl TryFrom<&pb::Settings> for FleetSettings {
    type Error = String;

    fn try_from(wire: &pb::Settings) -> Result<Self, String> {
        let backend = match wire.backend.as_str() {
            "" => None,
            name => {
                let kind = Kind::named(name).filter(|kind| kind.describe().programs_kernel);
                Some(kind.ok_or_else(|| format!("this agent has no backend {name:?}"))?)
            }
        };
        let iptables_layout = match wire.iptables_layout.as_str() {
            "" => None,
            name => Some(
                Layout::named(name)
                    .ok_or_else(|| format!("this agent has no iptables layout {name:?}"))?,
            ),
        };
        let bit = wire.masquerade_bit.map(|bit| {
            let bit = u8::try_from(bit).ok().filter(|_| bit <= MAX_BIT);
            bit.ok_or_else(|| format!("a packet mark has bits 0 to {MAX_BIT}"))
        });
        Ok(Self {
            backend,
            iptables_layout,
            masquerade_bit: bit.transpose()?,
        })
    }
}

impl From<&FleetSettings> for pb::Settings {
    fn from(settings: &FleetSettings) -> Self {
        let backend = settings.backend.map(|kind| kind.describe().name);
        let layout = settings.iptables_layout.map(Layout::name);
        Self {
            backend: backend.unwrap_or_default().to_owned(),
            iptables_layout: layout.unwrap_or_default().to_owned(),
            masquerade_bit: settings.masquerade_bit.map(u32::from),
        }
    }
}

impl FleetSettings {
    /// Reads a file of settings.
    ///
    /// # Errors
    /// Why the file cannot be used.
    fn read(path: &Path) -> Result<Self, String> {
        let bytes = cache::read(path).map_err(|error| error.to_string())?;
        let written: Settings =
            serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
        Self::try_from(&pb::Settings::from(&written))
    }

    /// Reads all settings in a folder: those of the node's agent, or agents.
    #[must_use]
    pub fn all_in(folder: &Path) -> Vec<Self> {
        let files = cache::settings_files(folder).unwrap_or_default();
        files
            .iter()
            .filter_map(|path| Self::read(path).ok())
            .collect()
    }
}

/// What the control plane chose, and what the node made of it. Clones share the last wish.
#[derive(Clone, Debug)]
pub struct Choice {
    in_force: FleetSettings,
    /// The last wish that cannot be fulfilled, and why.
    refused: Option<(pb::Settings, String)>,
    wish: watch::Sender<Option<pb::Settings>>,
    file: Option<PathBuf>,
}

impl Choice {
    /// Creates a choice that nobody makes, for agents without a file.
    #[must_use]
    pub fn none() -> Self {
        Self {
            in_force: FleetSettings::default(),
            refused: None,
            wish: watch::Sender::default(),
            file: None,
        }
    }

    /// Returns the choice that the file of a node's agent remembers, if it has a folder for that.
    #[must_use]
    pub fn recall(folder: Option<&Path>, node: &NodeName) -> Self {
        let file = folder.map(|folder| cache::settings_file(folder, node));
        let known = file.as_deref().filter(|file| file.exists());
        let known = known.map(FleetSettings::read).transpose();
        let in_force = known.unwrap_or_else(|reason| {
            tracing::warn!(
                reason,
                "cannot use the file of settings that a control plane chose; starting with the agent's own"
            );
            None
        });
        Self {
            in_force: in_force.unwrap_or_default(),
            file,
            ..Self::none()
        }
    }

    /// Returns the settings in force.
    #[must_use]
    pub fn in_force(&self) -> &FleetSettings {
        &self.in_force
    }

    /// Returns the last settings that the control plane wanted and the node cannot use, and why.
    #[must_use]
    pub fn refusal(&self) -> Option<pb::RefusedSettings> {
        let (settings, reason) = self.refused.clone()?;
        Some(pb::RefusedSettings {
            settings: Some(settings),
            reason,
        })
    }

    /// Takes notice of what the control plane wants; asks for a new start if that differs from what is in force.
    pub(crate) fn hear(&self, wanted: Option<&pb::Settings>) {
        let refused = self.refused.as_ref().map(|(wish, _)| wish);
        let news = |wish: &&pb::Settings| {
            refused != Some(*wish) && **wish != pb::Settings::from(&self.in_force)
        };
        if let Some(wish) = wanted.filter(news) {
            self.wish.send_if_modified(|now| {
                let is_new = now.as_ref() != Some(wish);
                *now = Some(wish.clone());
                is_new
            });
        }
    }

    /// Waits until the control plane wants other settings.
    pub(crate) async fn wish(&self) -> pb::Settings {
        let mut wishes = self.wish.subscribe();
        let wish = wishes.wait_for(Option::is_some).await;
        let wish = wish.ok().and_then(|wish| wish.clone());
        match wish {
            Some(wish) => wish,
            None => std::future::pending().await,
        }
    }

    /// Returns the choice after a wish, for the next start.
    #[must_use]
    pub fn after(&self, wish: pb::Settings) -> Self {
        let next = Self {
            wish: watch::Sender::default(),
            ..self.clone()
        };
        match FleetSettings::try_from(&wish) {
            Ok(in_force) => Self {
                in_force,
                refused: None,
                ..next
            },
            Err(reason) => next.refusing(wish, &reason),
        }
    }

    /// Returns the choice to start with if these settings did not work and others were in force before.
    #[must_use]
    pub fn instead(&self, before: &Self, reason: &str) -> Self {
        let wish = pb::Settings::from(&self.in_force);
        Self {
            in_force: before.in_force,
            ..self.clone()
        }
        .refusing(wish, reason)
    }

    fn refusing(self, wish: pb::Settings, reason: &str) -> Self {
        tracing::error!(
            wanted = ?wish,
            reason,
            "the control plane wants settings that this node cannot use; going on with those before"
        );
        let reason = reason[..reason.floor_char_boundary(MAX_REASON)].to_owned();
        Self {
            refused: Some((wish, reason)),
            ..self
        }
    }

    /// Writes the settings to the file, or deletes the file if all are the agent's own.
    pub fn save(&self) {
        let Some(file) = &self.file else {
            return;
        };
        let done = if self.in_force == FleetSettings::default() {
            cache::remove(file)
        } else {
            let written = Settings::from(pb::Settings::from(&self.in_force));
            cache::write(file, |to| Ok(serde_json::to_writer(to, &written)?))
        };
        if let Err(error) = done {
            tracing::warn!(
                file = %file.display(),
                %error,
                "cannot remember the settings that the control plane chose; after a restart this agent begins with its own"
            );
        }
    }
}

#[cfg(test)]
mod tests;
