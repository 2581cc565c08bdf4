//! A deterministic simulation of control planes and agents.
//!
//! A seed chooses a small cluster and what happens to it. Index, store, sessions, the agents' client, desired state,
//! engine and cache format are the product's; the API server, the network and the kernels are scripted, and time stands
//! still between events. After each event the invariants I1 to I5 are checked against an oracle. The same seed does the
//! same again, except for the wall clock, by which nothing is ordered.
//!
//! In every other seed nodes enforce NetworkPolicies, in nf_tables in memory below the real driver. Policies of all kinds,
//! Namespaces, Pods and their addresses change, and a sample of packets is asked of each kernel and of `reference.rs`, which
//! is written from the text of the API. Exchanges with the tables fail, other programs damage them with and without a report
//! of the kernel, and agents die in the midst of a change. The invariants N1 to N3 are about these.
//!
//! Clients connect to every endpoint of a kernel after each change, and the agent's tracker says which of these connections
//! would be deleted: C1 is about them.
//!
//! ```text
//! cargo test -p kp-nodeagent --test simulation -- --seeds 10000     seeds 0, 1, ..
//! cargo test -p kp-nodeagent --test simulation -- --seed 7          one seed, and the story of it
//! ```
//!
//! Replicas start with old or incomplete lists and with other flags, lag, stop or lose the API server. Operators freeze nodes. Connections are slow, stall, break
//! or fall silent. Agents freeze, crash and start from an old or torn cache file, and kernels refuse changes. In one seed of four, links
//! between machines break as well, and replicas look for dead nodes. Half of the seeds play some groups of such steps only, since
//! few kinds of steps lead further (`plan.rs`). Agents and replicas of other versions lack capabilities, and such agents give their
//! tables of NetworkPolicies another layout. Pods end whose preStop hooks ask, and kernels say whether they may (H1). Sources speak as reflectors do: what these make of replays, of lists that are older
//! and of versions that expire is tested beside them. Besides I1 to I5, no node is suspected that others
//! reach, every update adds up to its digest, no agent asks for streams without a pause, and no task panics. All
//! random waits come from `model/src/chance.rs`, and loops poll their events in a fixed order (`biased`), so that a
//! seed repeats everything. Deliberate faults in `faults/` show that the simulation finds what it must.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test program")]

mod agent;
mod connections;
mod dice;
mod kernel;
mod ledger;
mod links;
mod oracle;
mod plan;
mod reference;
mod replica;
mod run;
mod source;
mod truth;
mod wire;
mod world;
mod written;

use std::process::ExitCode;

use run::Options;

/// Seeds of an ordinary `cargo test`. `cargo xtask test` plays more.
const SEEDS: u64 = 1_000;

fn main() -> ExitCode {
    let mut options = Options {
        seeds: SEEDS,
        from: 0,
        only: None,
        brief: false,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let place = match &*arg {
            "--brief" => {
                options.brief = true;
                continue;
            }
            "--seeds" => &mut options.seeds,
            "--from" => &mut options.from,
            "--seed" => options.only.insert(0),
            // The test has one name. Flags of other test programs mean nothing here.
            other if other.starts_with('-') || "simulation".contains(other) => continue,
            _ => return ExitCode::SUCCESS,
        };
        let number = args.next().and_then(|number| number.parse().ok());
        let Some(number) = number else {
            eprintln!("{arg} needs a number");
            return ExitCode::from(2);
        };
        *place = number;
    }
    run::all(&options)
}
