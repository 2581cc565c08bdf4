//! The handover from one agent to the next: the listeners and the connections of the userspace proxy (`userspace.md`, U57).
//!
//! An agent waits at a socket in its run directory. A successor asks there before it claims the node. If a proxy runs,
//! the agent ends its engine, releases the claim, hands over everything that the proxy has open, and exits. An agent that
//! is stopped without a successor goes on with the connections that it has for [`UserspaceSettings::drain`], and hands them over if a
//! successor comes meanwhile.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use kplane_dataplane::backend::userspace::Successor;
use kplane_dataplane::backend::userspace::{Bundle, HandoverError, HandoverListener, Proxy, ask};
use kplane_dataplane::backend::{self, ProxyHandle, UserspaceSettings};
use kplane_model::NodeName;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep};

use crate::cache::SOCKETS;

/// Pause between two checks whether all connections have ended.
const PAUSE: Duration = Duration::from_millis(20);

/// Pause after an error, such as a lack of files.
const AFTER_ERROR: Duration = Duration::from_millis(200);

/// Returns the path of a node's socket. Agents of several nodes may share a folder in tests and demos.
fn socket_path(folder: &Path, node: &NodeName) -> PathBuf {
    folder.join(format!("{SOCKETS}{node}.sock"))
}

/// Asks the agent that runs for everything that its proxy has open, and leaves it for the proxy of this one. Without
/// such an agent, nothing happens.
pub(crate) async fn inherit(settings: &UserspaceSettings, node: &NodeName) {
    let Some(folder) = &settings.run_dir else {
        return;
    };
    // A successor did not take it, and the agent starts anew within its process.
    if settings.inheritance.is_there() {
        return;
    }
    let path = socket_path(folder, node);
    let asked = spawn_blocking(move || ask(&path)).await;
    match asked.map_err(|error| HandoverError::Io(error.into())).flatten() {
        Ok(None) => {}
        Ok(Some(bundle)) => {
            let [listeners, connections, flows] = bundle.counts();
            tracing::info!(
                listeners,
                connections,
                flows,
                "took over from the agent that ran: its connections go on"
            );
            settings.inheritance.put(bundle);
        }
        Err(HandoverError::Refused(why)) => {
            tracing::info!(why, "the agent that runs hands over nothing");
        }
        Err(error) => tracing::warn!(
            %error,
            "the agent that runs handed over nothing; its connections end with it"
        ),
    }
}

/// An agent's readiness to be succeeded.
#[derive(Debug, Default)]
pub(crate) struct Handover {
    settings: UserspaceSettings,
    /// `None` if no successor can ask.
    successors: Option<mpsc::Receiver<Successor>>,
    /// The task that accepts successors.
    tasks: JoinSet<()>,
}

impl Handover {
    /// Opens the socket at which successors ask.
    pub(crate) fn open(settings: &UserspaceSettings, node: &NodeName) -> Self {
        let mut handover = Self {
            settings: settings.clone(),
            ..Self::default()
        };
        let Some(folder) = &settings.run_dir else {
            return handover;
        };
        let path = socket_path(folder, node);
        match HandoverListener::open(&path).and_then(register) {
            Ok(listener) => {
                let (found, successors) = mpsc::channel(1);
                handover.tasks.spawn(accept(Arc::new(listener), found));
                handover.successors = Some(successors);
            }
            Err(error) => tracing::warn!(
                %error,
                path = %path.display(),
                "cannot open the socket at which the next agent takes over connections of the userspace proxy; they will \
                 end with this agent. Check --run-dir"
            ),
        }
        handover
    }

    /// Waits for a successor while a proxy runs. Without one there is nothing to hand over: two agents on a node are a
    /// mistake then. Safe to cancel.
    pub(crate) async fn successor(&mut self, proxy: &ProxyHandle) -> Successor {
        loop {
            let successor = self.next_successor().await;
            if proxy.get().is_some() {
                return successor;
            }
            // It fails if the process that asked has ended.
            let _ = successor.refuse("it has no userspace proxy that runs, and stays");
        }
    }

    async fn next_successor(&mut self) -> Successor {
        let successor = match &mut self.successors {
            Some(successors) => successors.recv().await,
            None => None,
        };
        match successor {
            Some(successor) => successor,
            None => std::future::pending().await,
        }
    }

    /// Hands everything over; returns whether the successor has it. If not, the next agent in this process gets it.
    pub(crate) async fn hand_over(
        &self,
        proxy: Option<Arc<dyn backend::Proxy>>,
        to: Successor,
    ) -> bool {
        match give(proxy.and_then(whole), to).await {
            None => true,
            Some(bundle) => {
                self.settings.inheritance.put(bundle);
                false
            }
        }
    }

    /// Waits until all connections have ended, a successor has taken them, or the time is over.
    pub(crate) async fn drain(&mut self, proxy: Option<Arc<dyn backend::Proxy>>) {
        let patience = self.settings.drain;
        if patience.is_zero() {
            return;
        }
        let Some(proxy) = proxy.and_then(whole) else {
            return;
        };
        let deadline = Instant::now() + patience;
        let open = || proxy.open()[0];
        if open() > 0 {
            tracing::info!(
                connections = open(),
                "connections of the userspace proxy go on until they end or another agent takes them over, for up to \
                 {patience:?}"
            );
        }
        while open() > 0 && Instant::now() < deadline {
            tokio::select! {
                () = sleep(PAUSE) => {}
                successor = self.next_successor() => match give(Some(proxy.clone()), successor).await {
                    None => return,
                    Some(bundle) => proxy.take_back(bundle),
                }
            }
        }
        if open() > 0 {
            tracing::warn!(
                connections = open(),
                "connections of the userspace proxy are cut: --drain-timeout is over"
            );
        }
    }
}

/// Registers a socket with the runtime.
fn register(listener: HandoverListener) -> std::io::Result<AsyncFd<HandoverListener>> {
    #[allow(
        deprecated,
        reason = "its unsafe successor is about descriptors that may be closed or swapped; a Door's is not"
    )]
    AsyncFd::new(listener)
}

/// Accepts successors. A process that is none is logged and forgotten.
async fn accept(listener: Arc<AsyncFd<HandoverListener>>, found: mpsc::Sender<Successor>) {
    loop {
        let Ok(mut ready) = listener.readable().await else {
            return;
        };
        let at = listener.clone();
        match spawn_blocking(move || at.get_ref().accept()).await {
            Ok(Ok(Some(successor))) => {
                if found.send(successor).await.is_err() {
                    return;
                }
            }
            Ok(Ok(None)) => ready.clear_ready(),
            Ok(Err(error)) => {
                tracing::warn!(%error, "refused a process that asked for the connections of the userspace proxy");
                sleep(AFTER_ERROR).await;
            }
            Err(_) => return,
        }
    }
}

/// Returns a proxy as what only a handover has to know.
fn whole(proxy: Arc<dyn backend::Proxy>) -> Option<Arc<Proxy>> {
    (proxy as Arc<dyn Any + Send + Sync>).downcast().ok()
}

/// Takes everything out of a proxy.
async fn pack(proxy: Option<Arc<Proxy>>) -> Bundle {
    let Some(proxy) = proxy else {
        return Bundle::default();
    };
    // An error means that the runtime ends.
    let packed = spawn_blocking(move || proxy.pack()).await;
    packed.unwrap_or_default()
}

/// Hands everything over; returns it if that fails.
async fn give(proxy: Option<Arc<Proxy>>, to: Successor) -> Option<Bundle> {
    let bundle = pack(proxy).await;
    let [listeners, connections, flows] = bundle.counts();
    match spawn_blocking(move || to.give(bundle)).await {
        Ok(Ok(())) => {
            tracing::info!(
                listeners,
                connections,
                flows,
                "another agent has taken over, with all connections; this one ends"
            );
            None
        }
        Ok(Err((bundle, error))) => {
            tracing::warn!(%error, "another agent asked for the connections and did not take them: this one goes on");
            Some(bundle)
        }
        Err(_) => None,
    }
}
