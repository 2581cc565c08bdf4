//! Processes that end with this one, however it ends.
//!
//! The kernel kills a child when the thread that started it ends (`PR_SET_PDEATHSIG`). Therefore one
//! thread starts all children, and lives as long as they may. `setpriv` of util-linux requests the
//! signal in the child, which safe Rust cannot do. Without `setpriv` only dropping the handle ends a
//! child.

use std::ffi::OsStr;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result};

use crate::netns::NetNs;
use crate::privilege;
use crate::process::Process;

/// The program that requests the signal and then becomes the child's program.
const SETPRIV: &str = "setpriv";

type Order = (Command, Sender<Result<Process>>);

/// Starts children inside a namespace.
#[derive(Debug)]
pub struct Guard {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Guard {
    /// Starts the thread that starts children.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn new(ns: &NetNs) -> Result<Self> {
        let (orders, incoming) = channel();
        Ok(Self {
            thread: Some(ns.spawn(move || serve(&incoming))?),
            orders: Some(orders),
        })
    }

    /// Starts a child from the result of [`command`]. The child is killed when its handle or this
    /// guard is dropped, or when this process ends in any way.
    ///
    /// # Errors
    /// The program could not be started.
    pub fn start(&self, command: Command) -> Result<Process> {
        let (answer, started) = channel();
        let orders = self.orders.as_ref().context("ends when dropped")?;
        orders
            .send((command, answer))
            .context("the thread that starts processes has ended")?;
        started.recv().context("the thread that starts processes has ended")?
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            // The thread does not panic; and even then, everything has been killed.
            let _ = thread.join();
        }
    }
}

fn serve(orders: &Receiver<Order>) {
    for (command, answer) in orders {
        // If the receiver is gone, the child is dropped and so killed.
        let _ = answer.send(Process::start(command));
    }
}

/// Returns a command for [`Guard::start`]: the program by way of `setpriv`, where that is installed.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    if !privilege::is_on_path(SETPRIV) {
        return Command::new(program);
    }
    let mut command = Command::new(SETPRIV);
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}
