//! Applies changes of the configuration file while the agent runs (I3). kube-proxy exits instead, so
//! that its supervisor starts it again.
//!
//! The engine plans again with the new settings (`Engine::configure`).

mod watch;

use std::sync::Arc;

use tokio::sync;

use crate::config::kube_proxy::{Level, resolve};
use crate::config::{ConfigError, Loaded, Loader};
use crate::engine::Engine;
use kplane_dataplane::plan::NodeSettings;
use kplane_kube_proxy_config::listed;
use kplane_kube_proxy_config::{KubeProxyConfiguration, change};

use self::watch::FileWatch;

/// The configuration in effect. Parts of the agent that can follow changes subscribe to it.
pub type Effective = sync::watch::Sender<Arc<KubeProxyConfiguration>>;

/// Follows the file for as long as the agent runs.
pub async fn run(loader: Loader, effective: Effective, engine: Engine) {
    let path = loader.path().to_owned();
    let shown = path.display();
    let mut watch = match FileWatch::new(&path) {
        Ok(watch) => watch,
        Err(error) => {
            tracing::warn!(
                %error,
                "cannot watch {shown}; restart the agent to apply changes of the file"
            );
            return;
        }
    };
    let mut reloader = Reloader::new(loader);
    loop {
        // The first check needs no event: the file may have changed since it was read for the start.
        if let Some(settings) = reloader.look(&effective) {
            engine.configure(settings);
        }
        watch.changed().await;
    }
}

/// Reads the file again and decides what to do about it.
#[derive(Debug)]
struct Reloader {
    loader: Loader,
    /// The result of the last check, so that touching the file causes no log line.
    last: Option<Result<KubeProxyConfiguration, ConfigError>>,
}

impl Reloader {
    fn new(loader: Loader) -> Self {
        Self { loader, last: None }
    }

    /// Returns new settings for the engine, if there are any. The configuration in effect changes
    /// with them.
    fn look(&mut self, effective: &Effective) -> Option<NodeSettings> {
        let loaded = self.loader.load().map_err(|problems| ConfigError { problems });
        let outcome = loaded.as_ref().map(|loaded| loaded.config.clone()).map_err(Clone::clone);
        let running = effective.borrow().clone();
        if !self.is_news(outcome, &running) {
            return None;
        }
        match loaded {
            Ok(loaded) => self.take_over(&running, &loaded, effective),
            Err(error) => {
                self.refuse(&error);
                None
            }
        }
    }

    /// Returns whether the result of a check differs from the last one.
    fn is_news(
        &mut self,
        outcome: Result<KubeProxyConfiguration, ConfigError>,
        running: &KubeProxyConfiguration,
    ) -> bool {
        let is_news = match &self.last {
            Some(last) => *last != outcome,
            None => outcome.as_ref().ok() != Some(running),
        };
        self.last = Some(outcome);
        is_news
    }

    fn take_over(
        &self,
        running: &KubeProxyConfiguration,
        loaded: &Loaded,
        effective: &Effective,
    ) -> Option<NodeSettings> {
        let change = change(running, &loaded.config);
        let mut settings = match resolve(&change.effective) {
            Ok(settings) => settings,
            Err(problems) => {
                // Changed fields that need a restart may conflict with changed fields that do not.
                let named = problems.into_iter().map(|problem| problem.in_file(self.loader.path()));
                let problems = named.collect();
                self.refuse(&ConfigError { problems });
                return None;
            }
        };
        let path = self.loader.path().display();
        let notes = loaded.lenient.iter().chain(&loaded.notes);
        for warning in notes.filter(|note| note.level == Level::Warning) {
            tracing::warn!("{}", warning.text);
        }
        if !change.needs_restart.is_empty() {
            tracing::warn!(
                fields = listed(&change.needs_restart),
                "{path} has changed: restart the agent to apply these fields; until then their old \
                 values apply"
            );
        }
        if change.applied.is_empty() {
            if change.needs_restart.is_empty() {
                tracing::info!("{path} matches the configuration in effect again");
            }
            return None;
        }
        tracing::info!(
            fields = listed(&change.applied),
            "{path} has changed: these fields are applied"
        );
        effective.send_replace(Arc::new(change.effective));
        settings.node.nodeport_primary = loaded.settings.node.nodeport_primary;
        Some(settings.node)
    }

    fn refuse(&self, error: &ConfigError) {
        for problem in &error.problems {
            tracing::error!(
                "{problem} (the agent ignores the file and keeps the old configuration)"
            );
        }
    }
}

#[cfg(test)]
mod tests;
