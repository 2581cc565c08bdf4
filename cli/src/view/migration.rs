//! The outcome of `kpctl migrate`.

use serde::Serialize;

use crate::migrate::order::{Chosen, Order};
use crate::migrate::plan::{self, Blocked};
use crate::migrate::record::Direction;
use crate::migrate::snapshot::{Snapshot, shares_names};
use crate::migrate::stage::Stage;
use kplane_view::style::{Canvas, Tone};
use kplane_view::table::{Column, Table};
use kplane_view::text::{Span, paragraph};
use kplane_view::{API_VERSION, View, next_steps_text};

/// The stage of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum StageView {
    /// No node belongs to kplane.
    NotStarted,
    /// Some nodes belong to kplane.
    Started,
    /// An operator paused the migration.
    Paused,
    /// A node was not verified in time.
    Stopped,
    /// kplane serves all nodes, and kube-proxy's DaemonSet is still there.
    Complete,
    /// kplane serves all nodes, and kube-proxy's DaemonSet is gone.
    Finished,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeView {
    name: String,
    stage: &'static str,
    /// What is missing; empty if nothing is.
    reason: String,
    backend: String,
}

/// Something that stands in the way, and what to type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ProblemView {
    problem: String,
    remedy: String,
}

impl From<Blocked> for ProblemView {
    fn from(blocked: Blocked) -> Self {
        Self {
            problem: blocked.problem,
            remedy: blocked.remedy,
        }
    }
}

/// The view of all commands of `kpctl migrate`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MigrationView {
    api_version: &'static str,
    kind: &'static str,
    stage: StageView,
    direction: Direction,
    /// kube-proxy's mode; `null` if it is not known.
    kube_proxy_mode: Option<String>,
    /// Whether kube-proxy's DaemonSet is there.
    #[serde(skip)]
    has_kube_proxy: bool,
    nodes: Vec<NodeView>,
    /// What stands in the way; `null` if nothing does.
    problem: Option<ProblemView>,
    /// The way to the faster backend, which nothing waits for; `null` where agents use it, or will.
    advice: Option<String>,
    /// Commands to type next.
    next: Vec<String>,
}

impl MigrationView {
    /// Builds the view.
    pub(crate) fn new(snapshot: &Snapshot) -> Self {
        let direction = snapshot.record().map(|record| record.direction).unwrap_or_default();
        let order = Order {
            direction,
            chosen: Chosen::All,
            at_a_time: 1,
        };
        let stages: Vec<Stage> = snapshot.nodes.iter().map(Stage::of).collect();
        let stage = stage(snapshot, &stages);
        let problem = match stage {
            StageView::Finished => None,
            _ => plan::blocked(snapshot, &order).or_else(|| stopped(snapshot)),
        };
        let nodes = snapshot.nodes.iter().zip(&stages).map(|(node, stage)| {
            let served = node.served.as_ref();
            NodeView {
                name: node.name.clone(),
                stage: stage.word(),
                reason: stage.reason().to_owned(),
                backend: served.map_or_else(String::new, |served| served.backend.clone()),
            }
        });
        let mut view = Self {
            api_version: API_VERSION,
            kind: "Migration",
            stage,
            direction,
            kube_proxy_mode: snapshot.mode.clone(),
            has_kube_proxy: snapshot.kube_proxy.is_some(),
            nodes: nodes.collect(),
            problem: problem.map(ProblemView::from),
            advice: advice(snapshot, stage),
            next: Vec::new(),
        };
        view.next = view.steps(snapshot);
        view
    }

    /// Adds the reason why a walk ended before its goal.
    pub(crate) fn stopped(mut self, problem: Option<Blocked>) -> Self {
        if let Some(blocked) = problem {
            self.problem = Some(blocked.into());
            self.next.clear();
        }
        self
    }

    /// Returns whether something stands in the way.
    pub(crate) fn is_blocked(&self) -> bool {
        self.problem.is_some()
    }

    fn steps(&self, snapshot: &Snapshot) -> Vec<String> {
        if self.problem.is_some() {
            return Vec::new();
        }
        let waiting = self.nodes.iter().find(|node| node.stage == "KubeProxy");
        let release = snapshot.agents.as_ref().and_then(|agents| agents.release.clone());
        match self.stage {
            StageView::NotStarted => waiting
                .map(|node| format!("kpctl migrate start --node {}", node.name))
                .into_iter()
                .collect(),
            StageView::Started | StageView::Paused | StageView::Stopped => {
                let verb = match self.direction {
                    Direction::ToKplane => "start",
                    Direction::Back => "back",
                };
                vec![format!("kpctl migrate {verb} --all")]
            }
            StageView::Complete => vec!["kpctl migrate finish".to_owned()],
            StageView::Finished
                if snapshot.agents.as_ref().is_some_and(|agents| agents.limited) =>
            {
                vec![format!(
                    "helm upgrade {} deploy/chart --namespace kplane --reset-then-reuse-values --set \
                     migration.enabled=false, so that new nodes are served as well",
                    release.as_deref().unwrap_or("kplane")
                )]
            }
            StageView::Finished => Vec::new(),
        }
    }

    /// Returns the number of nodes of each stage.
    fn counts(&self) -> Vec<(usize, &'static str)> {
        let before = if self.has_kube_proxy {
            "served by kube-proxy"
        } else {
            "not served by kplane"
        };
        let stages = [
            ("Kplane", "served by kplane"),
            ("Moving", "on the way to kplane"),
            ("Returning", "on the way back"),
            ("KubeProxy", before),
            ("Outside", "left out"),
        ];
        let count = |stage| self.nodes.iter().filter(|node| node.stage == stage).count();
        stages
            .map(|(stage, words)| (count(stage), words))
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .collect()
    }
}

fn stage(snapshot: &Snapshot, stages: &[Stage]) -> StageView {
    let record = snapshot.record();
    let inside = || stages.iter().filter(|stage| !matches!(stage, Stage::Outside(_)));
    if record.is_some_and(|record| record.paused) {
        return StageView::Paused;
    }
    if inside().count() > 0 && inside().all(|stage| *stage == Stage::Kplane) {
        return match snapshot.kube_proxy {
            Some(_) => StageView::Complete,
            None => StageView::Finished,
        };
    }
    if record.is_some_and(|record| record.stopped.is_some()) {
        return StageView::Stopped;
    }
    if record.is_some() || inside().any(|stage| *stage != Stage::KubeProxy) {
        StageView::Started
    } else {
        StageView::NotStarted
    }
}

/// Returns the command that takes agents to nftables, before the migration and after it, where they follow kube-proxy's
/// file to another backend. kubeadm 1.37 writes `mode: iptables` into files that named no mode (K34).
fn advice(snapshot: &Snapshot, stage: StageView) -> Option<String> {
    let served = snapshot.nodes.iter().filter_map(|node| node.served.as_ref());
    let mut backends: Vec<&str> = served.map(|served| served.backend.as_str()).collect();
    if stage == StageView::NotStarted {
        backends.extend(snapshot.mode.as_deref());
    }
    let slow = backends.into_iter().find(|backend| shares_names(backend))?;
    let (when, agents) = match stage {
        StageView::NotStarted => ("Once kplane serves all nodes", "will use"),
        StageView::Complete | StageView::Finished => ("Now", "use"),
        StageView::Started | StageView::Paused | StageView::Stopped => return None,
    };
    Some(format!(
        "Agents {agents} {slow}, as kube-proxy's file says; kubeadm 1.37 and newer write \"mode: iptables\" where no \
         mode was chosen. {when}, this command takes them to nftables: {}",
        plan::upgrade(snapshot.agents.as_ref(), "agent.backend=nftables")
    ))
}

/// Returns why the last walk stopped, if the node is still on its way.
fn stopped(snapshot: &Snapshot) -> Option<Blocked> {
    let record = snapshot.record()?;
    let stopped = record.stopped.as_ref()?;
    let node = snapshot.node(&stopped.node)?;
    let stage = Stage::of(node);
    stage.is_on_its_way().then(|| Blocked {
        problem: format!("stopped at {}: {}", node.name, stage.reason()),
        remedy: match record.direction {
            Direction::ToKplane => format!(
                "kpctl migrate back --node {}; or repair it, and go on with: kpctl migrate start \
                 --all",
                node.name
            ),
            Direction::Back => "kpctl migrate back --all".to_owned(),
        },
    })
}

impl View for MigrationView {
    fn text(&self, canvas: &Canvas) -> String {
        let counts: Vec<String> =
            self.counts().iter().map(|(count, words)| format!("{count} {words}")).collect();
        let (text, tone) = match self.stage {
            StageView::NotStarted => ("Not started", Tone::Plain),
            StageView::Started => ("Under way", Tone::Warn),
            StageView::Paused => ("Paused", Tone::Warn),
            StageView::Stopped => ("Stopped", Tone::Bad),
            StageView::Complete => ("Complete", Tone::Good),
            StageView::Finished => ("Finished", Tone::Good),
        };
        let mode = self.kube_proxy_mode.as_deref().unwrap_or("unknown");
        let summary = format!(
            "Migration: {text}. Nodes: {}. Mode of kube-proxy: {mode}.",
            counts.join(", ")
        );
        let mut out = paragraph(&Span::new(summary, tone), canvas, 0);
        out.push('\n');
        out += &Table::new(&self.nodes)
            .text(Column::new("NODE").elastic(20), |node| &node.name)
            .column(Column::new("STAGE"), |node| {
                let tone = match node.stage {
                    "Kplane" => Tone::Good,
                    "Moving" | "Returning" => Tone::Warn,
                    _ => Tone::Plain,
                };
                Span::new(node.stage, tone)
            })
            .text(Column::new("BACKEND").optional(1), |node| &node.backend)
            .notes(|node| match node.reason.as_str() {
                "" => Vec::new(),
                reason => vec![Span::plain(reason)],
            })
            .render(canvas);
        if let Some(advice) = &self.advice {
            out.push('\n');
            out += &paragraph(&Span::plain(advice), canvas, 0);
        }
        if let Some(problem) = &self.problem {
            let text = format!("Problem: {}", problem.problem);
            out.push('\n');
            out += &paragraph(&Span::new(text, Tone::Bad), canvas, 0);
            out += &next_steps_text(std::slice::from_ref(&problem.remedy), canvas);
            return out;
        }
        out + &next_steps_text(&self.next, canvas)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migrate::snapshot::{Agents, KubeProxy, Mark, NodeSnapshot, Served};
    use kplane_proto::v1 as pb;

    const CANVAS: Canvas = Canvas {
        columns: 200,
        wide: false,
        all: false,
        headers: true,
        unicode: false,
        program: "kpctl",
    };

    fn snapshot(mode: &str, backend: Option<&str>, finished: bool) -> Snapshot {
        let served = backend.map(|backend| Served {
            state: pb::NodeState::InSync,
            verified: true,
            error: String::new(),
            backend: backend.to_owned(),
        });
        Snapshot {
            kube_proxy: (!finished).then(KubeProxy::default),
            mode: Some(mode.to_owned()),
            agents: Some(Agents::default()),
            nodes: vec![NodeSnapshot {
                name: "node-1".to_owned(),
                mark: if finished { Mark::Kplane } else { Mark::None },
                ready: true,
                linux: true,
                served,
                ..NodeSnapshot::default()
            }],
            ..Snapshot::default()
        }
    }

    #[test]
    fn nodes_without_kube_proxy_are_not_served_by_it() {
        let text = |kube_proxy| {
            let snapshot = Snapshot {
                kube_proxy,
                ..snapshot("iptables", None, false)
            };
            MigrationView::new(&snapshot).text(&CANVAS)
        };
        assert!(text(Some(KubeProxy::default())).contains("1 served by kube-proxy"));
        assert!(text(None).contains("1 not served by kplane"));
    }

    #[test]
    fn k34_a_plan_and_an_end_name_the_way_to_nftables() {
        let command = "helm upgrade kplane deploy/chart --namespace kplane --reset-then-reuse-values --set \
                       agent.backend=nftables";
        let said = |snapshot: &Snapshot, stage| advice(snapshot, stage);
        for (stage, snapshot) in [
            (StageView::NotStarted, snapshot("iptables", None, false)),
            (
                StageView::Complete,
                snapshot("iptables", Some("iptables"), false),
            ),
            (
                StageView::Finished,
                snapshot("iptables", Some("ipvs"), true),
            ),
        ] {
            let said = said(&snapshot, stage).unwrap();
            assert!(said.ends_with(command), "{said}");
        }
        for (stage, snapshot) in [
            (StageView::NotStarted, snapshot("nftables", None, false)),
            // The file says iptables, and the agents have gone over.
            (
                StageView::Finished,
                snapshot("iptables", Some("nftables"), true),
            ),
            // Both at once would be too much.
            (
                StageView::Started,
                snapshot("iptables", Some("iptables"), false),
            ),
        ] {
            assert_eq!(said(&snapshot, stage), None);
        }
        let view = MigrationView::new(&snapshot("iptables", None, false));
        let text = view.text(&CANVAS);
        let words: Vec<&str> = text.split_whitespace().collect();
        assert!(words.join(" ").contains(command), "{text}");
    }
}
