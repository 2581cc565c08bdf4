//! Rights on the status API, and who has them.
//!
//! Rights are verbs on paths, as Kubernetes' non-resource URLs are, so that an RBAC rule can name them:
//!
//! | right | verb | path |
//! |---|---|---|
//! | read the state of the fleet | `get` | `/kplane/status` |
//! | read the desired state of a node | `get` | `/kplane/desired/NODE` |
//! | read the desired state of all nodes | `get` | `/kplane/desired/*` |
//! | read what NetworkPolicies allow (`kpctl describe policy`, `why`) | `get` | `/kplane/policies` |
//! | act on the fleet (`kpctl approve`, `freeze`, `thaw`) | `update` | `/kplane/fleet` |
//! | sample packets that NetworkPolicies deny (`kpctl get drops --follow`) | `create` | `/kplane/samples` |
//! | collect the state of a replica's own agents, as another replica | `get` | `/kplane/peer` |
//! | pass on an approval, as another replica | `update` | `/kplane/peer` |

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kplane_tls::Follower;
use kplane_util::bounded::make_room;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::reviews::Reviews;
use super::rules::Rules;
use super::{Identity, Proof, Refusal, RefusalReason};

/// Group whose members, known by a certificate or a listed token, have all rights, even while the API server is away.
pub const ADMINS: &str = "kplane:admins";

/// Group of the replicas of the control plane. A certificate or a listed token with this group has the rights
/// [`Right::Peer`] and [`Right::PeerAct`], even while the API server is away, and no other right.
pub const REPLICAS: &str = "kplane:controlplanes";

/// Time for which a decision of the API server counts.
const FRESH: Duration = Duration::from_secs(10);
/// Most decisions that are remembered.
const MAX_DECISIONS: usize = 4_096;

/// A right.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    /// Read the state of the fleet.
    ReadStatus,
    /// Read the desired state of a node.
    ReadDesired(String),
    /// Act on the fleet.
    Act,
    /// Let an agent open connections, to see what comes back.
    Probe,
    /// Read which clients nodes remember, and who is connected to Services.
    ReadClients,
    /// Let nodes sample packets that NetworkPolicies deny.
    Sample,
    /// Read what NetworkPolicies allow: who may reach whom.
    ReadPolicies,
    /// Collect the state of a replica's own agents, as another replica.
    Peer,
    /// Pass on an approval, as another replica.
    PeerAct,
}

impl Right {
    /// Returns the verb.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::ReadStatus
            | Self::ReadDesired(_)
            | Self::ReadClients
            | Self::ReadPolicies
            | Self::Peer => "get",
            Self::Act | Self::PeerAct => "update",
            Self::Probe | Self::Sample => "create",
        }
    }

    /// Returns whether only administrators have the right where no rules say otherwise.
    fn needs_admin(&self) -> bool {
        matches!(
            self,
            Self::Act | Self::Probe | Self::ReadClients | Self::Sample | Self::ReadPolicies
        )
    }

    /// Returns the path.
    pub fn path(&self) -> String {
        match self {
            Self::ReadStatus => "/kplane/status".to_owned(),
            Self::ReadDesired(node) => format!("/kplane/desired/{node}"),
            Self::Act => "/kplane/fleet".to_owned(),
            Self::Probe => "/kplane/probes".to_owned(),
            Self::ReadClients => "/kplane/clients".to_owned(),
            Self::Sample => "/kplane/samples".to_owned(),
            Self::ReadPolicies => "/kplane/policies".to_owned(),
            Self::Peer | Self::PeerAct => "/kplane/peer".to_owned(),
        }
    }
}

/// The authority on rights.
#[derive(Debug)]
pub(super) enum Rights {
    /// Everybody with a proven identity reads; [`ADMINS`] act, and [`REPLICAS`] are peers.
    BuiltIn,
    File(Follower<Rules>),
    /// The API server.
    Kubernetes(Box<Decisions>),
}

/// Decisions of the API server, and those of the last seconds.
#[derive(Debug)]
pub(super) struct Decisions {
    reviews: Arc<Reviews>,
    recent: Mutex<HashMap<AccessRequest, Decision>>,
}

/// Everything on which a decision depends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct AccessRequest {
    name: String,
    uid: String,
    groups: Vec<String>,
    extra: BTreeMap<String, Vec<String>>,
    right: Right,
}

/// A decision, with its time; a denial has the API server's reason.
#[derive(Clone, Debug)]
struct Decision {
    at: Instant,
    outcome: Result<(), String>,
}

impl Rights {
    /// Checks that a caller has a right.
    pub(super) async fn check(&self, identity: &Identity, right: &Right) -> Result<(), Refusal> {
        let is_listed = matches!(identity.proof, Proof::Certificate | Proof::ListedToken);
        let is_of = |wanted: &str| identity.subject.groups.iter().any(|group| group == wanted);
        let all_rights = match right {
            Right::Peer | Right::PeerAct => is_of(REPLICAS),
            Right::ReadStatus
            | Right::ReadDesired(_)
            | Right::Act
            | Right::Probe
            | Right::ReadClients
            | Right::Sample
            | Right::ReadPolicies => is_of(ADMINS),
        };
        if is_listed && all_rights {
            return Ok(());
        }
        match self {
            // A replica reads as a peer, and in no other way.
            _ if is_listed && is_of(REPLICAS) && !is_of(ADMINS) => Err(no_right(
                identity,
                right,
                &format!("O={REPLICAS} is for the replicas of the control plane"),
            )),
            Self::BuiltIn if matches!(right, Right::Peer | Right::PeerAct) => Err(no_right(
                identity,
                right,
                &format!("that needs a certificate of a replica, with O={REPLICAS}"),
            )),
            Self::BuiltIn if right.needs_admin() => Err(no_right(
                identity,
                right,
                &format!("that needs a certificate with O={ADMINS}"),
            )),
            Self::BuiltIn => Ok(()),
            Self::File(rules) if rules.current().allow(&identity.subject, right) => Ok(()),
            Self::File(_) => Err(no_right(
                identity,
                right,
                "no rule of --authorization-file allows it",
            )),
            Self::Kubernetes(decisions) => decisions.check(identity, right).await,
        }
    }
}

impl Decisions {
    pub(super) fn new(reviews: Arc<Reviews>) -> Self {
        Self {
            reviews,
            recent: Mutex::default(),
        }
    }

    async fn check(&self, identity: &Identity, right: &Right) -> Result<(), Refusal> {
        let question = AccessRequest {
            name: identity.subject.name.clone(),
            uid: identity.uid.clone(),
            groups: identity.subject.groups.clone(),
            extra: identity.extra.clone(),
            right: right.clone(),
        };
        let recent = self.recent.lock().get(&question).cloned();
        let outcome = match recent.filter(Decision::is_fresh) {
            Some(decision) => decision.outcome,
            None => {
                let outcome = self.ask(identity, right).await?;
                self.remember(question, outcome.clone());
                outcome
            }
        };
        outcome.map_err(|why| {
            let rule = format!(
                "it needs a ClusterRole with nonResourceURLs {:?} and verbs {:?}",
                right.path(),
                right.verb()
            );
            let why = match why.as_str() {
                "" => rule,
                why => format!("{rule} ({why})"),
            };
            no_right(identity, right, &why)
        })
    }

    async fn ask(&self, identity: &Identity, right: &Right) -> Result<Result<(), String>, Refusal> {
        let answer = self.reviews.right(identity, right).await;
        answer.map_err(|unanswered| {
            let text = format!(
                "the right to {} {} cannot be checked now: {unanswered}. Try again, or use a certificate with \
                 O={ADMINS}",
                right.verb(),
                right.path()
            );
            Refusal::new(RefusalReason::Unavailable, text)
        })
    }

    fn remember(&self, question: AccessRequest, outcome: Result<(), String>) {
        let mut recent = self.recent.lock();
        make_room(&mut recent, MAX_DECISIONS, Decision::is_fresh);
        let at = Instant::now();
        recent.insert(question, Decision { at, outcome });
    }
}

impl Decision {
    fn is_fresh(&self) -> bool {
        self.at.elapsed() < FRESH
    }
}

fn no_right(identity: &Identity, right: &Right, why: &str) -> Refusal {
    let text = format!(
        "{:?} may not {} {}: {why}",
        identity.subject.name,
        right.verb(),
        right.path()
    );
    Refusal::new(RefusalReason::NoRight, text)
}
