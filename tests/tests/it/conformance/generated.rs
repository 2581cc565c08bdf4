//! The generated cases of `tests/netns`, in which every two values of any two parameters go together.

use kplane_model::Protocol;

use crate::conformance::scenario::{Scenario, Step, admissible};
use kplane_tests::support::fate::Packet;
use kplane_tests::support::model::{Affinity, Asker, Case, Choice};
use kplane_tests::support::model_objects::objects;
use kplane_tests::support::model_pairs::choices;
use kplane_tests::support::{Question, Setup};

/// Always the same cases, so that a difference stays where it is.
const SEED: u64 = 36;
/// Number of the first; below are Services of the API server's own.
const FIRST: u16 = 10;

/// All of them. Each is asked by everybody with its own settings, and with the usual ones.
pub(crate) fn scenarios() -> Vec<Scenario> {
    let all = choices(SEED, 0);
    (FIRST..).zip(all).map(|(number, choice)| scenario(choice, number)).collect()
}

fn scenario(choice: Choice, number: u16) -> Scenario {
    let case = choice.case();
    let mut step = Step::named(format!("generated {choice}"), 0);
    step.objects = objects(&case, number).into_iter().map(admissible).collect();
    step.words = case.to_string();
    for asker in Asker::ALL {
        let asked = Case {
            asker: *asker,
            ..case
        };
        let possible = *asker != Asker::NodeFromVip || case.place.is_load_balancer();
        // An INIT needs a look at all pods: only by whom the case names.
        let cheap = case.protocol != Protocol::Sctp || *asker == case.asker;
        if possible && cheap {
            step.packets.push(packet(&asked, number));
        }
    }
    Scenario {
        setups: vec![case.setup, Setup::PodRanges],
        steps: vec![step],
    }
}

fn packet(case: &Case, number: u16) -> Packet {
    let question = Question::new(case.asker.client(), case.protocol, case.address(number));
    let packet = Packet::new(question.source(case.source(number)));
    match case.affinity {
        Affinity::None => packet,
        Affinity::ClientIp => packet.sticky(),
    }
}
