//! The answer to one hook.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kplane_model::Family;
use kplane_proto::v1::LeavingOutcome;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::pods::Known;
use super::request::{Asked, MAX_HEAD};
use super::{DepartureQuestion, original};
use crate::metrics::{DepartingCounters, DepartingOutcome as Outcome};

/// Longest time for a request's head, and for taking the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause before a question is asked again after its stream has ended.
const AGAIN: Duration = Duration::from_millis(200);

/// What answers need.
#[derive(Debug)]
pub(super) struct Answering {
    pub(super) within: Duration,
    pub(super) known: watch::Receiver<Known>,
    pub(super) ask: mpsc::Sender<DepartureQuestion>,
    pub(super) counters: Arc<DepartingCounters>,
}

impl Answering {
    /// Answers a hook, at once if there is no room for one that waits.
    pub(super) async fn answer(&self, mut stream: TcpStream, family: Family, has_room: bool) {
        let began = Instant::now();
        let pod = original(&stream, family);
        let Ok(Some(head)) = timeout(PATIENCE, read_head(&mut stream)).await else {
            return;
        };
        let Some(asked) = Asked::read(&head) else {
            let text = "only /gone is here: preStop hooks of Pods, see kplane's documentation\n";
            return respond(&mut stream, "404 Not Found", text).await;
        };
        let outcome = match has_room {
            true => tokio::select! {
                outcome = self.wait(pod, asked) => outcome,
                // kubelet does not wait any longer.
                () = hung_up(&mut stream) => return,
            },
            false => Outcome::Busy,
        };
        self.counters.observe(outcome, began.elapsed());
        respond(&mut stream, "200 OK", &format!("{}\n", outcome.name())).await;
    }

    /// Waits for the control plane's answer, until the time is over.
    async fn wait(&self, pod: Option<IpAddr>, asked: Asked) -> Outcome {
        let within = asked.within.unwrap_or(self.within);
        let until = Instant::now() + within;
        let addresses = match pod {
            Some(pod) => vec![pod],
            // Pods in the node's own network ask the listener itself.
            None if asked.port > 0 => self.known.borrow().own.clone(),
            None => return Outcome::NoPod,
        };
        loop {
            let (answer, answered) = oneshot::channel();
            let question = DepartureQuestion {
                addresses: addresses.clone(),
                port: asked.port,
                until,
                answer,
            };
            let answered = async {
                self.ask.send(question).await.ok()?;
                answered.await.ok()
            };
            match timeout_at(until, answered).await {
                Ok(Some(LeavingOutcome::Gone)) => return Outcome::Gone,
                Ok(Some(LeavingOutcome::Bound)) => return Outcome::Bound,
                Ok(Some(LeavingOutcome::Last)) => return Outcome::Last,
                Ok(Some(LeavingOutcome::Unspecified)) => {
                    sleep_until(until).await;
                    return Outcome::Busy;
                }
                // The stream has ended.
                Ok(None) => sleep_until((Instant::now() + AGAIN).min(until)).await,
                Err(_) => return Outcome::Alone,
            }
        }
    }
}

/// Reads the head of a request; `None` if it is too long or not complete.
async fn read_head(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut head = Vec::with_capacity(512);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = MAX_HEAD.checked_sub(head.len()).filter(|left| *left > 0)?;
        let read = (&mut *stream).take(left as u64).read_buf(&mut head).await;
        if read.ok()? == 0 {
            return None;
        }
    }
    Some(head)
}

/// Waits until the client has closed the connection.
async fn hung_up(stream: &mut TcpStream) {
    let mut rest = [0; 512];
    while stream.read(&mut rest).await.is_ok_and(|read| read > 0) {}
}

async fn respond(stream: &mut TcpStream, status: &str, text: &str) {
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{text}",
        text.len()
    );
    // The client may have gone.
    let _ = timeout(PATIENCE, stream.write_all(answer.as_bytes())).await;
}
