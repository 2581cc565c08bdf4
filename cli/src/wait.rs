//! Waiting for Services. During an outage the last answer stays, until the time is over.

use std::io::Write;

use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use tokio::time::{Instant, timeout_at};

use crate::client::{ConvergenceStream, Error};
use crate::failure::Failure;
use crate::output::{Output, Progress};
use crate::watch::Link;
use kplane_view::convergence::ConvergenceView;
use kplane_view::goal::{Goal, Threshold};

/// A command that waits, and shows on a terminal how far it is.
pub(crate) struct Waiter<W> {
    link: Link,
    deadline: Instant,
    output: Output<W>,
    progress: Progress,
}

impl<W: Write> Waiter<W> {
    /// Waits until `deadline` at most.
    pub(crate) fn new(link: Link, deadline: Instant, output: Output<W>) -> Self {
        Self {
            link,
            deadline,
            output,
            progress: Progress::stderr(),
        }
    }

    /// Waits until enough nodes have reached the goal, and returns the last answer about the Service: there is at
    /// least one, even when the time is over.
    pub(crate) async fn until(
        &mut self,
        name: &ServiceName,
        goal: Goal,
        threshold: Threshold,
    ) -> Result<ConvergenceView, Failure> {
        let mut stream = None;
        let mut last: Option<ConvergenceView> = None;
        loop {
            let asked = next(&mut self.link, &mut stream, name);
            // The first answer has a limit of its own.
            let answer = match &last {
                None => Ok(asked.await),
                Some(_) => timeout_at(self.deadline, asked).await,
            };
            let is_over = Instant::now() >= self.deadline;
            match answer {
                Ok(Ok(answer)) => {
                    let view = ConvergenceView::from(answer);
                    if is_over || view.has_reached(goal, threshold) {
                        return Ok(view);
                    }
                    self.progress.show(&view.short_line());
                    last = Some(view);
                }
                Ok(Err(error)) if last.is_none() && is_over => return Err(error.into()),
                Ok(Err(error)) => {
                    stream = None;
                    self.progress.clear();
                    self.link.outage(error, &mut self.output).await?;
                }
                Err(_) => {}
            }
            if let Some(last) = last.take_if(|_| Instant::now() >= self.deadline) {
                return Ok(last);
            }
        }
    }
}

/// Returns the next answer about a Service, on a new stream if there is none.
async fn next(
    link: &mut Link,
    stream: &mut Option<ConvergenceStream>,
    name: &ServiceName,
) -> Result<pb::Convergence, Error> {
    let stream = match stream {
        Some(stream) => stream,
        None => stream.insert(link.client().await?.watch_convergence(name).await?),
    };
    let answer = stream.next().await?;
    link.prove();
    Ok(answer)
}
