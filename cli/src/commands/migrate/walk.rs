//! The walk from node to node: look, do the next step, look again.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::gather::Cluster;
use crate::failure::Failure;
use crate::migrate::cleanup::Purpose;
use crate::migrate::order::Order;
use crate::migrate::plan::{self, Blocked, Step, Waiting};
use crate::migrate::pods::PodState;
use crate::migrate::record::{Direction, Record, Stopped};
use crate::migrate::snapshot::{Mark, Objects as Gathered, Snapshot};
use kplane_view::time::human;

/// Least time between two readings of the cluster. In large clusters, where reading takes long, the pause is as long as
/// the reading.
const PAUSE: Duration = Duration::from_secs(1);
/// Names of what a walk waits for besides nodes.
const CONTROL_PLANE: &str = "control plane";
const API_SERVER: &str = "API server";

pub(super) struct Walk<'a, 'b> {
    cluster: &'a mut Cluster<'b>,
    order: Order,
    limit: Duration,
    /// The image of cleanup pods, if it is not the agents'.
    image: Option<&'a str>,
    /// The nodes on their way, since when this walk knows, and the last reason that was printed.
    since: BTreeMap<String, (Instant, String)>,
    /// The time since which the cluster cannot be read.
    blind: Option<Instant>,
    /// The time since which a change fails.
    stuck: Option<Instant>,
    begun: bool,
}

/// The end of a walk.
pub(super) struct End {
    pub(super) snapshot: Snapshot,
    /// Why not all chosen nodes are where they should be.
    pub(super) problem: Option<Blocked>,
}

impl<'a, 'b> Walk<'a, 'b> {
    pub(super) fn new(
        cluster: &'a mut Cluster<'b>,
        order: Order,
        limit: Duration,
        image: Option<&'a str>,
    ) -> Self {
        Self {
            cluster,
            order,
            limit,
            image,
            since: BTreeMap::new(),
            blind: None,
            stuck: None,
            begun: false,
        }
    }

    /// Walks to the end, or until something is in the way.
    pub(super) async fn run(mut self) -> Result<End, Failure> {
        loop {
            let looked = Instant::now();
            let Some(objects) = self.look().await? else {
                sleep(PAUSE).await;
                continue;
            };
            let mut snapshot = Snapshot::from(&objects);
            if !self.begun {
                self.begin(&mut snapshot).await?;
            }
            let step = plan::next(&snapshot, &self.order);
            self.forget_arrived(&step);
            match self.act(&step, &objects, &snapshot).await {
                // Another program changed the object in between: look again.
                Err(Failure::Client(crate::client::Error::Route(error))) if error.is_conflict() => {
                }
                Err(error) if self.waits_to_write(&error) => sleep(PAUSE).await,
                Err(error) => return Err(error),
                Ok(Some(ended)) => {
                    return Ok(End {
                        snapshot,
                        problem: ended.problem,
                    });
                }
                Ok(None) => self.stuck = None,
            }
            if matches!(step, Step::Wait(_)) {
                sleep(PAUSE.max(looked.elapsed())).await;
            }
        }
    }

    /// Reads the cluster; `None` if that is not possible at the moment. The control plane may be on the very node that
    /// moves.
    async fn look(&mut self) -> Result<Option<Gathered>, Failure> {
        let objects = match self.cluster.gather().await {
            Ok(objects) => objects,
            Err(error) if self.begun && self.tolerates(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        let needs_plane = self.order.direction == Direction::ToKplane && self.begun;
        if let (Some(Err(error)), true) = (&objects.fleet, needs_plane) {
            let since = *self.blind.get_or_insert_with(Instant::now);
            if since.elapsed() < self.limit {
                tell_once(&mut self.since, CONTROL_PLANE, error);
                return Ok(None);
            }
            return Ok(Some(objects));
        }
        self.blind = None;
        Ok(Some(objects))
    }

    /// Returns whether to try again after a change failed, which a cluster that can be read does not excuse for ever.
    fn waits_to_write(&mut self, error: &Failure) -> bool {
        let since = *self.stuck.get_or_insert_with(Instant::now);
        let waits = error.is_transient() && since.elapsed() < self.limit;
        if waits {
            tell_once(&mut self.since, API_SERVER, &error.to_string());
        }
        waits
    }

    /// Returns whether to try again after an error.
    fn tolerates(&mut self, error: &Failure) -> bool {
        let since = *self.blind.get_or_insert_with(Instant::now);
        error.is_transient() && since.elapsed() < self.limit
    }

    /// Ends a pause, and what an earlier walk reported.
    async fn begin(&mut self, snapshot: &mut Snapshot) -> Result<(), Failure> {
        if plan::blocked(snapshot, &self.order).is_some() {
            return Ok(());
        }
        if self.image.is_some() {
            // Cleanup pods that have not started have the image from before.
            for node in snapshot
                .nodes
                .iter_mut()
                .filter(|node| matches!(node.cleanup, PodState::Waiting { .. }))
            {
                self.cluster.delete_cleanup(&node.name).await?;
                node.cleanup = PodState::Leaving;
            }
        }
        let Some(set) = &mut snapshot.kube_proxy else {
            self.begun = true;
            return Ok(());
        };
        if let Some(record) = &mut set.record {
            record.direction = self.order.direction;
            record.paused = false;
            record.stopped = None;
            self.cluster.write_record(record).await?;
        }
        self.begun = true;
        Ok(())
    }

    /// Does a step. Returns the end of the walk if there is nothing more to do.
    async fn act(
        &mut self,
        step: &Step,
        objects: &Gathered,
        snapshot: &Snapshot,
    ) -> Result<Option<Ended>, Failure> {
        let record = snapshot.record().cloned().unwrap_or(Record {
            direction: self.order.direction,
            ..Record::default()
        });
        match step {
            Step::Blocked(blocked) => return Ok(Some(Ended::at(blocked.clone()))),
            Step::Paused => {
                return Ok(Some(Ended::at(Blocked {
                    problem: "the migration is paused".to_owned(),
                    remedy: again(self.order.direction).to_owned(),
                })));
            }
            Step::Recreate => {
                self.cluster.recreate().await?;
                say("kube-proxy's DaemonSet is back");
            }
            Step::KeepOff => {
                if let Some(set) = &objects.kube_proxy {
                    self.cluster.keep_off(set, record).await?;
                }
                say("kube-proxy keeps off nodes with the label kplane.io/proxy=kplane");
            }
            Step::Mark { nodes, value } => self.mark(nodes, value).await?,
            Step::CleanUp(node) => {
                let program = Cluster::program(objects)?.with_image(self.image);
                self.cluster.clean_up(node, &program, Purpose::Return).await?;
                say(&format!("{node}: kube-proxy runs; removing kplane's rules"));
            }
            Step::Unmark(node) => {
                self.cluster.mark(node, &Mark::None).await?;
                say(&format!("{node}: kube-proxy serves"));
            }
            Step::Wait(waits) => return self.wait(waits, record).await,
            Step::Restore => {
                if let Some(set) = &objects.kube_proxy {
                    self.cluster.restore(set, &record).await?;
                }
                say("kube-proxy's DaemonSet is as it was before");
            }
            Step::Done(left) => return Ok(Some(left_out(left, self.order.direction))),
        }
        Ok(None)
    }

    async fn mark(&mut self, nodes: &[String], value: &Mark) -> Result<(), Failure> {
        for node in nodes {
            self.cluster.mark(node, value).await?;
            let to = match value {
                Mark::Kplane => "moves to kplane",
                _ => "goes back to kube-proxy",
            };
            say(&format!("{node}: {to}"));
            self.since.insert(node.clone(), (Instant::now(), String::new()));
        }
        Ok(())
    }

    /// Waits a moment, unless a node takes too long or cannot arrive at all.
    async fn wait(
        &mut self,
        waits: &[Waiting],
        mut record: Record,
    ) -> Result<Option<Ended>, Failure> {
        for wait in waits {
            tell_once(&mut self.since, &wait.node, &wait.reason);
            let since = self.since.get(&wait.node).map(|(since, _)| since.elapsed());
            let late = since.is_some_and(|since| since >= self.limit);
            if !late && !wait.hopeless {
                continue;
            }
            record.stopped = Some(Stopped {
                node: wait.node.clone(),
                reason: wait.reason.clone(),
            });
            self.cluster.write_record(&record).await?;
            let within = if wait.hopeless {
                String::new()
            } else {
                format!(" within {}", human(self.limit))
            };
            let node = &wait.node;
            let (verb, remedy) = match self.order.direction {
                Direction::ToKplane => ("verified", format!("kpctl migrate back --node {node}")),
                Direction::Back => (
                    "back",
                    format!(
                        "kubectl -n {} get pods -o wide. If the node cannot pull the agents' image: kpctl migrate \
                         back --node {node} --image IMAGE",
                        self.cluster.namespace()
                    ),
                ),
            };
            return Ok(Some(Ended::at(Blocked {
                problem: format!("{node} is not {verb}{within}: {}", wait.reason),
                remedy: format!(
                    "{remedy}; or repair it, and go on with: {}",
                    again(self.order.direction)
                ),
            })));
        }
        Ok(None)
    }

    /// Reports nodes that are not waited for any more.
    fn forget_arrived(&mut self, step: &Step) {
        let still = |name: &String| match step {
            Step::Wait(waits) => waits.iter().any(|wait| wait.node == *name),
            Step::Done(_) | Step::Restore => false,
            // With several nodes at a time, the next reading decides.
            _ => true,
        };
        let direction = self.order.direction;
        self.since.retain(|node, (since, _)| {
            let stays = still(node);
            if !stays
                && direction == Direction::ToKplane
                && ![CONTROL_PLANE, API_SERVER].contains(&&**node)
            {
                say(&format!(
                    "{node}: verified after {}",
                    human(since.elapsed())
                ));
            }
            stays
        });
    }
}

/// The end of a walk, and what was in the way.
struct Ended {
    problem: Option<Blocked>,
}

impl Ended {
    fn at(blocked: Blocked) -> Self {
        Self {
            problem: Some(blocked),
        }
    }
}

/// Returns the end of a walk that left some nodes out.
fn left_out(left: &[Waiting], direction: Direction) -> Ended {
    let Some(first) = left.first() else {
        return Ended { problem: None };
    };
    let others = match left.len() - 1 {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    Ended::at(Blocked {
        problem: format!("{} was left out: {}{others}", first.node, first.reason),
        remedy: again(direction).to_owned(),
    })
}

fn again(direction: Direction) -> &'static str {
    match direction {
        Direction::ToKplane => "kpctl migrate start --all",
        Direction::Back => "kpctl migrate back --all",
    }
}

/// Prints what a node waits for, if that has changed.
fn tell_once(since: &mut BTreeMap<String, (Instant, String)>, node: &str, reason: &str) {
    let (_, announced) =
        since.entry(node.to_owned()).or_insert_with(|| (Instant::now(), String::new()));
    if announced != reason {
        reason.clone_into(announced);
        say(&format!("{node}: {reason}"));
    }
}

/// Prints a line about progress. Standard output is for the result.
fn say(line: &str) {
    anstream::eprintln!("{}", kplane_view::text::Span::plain(line).text);
}
