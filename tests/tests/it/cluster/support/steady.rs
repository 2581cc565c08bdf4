//! A destination that must be there all the time, whatever happens to the API.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use kplane_tests::netns::NetNs;

use super::world::reaches;

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// Looks at a kernel until it is stopped.
pub(crate) struct Steady {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<u32>>,
}

impl Steady {
    /// Watches the endpoints of a destination of TCP, which never change.
    pub(crate) fn watch(ns: &NetNs, to: (IpAddr, u16), endpoints: BTreeSet<IpAddr>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (ns, stopped) = (ns.clone(), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let mut looks = 0;
            while !stopped.load(Ordering::Relaxed) {
                let now = reaches(&ns, to)?;
                ensure!(now == endpoints, "{to:?} led to {now:?} at look {looks}");
                looks += 1;
                thread::sleep(PAUSE);
            }
            Ok(looks)
        });
        Self { stop, thread }
    }

    /// Ends it; fails if the destination was ever anything else.
    pub(crate) fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let looks = self.thread.join().map_err(|_| anyhow!("it panicked"))??;
        ensure!(looks > 0, "nobody looked");
        Ok(())
    }
}
