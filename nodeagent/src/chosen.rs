//! Runs an agent, and starts it anew whenever the control plane chooses other settings.

use tokio_util::sync::CancellationToken;

use crate::app::{self, Bound, BuildError, Ended, TaskError};
use crate::config::Config;
use crate::fleet_settings::Choice;
use kplane_dataplane::chain;

/// The reason why an agent ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// It could not start.
    #[error(transparent)]
    Start(#[from] BuildError),
    /// A part of it failed.
    #[error(transparent)]
    Run(#[from] TaskError),
}

/// Runs until the token is cancelled; `started` sees each start.
///
/// # Errors
/// [`Failed`].
pub async fn run(
    config: &Config,
    stop: &CancellationToken,
    mut started: impl FnMut(&Bound),
) -> Result<(), Failed> {
    let mut choice = Choice::recall(config.cache_dir.as_deref(), &config.node_name);
    let mut before = Choice::none();
    while let Some(bound) = start(config, &mut choice, &before, stop).await? {
        choice.save();
        started(&bound);
        let shutdown = bound.shutdown_token();
        let ended = bound.wait();
        tokio::pin!(ended);
        let ended = tokio::select! {
            ended = &mut ended => ended,
            () = stop.cancelled() => {
                shutdown.cancel();
                ended.await
            }
        };
        match ended? {
            Ended::Stopped => break,
            Ended::Resumed => before = choice.clone(),
            Ended::Again(wish) => {
                tracing::info!(
                    ?wish,
                    "the control plane chose other settings: starting anew with them"
                );
                before = choice;
                choice = before.after(wish);
            }
        }
    }
    Ok(())
}

/// Starts the agent with the settings that the control plane chose, or else with those before; returns `None` if it is
/// to stop.
async fn start(
    config: &Config,
    choice: &mut Choice,
    before: &Choice,
    stop: &CancellationToken,
) -> Result<Option<Bound>, BuildError> {
    loop {
        let bound = tokio::select! {
            // The start may be waiting for an earlier agent.
            () = stop.cancelled() => return Ok(None),
            bound = app::build_chosen(config.clone(), choice.clone()) => bound,
        };
        match bound {
            Err(error) if choice.in_force() != before.in_force() => {
                *choice = choice.instead(before, &chain(&error));
            }
            bound => return bound.map(Some),
        }
    }
}
