//! `kpctl rollout`: settings of the fleet, for a few nodes first.

use std::io::IsTerminal as _;
use std::time::Duration;

use kplane_proto::v1 as pb;
use tokio::time::sleep;

use super::{Verdict, connect, show};
use crate::args::Cli;
use crate::args::rollout::RolloutCommand;
use crate::client::Client;
use crate::failure::Failure;
use kplane_view::rollout::RolloutView;

/// Interval between two questions about a rollout that is under way.
const LOOK: Duration = Duration::from_secs(1);

/// Returns one line for a person who waits.
fn progress(rollout: &pb::Rollout) -> String {
    format!(
        "step {} of {}: {} of {} nodes healthy",
        rollout.step + 1,
        rollout.percentages.len(),
        rollout.healthy,
        rollout.covered
    )
}

/// Runs a command.
pub(crate) async fn run(cli: &Cli, command: &RolloutCommand) -> Result<Verdict, Failure> {
    let (client, _) = connect(cli).await?;
    let (rollout, wait) = match command {
        RolloutCommand::Start(args) => (client.change_rollout(args.request()).await?, args.wait),
        RolloutCommand::Status { wait } => (client.rollout().await?, *wait),
        RolloutCommand::Stop { reason } => {
            let stop = pb::ChangeRolloutRequest {
                change: Some(pb::change_rollout_request::Change::Stop(pb::StopRollout {})),
                reason: reason.clone(),
            };
            (client.change_rollout(stop).await?, false)
        }
    };
    if !wait {
        return show(cli, &RolloutView::from(rollout));
    }
    let last = until_ended(&client, rollout).await?;
    let good = last.stage() != pb::RolloutStage::Back;
    show(cli, &RolloutView::from(last))?;
    Ok(if good {
        Verdict::Done
    } else {
        Verdict::NotReached
    })
}

async fn until_ended(client: &Client, mut rollout: pb::Rollout) -> Result<pb::Rollout, Failure> {
    let mut told = String::new();
    while rollout.stage() == pb::RolloutStage::Running {
        let step = progress(&rollout);
        if step != told && std::io::stderr().is_terminal() {
            anstream::eprintln!("{step}");
            told = step;
        }
        sleep(LOOK).await;
        rollout = client.rollout().await?;
    }
    Ok(rollout)
}
