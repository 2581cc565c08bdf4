//! The lease: as long as the agent renews it, the chain leads to the proxy.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kplane_model::{Cidr, Family};
use kplane_netlink::ipset::{Command, Entry, IpSets};

use super::perform;
use super::sets::{SetId, entries};

/// Time between two renewals: three may be late before the lease ends.
const RENEW: Duration = Duration::from_millis(250);

/// A lease of one family. A thread renews it until this object is dropped; then it ends within a second.
#[derive(Debug)]
pub(super) struct Lease {
    /// The thread ends when this is gone.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Lease {
    /// Starts the lease in this thread's network namespace.
    ///
    /// # Errors
    /// The kernel's refusal: no lease holds.
    pub(super) fn start(family: Family) -> Result<Self, String> {
        let mut sets = IpSets::open().map_err(|error| error.to_string())?;
        renew(&mut sets, family)?;
        let (end, ended) = channel();
        let work = move || {
            let mut fails = false;
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(RENEW) {
                let renewed = renew(&mut sets, family);
                if let (Err(problem), false) = (&renewed, fails) {
                    tracing::warn!(
                        %family,
                        problem,
                        "cannot renew the lease of the userspace proxy; the kernel serves its Services meanwhile"
                    );
                }
                fails = renewed.is_err();
            }
        };
        let thread = thread::Builder::new().name("lease".to_owned()).spawn(work);
        Ok(Self {
            end: Some(end),
            thread: Some(thread.map_err(|error| error.to_string())?),
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked renews nothing either.
            let _ = thread.join();
        }
    }
}

fn renew(sets: &mut IpSets, family: Family) -> Result<(), String> {
    let name = SetId::Lease.name(family);
    let all: Vec<Entry> = entries(Cidr::everything(family));
    let add: Vec<Command<'_>> = all.iter().map(|entry| Command::Add(name, *entry)).collect();
    perform(sets, &add)
}
