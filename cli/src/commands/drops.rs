//! `kpctl drops`: packets that NetworkPolicies denied.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use kplane_proto::v1 as pb;
use tokio::time::{Instant, sleep};

use super::{Verdict, connect, output, show};
use crate::args::Cli;
use crate::args::drops::DropsArgs;
use crate::failure::Failure;
use crate::watch::Link;
use kplane_view::drops::{DropsView, FollowedView};

/// Pause between two questions of `--follow`.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs the command.
pub(super) async fn run(cli: &Cli, args: &DropsArgs) -> Result<Verdict, Failure> {
    let request = args.request()?;
    if args.follow {
        return follow(cli, request, args.within).await;
    }
    let answer = connect(cli).await?.0.drops(request, false).await?;
    let view = DropsView::from(answer);
    show(cli, &view)?;
    Ok(verdict(view.is_complete()))
}

/// Asks every second, and shows what is new.
async fn follow(
    cli: &Cli,
    mut request: pb::DropsRequest,
    within: Duration,
) -> Result<Verdict, Failure> {
    // A number that nobody else has, and not 0.
    request.follower = RandomState::new().hash_one(std::process::id()) | 1;
    let end = Instant::now() + within;
    let mut link = Link::new(connect(cli).await?);
    let mut output = output(cli, false);
    let mut last: Option<FollowedView> = None;
    loop {
        let client = link.client().await;
        let answer = match client {
            Ok(client) => client.drops(request.clone(), true).await,
            Err(error) => Err(error),
        };
        match answer {
            Ok(answer) => {
                link.prove();
                let mut view = FollowedView::from(answer);
                if view.is_news(last.as_ref()) {
                    output.show(&view)?;
                }
                last = Some(view);
            }
            Err(error) => link.outage(error, &mut output).await?,
        }
        if Instant::now() + PAUSE >= end {
            return Ok(verdict(last.is_some_and(|last| last.is_complete())));
        }
        sleep(PAUSE).await;
    }
}

fn verdict(is_complete: bool) -> Verdict {
    if is_complete { Verdict::Done } else { Verdict::Unanswered }
}
