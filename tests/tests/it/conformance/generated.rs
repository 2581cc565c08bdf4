//! The generated cases of `tests/netns`, in which every two values of any two parameters go together.

use kplane_model::Protocol;

use crate::conformance::fate::Packet;
use crate::conformance::scenario::Scenario;
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
    let mut scenario = Scenario::new(format!("generated {choice}")).objects(objects(&case, number));
    scenario.words = case.to_string();
    scenario.setups = vec![case.setup, Setup::PodRanges];
    for asker in Asker::ALL {
        let asked = Case {
            asker: *asker,
            ..case
        };
        let possible = *asker != Asker::NodeFromVip || case.place.is_load_balancer();
        // An INIT needs a look at all pods: only by whom the case names.
        let cheap = case.protocol != Protocol::Sctp || *asker == case.asker;
        if possible && cheap {
            scenario.packets.push(packet(&asked, number));
        }
    }
    scenario
}

fn packet(case: &Case, number: u16) -> Packet {
    let question = Question::new(case.asker.client(), case.protocol, case.address(number));
    let packet = Packet::new(question.source(case.source(number)));
    match case.affinity {
        Affinity::None => packet,
        Affinity::ClientIp => packet.sticky(),
    }
}
