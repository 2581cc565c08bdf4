//! The fate that `kpctl why` tells, for thousands of generated cases, from Kubernetes objects: compared with the plain
//! model of the rules, which real packets meet as well ([`super::generated`]).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use kplane_desired_state::index::Index;
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::{Batch, Event};
use kplane_model::fate::{self, LocalRule, Masquerade, Outcome, Place, Sender};
use kplane_model::{NodeFacts, ServiceName};
use kplane_tests::support::cluster::zone_name;
use kplane_tests::support::facts;

use kplane_tests::support::Setup;
use kplane_tests::support::cluster::apply;
use kplane_tests::support::fate::Source;
use kplane_tests::support::model::{Affinity, Asker, Case};
use kplane_tests::support::model_fate::{Fate, expect};
use kplane_tests::support::model_objects::objects;
use kplane_tests::support::model_pairs::choices;

/// Enough for all pairs of parameters many times.
const CASES: usize = 20_000;
const NUMBER: u16 = 1;

pub(crate) fn why_tells_the_fate_that_the_rules_say() -> Result<()> {
    let seed = rand::random();
    for choice in choices(seed, CASES) {
        let case = choice.case();
        let expected = expect(&case);
        let reported = reported(&case)?;
        ensure!(
            reported == expected.fate,
            "{case} ({choice}):\ntold {reported:?}\nexpected {expected:?}"
        );
    }
    Ok(())
}

/// What is told of a case, in the words of the model.
fn reported(case: &Case) -> Result<Fate> {
    let mut events: Vec<Event> = Kind::ALL.map(Event::Init).to_vec();
    events.extend(Kind::ALL.map(Event::InitDone));
    for object in objects(case, NUMBER) {
        events.push(apply(&object)?);
    }
    let mut index = Index::default();
    index.apply(Batch {
        events,
        observed_at: SystemTime::UNIX_EPOCH,
    });
    let name = kplane_tests::support::svc(NUMBER).name;
    let detail = index.detail(&ServiceName::new("test", &name), &[]).context("no Service")?;
    let to = case.address(NUMBER);
    let number = case.asker.client().node();
    let node = NodeFacts {
        zone: Some(zone_name(number).into()),
        ..facts(number)?
    };
    let own = node.addresses.contains(&to.ip());
    let place = detail.ports.iter().find_map(|view| {
        let place = Place::find(&view.port, to.ip(), to.port(), own)?;
        Some((view, place))
    });
    let Some((view, place)) = place else {
        return elsewhere(case);
    };
    let setup = settings(case.setup);
    let packet = (place, sender(case));
    let fate = fate::fate(&view.port, &view.endpoints, &node, setup, packet);
    Ok(match fate.outcome {
        Outcome::Reaches => Fate::Reach {
            endpoints: fate
                .chosen
                .iter()
                .map(|to| SocketAddr::new(to.ip, to.port))
                .collect::<BTreeSet<_>>(),
            source: match fate.source {
                fate::Source::Sender => Source::Client,
                fate::Source::Node => Source::Node,
            },
            sticky: case.affinity == Affinity::ClientIp,
        },
        Outcome::Refused => Fate::Refused,
        Outcome::Dropped | Outcome::NotAdmitted => Fate::Dropped,
    })
}

/// A packet to a place that no Service has is not told of: the model alone says what happens to it.
fn elsewhere(case: &Case) -> Result<Fate> {
    use kplane_tests::support::model::Place::{
        LoadBalancerProxy, NodePortNotAllocated, UnusedPort,
    };
    let none = matches!(
        case.place,
        LoadBalancerProxy | NodePortNotAllocated | UnusedPort
    );
    ensure!(none, "{case}: its place is not found");
    Ok(expect(case).fate)
}

fn settings(setup: Setup) -> fate::Setup {
    let masquerade = Masquerade {
        pods_known: setup.knows_pods(),
        all: matches!(
            setup,
            Setup::MasqueradeAll | Setup::MasqueradeAllNoPodRanges
        ),
    };
    fate::Setup {
        masquerade,
        local: LocalRule::BySender,
    }
}

fn sender(case: &Case) -> Sender {
    let ip = Some(case.source(NUMBER));
    match case.asker {
        Asker::Outside => Sender::Outside(ip),
        Asker::PodHere | Asker::PodThere | Asker::Endpoint => Sender::Pod(ip),
        Asker::Node | Asker::NodeFromVip => Sender::Node(ip),
    }
}
