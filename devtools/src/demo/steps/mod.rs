//! The steps of the walk, in order. Each is a function that shows something and records its checks.
//! An error ends the walk.

mod calls;
mod frame;
mod load;

use anyhow::Result;

use super::show::Show;
use super::stage::Stage;

pub(crate) use frame::{clean_up, show_nodes, wait};

/// A step: its title, and the function that runs it.
pub(crate) type Step = (&'static str, fn(&mut Show, &mut Stage) -> Result<()>);

/// The walk through `deploy/demo`. The first step is followed by [`DETAILS`] there, and in a walk
/// through a user's objects by the next.
pub(crate) const WALK: [Step; 5] = [
    (
        "Start the control plane and an agent on each node",
        frame::start,
    ),
    (
        "Call every Service at all its addresses, from everywhere, and compare with the rules",
        calls::survey_all,
    ),
    (
        "Replace the pods of a Service, one by one, under load",
        load::roll,
    ),
    ("Ask kpctl", load::ask_kpctl),
    (
        "Kill an agent under load, and start it again",
        load::restart,
    ),
];

/// Steps that need the objects of `deploy/demo`.
pub(crate) const DETAILS: [Step; 2] = [
    ("Call Services, and see who answers", calls::connect),
    (
        "Call a Service with session affinity: who comes again meets the same pod",
        calls::affinity,
    ),
];
