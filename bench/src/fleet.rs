//! `cargo xtask fleet`: a fleet of a size that a user plans, and what happens to it. `cargo xtask bench`: fleets of
//! fixed sizes, and floods beside them. Control planes and simulated agents share the machine.

mod api;
mod cursors;
mod floods;
mod simulator;
mod sizes;
pub(crate) mod table;

use std::ffi::OsString;

use anyhow::Result;
use clap::Parser as _;
use kplane_tests::fleet::apart;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

pub(crate) fn main(words: &[OsString]) -> Result<()> {
    let args = simulator::Args::parse_from(words);
    kplane_tests::userns::isolate()?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    if let [agents] = *args.cursors {
        return cursors::measure(agents, args.services);
    }
    if !args.cursors.is_empty() {
        return cursors::run(&args);
    }
    let Some(agents) = args.agents else {
        return sizes::run();
    };
    let (command, text) = if args.api_server {
        ("cargo xtask fleet --api-server", api::run(&args, agents)?)
    } else {
        let text = apart(simulator::run(&args, agents))?;
        ("cargo xtask fleet", text)
    };
    if args.write {
        table::write(command, &text)?;
    }
    Ok(())
}
