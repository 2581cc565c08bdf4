//! An audit: whatever `kpctl` knows to be wrong stands on the page, and no node is green over it.

use clap::ValueEnum as _;
use kplane_agents::fleet::Session;
use kplane_model::{Issue, ObjectRef, Reason};
use kplane_proto::v1 as pb;
use kplane_view::nodes::state::NodeStateView;

use super::super::sheet::Filter;
use super::super::{cards, lists, overview, strip};
use super::*;
use crate::findings::{Broken, Remarks};
use crate::server::Overview;

/// The fleet's sheet, the list of nodes, and the first node's sheet.
struct Sheets([String; 3]);

impl Sheets {
    /// Returns the sheets of a fleet whose agents hold all that they should, and report this.
    async fn of(reports: Vec<pb::Report>) -> Self {
        let (hub, router) = open();
        let mut sessions = Vec::new();
        for (number, report) in reports.into_iter().enumerate() {
            let session = Session::sample(&hub, &format!("n{number}"));
            session.report(pb::Report {
                epoch: hub.store().epoch(),
                applied_revision: u64::MAX,
                ..report
            });
            sessions.push(session);
        }
        let mut sheets = Vec::new();
        for path in ["/page/", "/page/nodes", "/page/node?name=n0"] {
            let (code, text) = ask(&router, request(TransportIdentity::PlainText, path)).await;
            assert_eq!(code, StatusCode::OK, "{path}: {text}");
            let (_, main) = text.split_once("<main").unwrap();
            sheets.push(main.split_once("</main>").unwrap().0.to_owned());
        }
        Self(sheets.try_into().unwrap())
    }

    /// Returns the tones of the first node: on the fleet's sheet and in the list.
    fn tones(&self) -> [String; 2] {
        let [fleet, nodes, _] = &self.0;
        let class = |text: &str, behind: &str| {
            let (_, rest) = text.split_once(behind).unwrap();
            let (_, rest) = rest.split_once("class=\"").unwrap();
            rest.split_once('"').unwrap().0.to_owned()
        };
        [
            class(fleet, "<p class=\"squares\">"),
            class(nodes, ">n0</a></th>"),
        ]
    }

    /// Checks that these sheets show these parts, and that the node has this tone.
    fn show(&self, what: &str, tone: &str, parts: [&[&str]; 3]) {
        assert_eq!(self.tones(), [tone; 2], "{what}");
        for (sheet, parts) in self.0.iter().zip(parts) {
            for part in parts {
                assert!(sheet.contains(part), "{what}: no {part:?} in {sheet}");
            }
        }
        let all_is_well = self.0[0].contains("<strong class=\"good\">1</strong> of 1 node in sync");
        assert_eq!(all_is_well, tone == "good", "{what}: {}", self.0[0]);
    }
}

fn finding(reason: Reason, severity: pb::Severity) -> pb::Finding {
    pb::Finding {
        code: reason.code().to_owned(),
        severity: severity.into(),
        text: "the cause".to_owned(),
        fix: "the cure".to_owned(),
        ..pb::Finding::default()
    }
}

fn link(reason: Reason) -> String {
    let code = reason.code();
    format!("<a href=\"reasons#{}\">{code}</a>", code.to_lowercase())
}

/// Each finding about a node is a card on the sheets of the fleet and of the node, and in the list.
#[tokio::test]
async fn each_finding_of_a_node_is_on_its_sheets() {
    for reason in Reason::of_nodes() {
        for (severity, tone) in [
            (pb::Severity::Error, "bad"),
            (pb::Severity::Warning, "warn"),
        ] {
            let report = pb::Report {
                findings: vec![finding(reason, severity)],
                ..pb::Report::default()
            };
            let link = &*link(reason);
            let title = &*format!("title=\"n0: InSync, {reason}\"");
            let card = &[link, "the cause", "the cure"];
            let sheets = Sheets::of(vec![report]).await;
            let parts: [&[&str]; 3] = [&[title, link, "the cause", "the cure"], &[link], card];
            sheets.show(reason.code(), tone, parts);
        }
    }
    let report = pb::Report {
        findings: vec![finding(Reason::Firewalld, pb::Severity::Info)],
        ..pb::Report::default()
    };
    let node = &*link(Reason::Firewalld);
    let sheets = Sheets::of(vec![report]).await;
    sheets.show("worth knowing", "good", [&[], &[], &[node]]);
    let sheets = Sheets::of(vec![pb::Report::default()]).await;
    sheets.show("nothing", "good", [&["Every node is in sync"], &[], &[]]);
}

/// Returns failures of each kind, with the reasons under which they stand on the fleet's sheet and the tones of their nodes.
fn failures() -> Vec<(pb::ObjectFailure, Reason, &'static str)> {
    // A new field is either one more kind here, or no matter of the page.
    let pb::ObjectFailure {
        key: _,
        reason: _,
        since_ms: _,
        degraded: _,
        policies: _,
    } = pb::ObjectFailure::default();
    let service = pb::ServiceKey {
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        ..pb::ServiceKey::default()
    };
    let failure = |key: &Option<pb::ServiceKey>, degraded, policies| pb::ObjectFailure {
        key: key.clone(),
        reason: "the cause".to_owned(),
        degraded,
        policies,
        ..pb::ObjectFailure::default()
    };
    let mut all = Vec::new();
    for key in [None, Some(service)] {
        all.push((failure(&key, false, false), Reason::NotProgrammed, "bad"));
        all.push((failure(&key, true, false), Reason::Degraded, "warn"));
    }
    all.push((failure(&None, false, true), Reason::PolicyDegraded, "bad"));
    all.push((failure(&None, true, true), Reason::PolicyDegraded, "warn"));
    all
}

/// NP: a node that cuts Pods off is in sync with what it should hold, and is not green.
#[tokio::test]
async fn each_failure_of_a_node_is_on_its_sheets() {
    for (failure, reason, tone) in failures() {
        let what = format!("{failure:?}");
        let report = pb::Report {
            failures: vec![failure],
            ..pb::Report::default()
        };
        let link = &*link(reason);
        let sheets = Sheets::of(vec![report]).await;
        sheets.show(&what, tone, [&[link, "the cause"], &[link], &["the cause"]]);
    }
}

/// Returns reports of nodes that are not as they should be, with the tone and what the sheets say of them.
fn reports() -> Vec<(pb::Report, &'static str, [&'static str; 3])> {
    // A new field is either one more report here, or no matter of the page.
    let pb::Report {
        failures: _,
        families: _,
        held: _,
        findings: _,
        // Of a single node it says nothing: see below.
        avoided: _,
        // A failure says why.
        canary: _,
        // An order says so.
        frozen: _,
        // Numbers.
        epoch: _,
        received_revision: _,
        applied_revision: _,
        verified_revision: _,
        last_sync: _,
        objects: _,
        unknown_kinds: _,
        round_trip_us: _,
        syncs_ok: _,
        syncs_failed: _,
        triggers_programmed: _,
        steps: _,
        now_ms: _,
        policies: _,
        ended: _,
    } = pb::Report::default();
    let family = |family| pb::Report {
        families: vec![family],
        ..pb::Report::default()
    };
    let refused = family(pb::FamilyStatus {
        error: "the kernel refuses".to_owned(),
        ..pb::FamilyStatus::default()
    });
    let overdue = family(pb::FamilyStatus {
        verification_overdue: true,
        ..pb::FamilyStatus::default()
    });
    let held = pb::Report {
        held: Some(pb::Held {
            services: 3,
            reason: "it is a cliff".to_owned(),
            ..pb::Held::default()
        }),
        ..pb::Report::default()
    };
    vec![
        (refused, "bad", ["the kernel refuses"; 3]),
        (overdue, "warn", ["has not verified its kernel"; 3]),
        (held, "warn", ["it is a cliff"; 3]),
    ]
}

#[tokio::test]
async fn each_state_that_a_report_leads_to_is_on_its_sheets() {
    for (report, tone, [fleet, nodes, node]) in reports() {
        let sheets = Sheets::of(vec![report]).await;
        sheets.show(fleet, tone, [&[fleet], &[nodes], &[node]]);
    }
}

/// U53: one node may be wrong about an endpoint, and several are not.
#[tokio::test]
async fn endpoints_that_several_nodes_avoid_are_on_the_sheet_of_the_fleet() {
    let report = pb::Report {
        avoided: vec![pb::AvoidedEndpoint {
            key: Some(pb::ServiceKey {
                namespace: "shop".to_owned(),
                name: "web".to_owned(),
                ..pb::ServiceKey::default()
            }),
            address: "10.1.0.1:8080".to_owned(),
        }],
        ..pb::Report::default()
    };
    let link = &*link(Reason::EndpointAvoided);
    let one = Sheets::of(vec![report.clone()]).await;
    assert!(!one.0[0].contains(link), "{}", one.0[0]);
    let both = Sheets::of(vec![report.clone(), report]).await;
    for part in [link, "10.1.0.1:8080", "kpctl describe service shop/web"] {
        assert!(both.0[0].contains(part), "{part}: {}", both.0[0]);
    }
}

fn text(overview: &Overview) -> String {
    let [summary, lagging, facts] = overview::sections(overview);
    let sections = [summary, lagging, facts, strip::section(overview)];
    sections.iter().map(|section| section.html.as_str()).collect()
}

#[test]
fn each_reason_is_named_as_a_problem_of_the_input_and_as_a_finding_of_a_service() {
    for reason in Reason::ALL.iter().copied() {
        let service = ObjectRef::new("Service", "shop", "web");
        let issue = Issue::error(reason, service, "the cause".to_owned());
        let broken = vec![Broken::of_issue(&issue); 13];
        let [worst, further] = cards::worst_first(&broken, 0, 0);
        let card = cards::section(&[finding(reason, pb::Severity::Error)]);
        for section in [&worst, &further, &card] {
            let text = section.html.as_str();
            for part in [&*link(reason), "the cause"] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }
}

#[test]
fn the_worst_finding_of_a_service_is_in_the_list() {
    let page = |finding| pb::ListServicesResponse {
        services: vec![pb::ServiceView {
            finding,
            ..pb::ServiceView::default()
        }],
        ..pb::ListServicesResponse::default()
    };
    let filter = Filter {
        of: "shop".to_owned(),
        ..Filter::default()
    };
    let found = finding(Reason::NoReadyEndpoint, pb::Severity::Error);
    let sections = lists::services(&filter, page(Some(found)));
    let cell = format!(
        "<td class=\"bad\" data-of=\"Finding\">{}</td>",
        link(Reason::NoReadyEndpoint)
    );
    assert!(
        sections[1].html.as_str().contains(&cell),
        "{:?}",
        sections[1]
    );
    let only = "<a href=\"services?namespace=shop&amp;bad=yes\">Only those with a finding</a>";
    assert!(
        sections[0].html.as_str().contains(only),
        "{:?}",
        sections[0]
    );
    let filter = Filter {
        bad: true,
        ..filter
    };
    let sections = lists::services(&filter, page(None));
    let all = "<a href=\"services?namespace=shop\">All Services</a>";
    let kept = "<input type=\"hidden\" name=\"bad\" value=\"yes\"> <button>";
    for part in [all, kept] {
        let form = sections[0].html.as_str();
        assert!(form.contains(part), "{form}");
    }
    assert!(
        !sections[1].html.as_str().contains("reasons#"),
        "{:?}",
        sections[1]
    );
}

#[test]
fn each_state_of_a_node_has_its_word_and_only_one_is_green() {
    for state in NodeStateView::value_variants() {
        let is_good = *state == NodeStateView::InSync;
        let mut overview = Overview::default();
        overview.states.insert(state.wire(), 1);
        let square = ("n0".into(), state.wire(), Remarks::default());
        overview.zones.insert(String::new(), vec![square]);
        if !is_good {
            overview.out_of_sync.push(pb::NodeStatus {
                name: "n0".to_owned(),
                state: state.wire().into(),
                last_error: "the cause".to_owned(),
                ..pb::NodeStatus::default()
            });
        }
        let text = text(&overview);
        let title = format!("title=\"n0: {}\"", state.word());
        assert!(text.contains(&title), "{text}");
        let green = text.contains("<a class=\"good\" href=\"node?name=n0\"");
        assert_eq!(green, is_good, "{text}");
        assert_eq!(text.contains("the cause"), !is_good, "{text}");
    }
}

/// A change after which something is wrong, and what the sheet of the fleet says of it.
type Trouble = (fn(&mut Overview), &'static [&'static str]);

/// Returns what may be wrong with a control plane or between replicas.
fn troubles() -> [Trouble; 8] {
    [
        (|of| of.control_plane.synced = false, &["not complete yet"]),
        (|of| of.control_plane.doubt = "a gap".to_owned(), &["a gap"]),
        (
            |of| of.control_plane.upstream_age_ms = 120_000,
            &["class=\"warn\"", "last contact 2m ago"],
        ),
        (
            |of| {
                of.control_plane.held = Some(pb::Held {
                    reason: "it is a cliff".to_owned(),
                    ..pb::Held::default()
                });
            },
            &["it is a cliff", "kpctl approve"],
        ),
        (
            |of| of.control_plane.plain_text_ports = vec!["agents on :7465".to_owned()],
            &["agents on :7465", "--insecure"],
        ),
        (
            |of| of.control_plane.enforcement = pb::Enforcement::Unread.into(),
            &["<dd class=\"warn\">not read yet"],
        ),
        (
            |of| of.control_plane.cluster_policies_absent = true,
            &["12; no ClusterNetworkPolicies"],
        ),
        (
            |of| {
                of.replicas = 1;
                of.missing = vec![pb::MissingReplica {
                    address: "192.0.2.1:7466".to_owned(),
                    reason: "cannot connect".to_owned(),
                }];
            },
            &["1 answered, 1 missing", "192.0.2.1:7466: cannot connect"],
        ),
    ]
}

/// Names all fields of a control plane's status.
fn fields_of_a_control_plane() {
    // A new field is either one more of the troubles, or no matter of the page.
    let pb::ControlPlaneStatus {
        synced: _,
        upstream_age_ms: _,
        held: _,
        confidence: _,
        doubt: _,
        plain_text_ports: _,
        enforcement: _,
        cluster_policies_absent: _,
        // On cards.
        issues: _,
        issues_omitted: _,
        errors: _,
        warnings: _,
        // Numbers and names.
        version: _,
        epoch: _,
        revision: _,
        now_ms: _,
        started_at_ms: _,
        revision_at_ms: _,
        source: _,
        services: _,
        endpoints: _,
        policies: _,
    } = pb::ControlPlaneStatus::default();
}

#[test]
fn each_trouble_of_the_control_plane_is_on_the_sheet_of_the_fleet() {
    fields_of_a_control_plane();
    let fine = pb::ControlPlaneStatus {
        synced: true,
        enforcement: pb::Enforcement::On.into(),
        policies: 12,
        ..pb::ControlPlaneStatus::default()
    };
    for (change, parts) in troubles() {
        let mut overview = Overview {
            control_plane: fine.clone(),
            ..Overview::default()
        };
        let before = text(&overview);
        change(&mut overview);
        let after = text(&overview);
        for part in parts {
            assert!(after.contains(part), "{part}: {after}");
        }
        let last = parts.last().unwrap();
        assert!(!before.contains(last), "{last}: {before}");
    }
}
