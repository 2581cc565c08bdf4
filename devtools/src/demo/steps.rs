//! The steps of the walk, in order. Each is a function that shows something and records its checks.
//! An error ends the walk.

mod affinity;
mod connect;
mod fleet;
mod keep;
mod load;
mod restart;
mod roll;
mod start;
mod strike;
mod survey;

use anyhow::Result;

use super::stage::{Show, Stage};

pub(crate) use keep::{hold, wait};
pub(crate) use start::show_nodes;
pub(crate) use strike::strike;

/// One step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// The title of the step.
    pub(crate) title: &'static str,
    /// Runs the step.
    pub(crate) run: fn(&mut Show, &mut Stage) -> Result<()>,
}

const START: Step = Step {
    title: "Start the control plane and an agent on each node",
    run: start::run,
};
const CONNECT: Step = Step {
    title: "Call Services, and see who answers",
    run: connect::run,
};
const AFFINITY: Step = Step {
    title: "Call a Service with session affinity: who comes again meets the same pod",
    run: affinity::run,
};
const SURVEY: Step = Step {
    title: "Call every Service at all its addresses, from everywhere, and compare with the rules",
    run: survey::run,
};
const ROLL: Step = Step {
    title: "Replace the pods of a Service, one by one, under load",
    run: roll::run,
};
const FLEET: Step = Step {
    title: "Ask kpctl",
    run: fleet::run,
};
const RESTART: Step = Step {
    title: "Kill an agent under load, and start it again",
    run: restart::run,
};

/// The walk through `deploy/demo`.
pub(crate) const DEMO: &[Step] = &[START, CONNECT, AFFINITY, SURVEY, ROLL, FLEET, RESTART];

/// The walk through a user's objects.
pub(crate) const OBJECTS: &[Step] = &[START, SURVEY, ROLL, FLEET, RESTART];
