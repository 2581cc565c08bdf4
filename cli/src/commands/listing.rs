//! `kpctl get` of the kinds that the API declares.

use std::time::Duration;

use prost_reflect::prost::Message;
use prost_reflect::{DynamicMessage, Value};
use tokio::time::sleep;

use super::{Verdict, connect, output, sorted};
use crate::args::{Cli, KindArgs};
use crate::client::{Client, Error};
use crate::failure::Failure;
use crate::output::Extent;
use crate::watch::Link;
use kplane_view::declared::{Listing, ListingView};

/// Time between two questions of `--watch`.
const PAUSE: Duration = Duration::from_secs(1);

/// Shows the list of a kind that answers a request.
pub(super) async fn ask(cli: &Cli, word: &str, request: &impl Message) -> Result<Verdict, Failure> {
    match KindArgs::asking(word, request) {
        Some(args) => run(cli, &args).await,
        None => Err(Failure::Refused(format!(
            "the API declares no list of {word}: update {}",
            cli.program
        ))),
    }
}

/// Shows a list. With --watch it asks again every second, and shows what is new.
pub(super) async fn run(cli: &Cli, args: &KindArgs) -> Result<Verdict, Failure> {
    let mut link = Link::new(connect(cli).await?);
    let mut output = output(cli, false);
    let mut request = args.request.clone();
    let mut is_first = true;
    loop {
        let answer = match link.client().await {
            Ok(client) => client.list(args.listing, request.clone(), args.service.as_ref()).await,
            Err(error) => Err(error),
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) if args.watch => {
                link.outage(error, &mut output).await?;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        link.prove();
        let about = args.service.as_ref().map(ToString::to_string);
        let view = ListingView::new(args.listing, about, answer, is_first);
        let (last, is_complete) = (view.last(), view.is_complete());
        if is_first || last.is_some() {
            output.show(&sorted(view, &args.rows)?)?;
        }
        if !args.watch {
            return Ok(if is_complete { Verdict::Done } else { Verdict::Unanswered });
        }
        is_first = false;
        output.set(Extent {
            headers: false,
            ..cli.extent()
        });
        if let Some(last) = last {
            request.set_field_by_name(&args.listing.declared.after, Value::U64(last));
        }
        sleep(PAUSE).await;
    }
}

/// Returns a list of everything of a kind, as much as the server gives at once.
pub(super) async fn all(client: &Client, listing: &'static Listing) -> Result<ListingView, Error> {
    let mut request = DynamicMessage::new(listing.method.input());
    if let Some(limit) = listing.method.input().get_field_by_name("limit") {
        request.set_field(&limit, Value::U32(u32::MAX));
    }
    let answer = client.list(listing, request, None).await?;
    Ok(ListingView::new(listing, None, answer, true))
}
