//! `kpctl get drops`: packets that NetworkPolicies denied.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use kplane_proto::v1 as pb;
use tokio::time::{Instant, sleep};

use super::{Verdict, connect, listing, output};
use crate::args::Cli;
use crate::args::drops::DropsArgs;
use crate::failure::Failure;
use crate::watch::Link;
use kplane_view::drops::FollowedView;

/// Pause between two questions of `--follow`.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs the command.
pub(super) async fn run(cli: &Cli, args: &DropsArgs) -> Result<Verdict, Failure> {
    if args.follow {
        return follow(cli, args.request()?, args.within).await;
    }
    listing::ask(cli, "drops", &args.request()?).await
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
            Ok(client) => client.follow_drops(request.clone()).await,
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
