//! The content of each sheet, from the same answers as `kpctl`'s.

use std::mem::take;
use std::sync::Arc;
use std::time::SystemTime;

use http::StatusCode;
use kplane_agents::hub::Hub;
use kplane_agents::identity::{Caller, Right};
use kplane_agents::peers::{Collected, Peers};
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use kplane_proto::v1::recorder_service_server::RecorderService as _;
use kplane_proto::v1::status_service_server::StatusService as _;
use kplane_util::clock::millis;
use kplane_view::describe::DescriptionView;
use kplane_view::graph::GraphView;
use kplane_view::node::NodeDescriptionView;
use tonic::{Code, Request, Status};

use super::html::{Origin, Section};
use super::sheet::{Filter, Sheet};
use super::trend::Trend;
use super::{cards, changes, lists, map, matrix, overview, reasons, strip, terminal};
use crate::server::{Overview, RecorderServer, Scope, StatusServer, worst_first};

/// Objects on a sheet with a list.
const ROWS: u32 = 200;
/// Events on the sheet of changes.
const EVENTS: u32 = 50;

/// A sheet that cannot be shown.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) code: StatusCode,
    /// What failed, and what to do.
    pub(super) text: String,
}

impl From<Status> for Problem {
    fn from(status: Status) -> Self {
        let code = match status.code() {
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::InvalidArgument => StatusCode::BAD_REQUEST,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self {
            code,
            text: status.message().to_owned(),
        }
    }
}

/// Where answers come from.
pub(super) struct AnswerSources {
    pub(super) hub: Arc<Hub>,
    pub(super) peers: Option<Arc<Peers>>,
    pub(super) status: StatusServer,
    pub(super) recorder: RecorderServer,
    pub(super) trend: Arc<Trend>,
}

impl AnswerSources {
    /// Returns where the answers come from.
    pub(super) fn origin(&self) -> Origin<'_> {
        let replica = self.hub.replica();
        Origin {
            name: replica.cluster_name.get().map_or("", |name| name),
            cluster: self.hub.upstream().cluster_id(),
            replica: replica.own_node.get().map_or("", |node| node),
            now_ms: millis(SystemTime::now()),
        }
    }

    /// Returns the content of a sheet. One that needs a right of its own needs a visitor.
    pub(super) async fn sections(
        &self,
        sheet: &Sheet,
        caller: Option<&Caller>,
    ) -> Result<Vec<Section>, Problem> {
        match sheet {
            Sheet::Fleet => self.fleet().await,
            Sheet::Nodes(filter) => self.nodes(filter).await,
            Sheet::Services(filter) => self.services(filter).await,
            Sheet::Node(name) => self.node(name).await,
            Sheet::Service(name) => self.service(name).await,
            Sheet::Changes => self.changes().await,
            Sheet::Map(filter) => self.map(filter, caller).await,
            Sheet::Reasons => Ok(vec![Section::new(
                "reasons",
                "Explanations",
                reasons::sheet().clone(),
            )]),
        }
    }

    async fn fleet(&self) -> Result<Vec<Section>, Problem> {
        let others = match &self.peers {
            Some(peers) => peers.nodes().await,
            None => Arc::<Collected>::default(),
        };
        let overview = Overview::of(&self.hub, &others);
        let broken = worst_first(&self.hub, &others, &Scope::default()).await;
        let (found, more) = broken.map_err(Status::from)?;
        let now_ms = overview.control_plane.now_ms;
        let [cards, further] = cards::worst_first(&found, more, now_ms);
        let [summary, lagging, facts] = overview::sections(&overview);
        let squares = strip::section(&overview);
        let trend = Section::new("trend", "Convergence", self.trend.html());
        Ok(vec![
            summary, cards, squares, lagging, further, facts, trend,
        ])
    }

    async fn nodes(&self, filter: &Filter) -> Result<Vec<Section>, Problem> {
        let states = match filter.of.as_str() {
            "" => Vec::new(),
            word => vec![lists::state_named(word).ok_or_else(|| Problem {
                code: StatusCode::BAD_REQUEST,
                text: format!("no node is ever in a state {word:?}"),
            })?],
        };
        let request = pb::GetFleetRequest {
            page_size: ROWS,
            page_token: filter.after.clone(),
            node: filter.name.clone(),
            states: states.into_iter().map(Into::into).collect(),
            zone: String::new(),
        };
        let fleet = self.status.get_fleet(Request::new(request)).await?;
        Ok(lists::nodes(filter, fleet.into_inner()))
    }

    async fn services(&self, filter: &Filter) -> Result<Vec<Section>, Problem> {
        let request = pb::ListServicesRequest {
            namespace: filter.of.clone(),
            page_size: ROWS,
            page_token: filter.after.clone(),
            name: filter.name.clone(),
            node: String::new(),
            findings: true,
            bad: filter.bad,
        };
        let page = self.status.list_services(Request::new(request)).await?;
        Ok(lists::services(filter, page.into_inner()))
    }

    async fn node(&self, name: &str) -> Result<Vec<Section>, Problem> {
        let request = pb::GetFleetRequest {
            node: name.to_owned(),
            ..pb::GetFleetRequest::default()
        };
        let mut fleet = self.status.get_fleet(Request::new(request)).await?.into_inner();
        let reports = fleet.nodes.iter_mut().filter_map(|node| node.report.as_mut());
        // They are on cards, and not in the text below.
        let findings = reports.flat_map(|report| take(&mut report.findings));
        let cards = cards::section(&findings.collect::<Vec<_>>());
        let view = NodeDescriptionView::new(fleet).ok_or_else(|| Problem {
            code: StatusCode::NOT_FOUND,
            text: format!("no node {name:?} is known"),
        })?;
        let text = Section::new("node", "The node", terminal::wide(&view));
        Ok(vec![cards, text])
    }

    async fn service(&self, name: &ServiceName) -> Result<Vec<Section>, Problem> {
        let request = pb::DescribeServiceRequest {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
        };
        let mut answer = self.status.describe_service(Request::new(request)).await?.into_inner();
        let cards = cards::section(&take(&mut answer.findings));
        let matrix = matrix::section(&answer);
        let view = DescriptionView::new(&name.namespace, &name.name, answer);
        let text = Section::new("service", "The Service", terminal::pre(&view));
        Ok(vec![cards, matrix, text])
    }

    async fn map(&self, filter: &Filter, caller: Option<&Caller>) -> Result<Vec<Section>, Problem> {
        let nobody = || Status::unauthenticated("the map is for callers who may see clients");
        let caller = caller.ok_or_else(nobody)?;
        let admitted = caller.may(&Right::ReadClients).await;
        admitted.map_err(Status::from)?;
        let asked = map::request(filter);
        let mut request = Request::new(asked.clone());
        // The answer is charged to the visitor, and the audit log names it.
        request.extensions_mut().insert(caller.clone());
        let answer = self.status.get_graph(request).await?;
        let view = GraphView::new(&asked, answer.into_inner());
        Ok(map::sections(filter, &view))
    }

    async fn changes(&self) -> Result<Vec<Section>, Problem> {
        let request = pb::NoticedRequest {
            after: 0,
            limit: EVENTS,
        };
        let noticed = self.recorder.list_noticed(Request::new(request)).await?;
        Ok(vec![changes::section(&noticed.into_inner())])
    }
}
