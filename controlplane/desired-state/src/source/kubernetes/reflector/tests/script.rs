//! A server that follows a script. Requests that are not in the script are never answered.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::k8s::{
    ClusterNetworkPolicy, EndpointSlice, Namespace, NetworkPolicy, Node, Object, ObjectMeta, Pod,
    Service, ServiceCidr,
};
use crate::source::kubernetes::transport::{ObjectPage, Unreadable};
use crate::source::upstream::{KindState, Upstream};

/// The next step of a watch.
#[derive(Debug)]
pub(super) enum Step {
    Say(Vec<WatchEvent>),
    Fail(Failure),
    End,
    /// Sends nothing, forever.
    Hang,
}

#[derive(Debug, Default)]
struct Script {
    pages: VecDeque<Result<ObjectPage, Failure>>,
    watches: VecDeque<Result<VecDeque<Step>, Failure>>,
    probes: VecDeque<Result<u64, Failure>>,
    /// The answer to probes after the end of the script.
    probes_always: Option<u64>,
    asked: Vec<String>,
    renewed: usize,
}

#[derive(Debug)]
pub(super) struct Scripted {
    resource: Resource,
    script: Arc<Mutex<Script>>,
}

#[derive(Debug)]
pub(super) struct Steps(VecDeque<Step>, Resource);

impl Transport for Scripted {
    type Watch = Steps;

    fn resource(&self) -> &Resource {
        &self.resource
    }

    fn set_resource(&mut self, resource: Resource) {
        self.resource = resource;
    }

    async fn page(&mut self, request: &PageRequest) -> Result<ObjectPage, Failure> {
        let answer = {
            let mut script = self.script.lock().unwrap();
            if request.limit == 1 {
                script.asked.push("probe".to_owned());
                let always = script.probes_always;
                let probe = script.probes.pop_front().or(always.map(Ok));
                probe.map(|probe| {
                    probe.map(|version| ObjectPage {
                        version,
                        ..ObjectPage::default()
                    })
                })
            } else {
                script.asked.push(match (&request.next, request.limit) {
                    (Some(next), _) => format!("list {next}"),
                    (None, 0) => "list all".to_owned(),
                    (None, _) => "list".to_owned(),
                });
                script.pages.pop_front()
            }
        };
        match answer {
            Some(answer) => answer.map(|page| as_kind(page, &self.resource)),
            None => std::future::pending().await,
        }
    }

    async fn watch(&mut self, version: u64) -> Result<Steps, Failure> {
        let answer = {
            let mut script = self.script.lock().unwrap();
            script.asked.push(format!("watch {version}"));
            script.watches.pop_front()
        };
        match answer {
            Some(answer) => answer.map(|steps| Steps(steps, self.resource.clone())),
            None => std::future::pending().await,
        }
    }

    async fn renew(&mut self) {
        self.script.lock().unwrap().renewed += 1;
    }

    fn server(&self) -> String {
        "https://192.0.2.1".to_owned()
    }
}

impl Watch for Steps {
    async fn next(&mut self) -> Result<Option<Vec<WatchEvent>>, Failure> {
        match self.0.pop_front() {
            Some(Step::Say(said)) => {
                let said = said.into_iter().map(|said| match said {
                    WatchEvent::Put(object, version) => {
                        WatchEvent::Put(of_kind(object, &self.1), version)
                    }
                    WatchEvent::Gone(mut id, version) => {
                        id.kind = self.1.kind();
                        WatchEvent::Gone(id, version)
                    }
                    other => other,
                });
                Ok(Some(said.collect()))
            }
            Some(Step::Fail(failure)) => Err(failure),
            Some(Step::End) => {
                // A watch that lived for a while.
                tokio::time::sleep(LIVELY).await;
                Ok(None)
            }
            Some(Step::Hang) | None => std::future::pending().await,
        }
    }
}

/// A reflector with a script.
#[derive(Debug)]
pub(super) struct Rig {
    script: Arc<Mutex<Script>>,
    pub(super) upstream: Upstream,
    kind: Kind,
    reflector: Option<Reflector<Scripted>>,
    inbox: mpsc::Receiver<KindEvents>,
    events: VecDeque<String>,
    /// Second lists appear among the events.
    pub(super) shows_looks: bool,
    /// Doubts that were passed on, in order.
    pub(super) doubts: Vec<Option<String>>,
    /// Versions up to which everything was passed on, with that of the newest change.
    pub(super) versions: Vec<(u64, u64)>,
}

impl Rig {
    pub(super) fn new(resource: Resource) -> Self {
        let script = Arc::<Mutex<Script>>::default();
        let upstream = Upstream::default();
        let kind = resource.kind();
        let transport = Scripted {
            resource,
            script: Arc::clone(&script),
        };
        let (outbox, inbox) = mpsc::channel(64);
        let report = Reporter::new(kind, upstream.clone());
        Self {
            script,
            kind,
            reflector: Some(Reflector::new(transport, report, outbox)),
            upstream,
            inbox,
            events: VecDeque::new(),
            shows_looks: false,
            doubts: Vec::new(),
            versions: Vec::new(),
        }
    }

    /// Adds a list in one page.
    pub(super) fn list(&mut self, version: u64, said: impl IntoIterator<Item = WatchEvent>) {
        self.page(version, said, None);
    }

    pub(super) fn page(
        &mut self,
        version: u64,
        said: impl IntoIterator<Item = WatchEvent>,
        next: Option<&str>,
    ) {
        let page = Ok(page(version, said, next));
        self.script.lock().unwrap().pages.push_back(page);
    }

    pub(super) fn no_page(&mut self, failure: Failure) {
        self.script.lock().unwrap().pages.push_back(Err(failure));
    }

    pub(super) fn watch(&mut self, steps: impl IntoIterator<Item = Step>) {
        let steps = steps.into_iter().collect();
        self.script.lock().unwrap().watches.push_back(Ok(steps));
    }

    pub(super) fn no_watch(&mut self, failure: Failure) {
        self.script.lock().unwrap().watches.push_back(Err(failure));
    }

    pub(super) fn probe(&mut self, probe: Result<u64, Failure>) {
        self.script.lock().unwrap().probes.push_back(probe);
    }

    pub(super) fn probes(&mut self, version: u64) {
        self.script.lock().unwrap().probes_always = Some(version);
    }

    pub(super) fn start(&mut self) -> JoinHandle<()> {
        tokio::spawn(self.reflector.take().unwrap().run())
    }

    /// Returns the requests so far.
    pub(super) fn asked(&self) -> Vec<String> {
        self.script.lock().unwrap().asked.clone()
    }

    /// Returns the number of lists that were asked for.
    pub(super) fn lists(&self) -> usize {
        self.asked().iter().filter(|asked| *asked == "list").count()
    }

    pub(super) fn renewed(&self) -> usize {
        self.script.lock().unwrap().renewed
    }

    pub(super) fn state(&self) -> KindState {
        self.upstream.kinds().remove(&self.kind).unwrap()
    }

    /// Returns the next events.
    pub(super) async fn sent(&mut self, count: usize) -> Vec<String> {
        while self.events.len() < count {
            self.hear().await;
        }
        self.events.drain(..count).collect()
    }

    /// Returns the events up to and including `last`.
    pub(super) async fn told_until(&mut self, last: &str) -> Vec<String> {
        loop {
            if let Some(end) = self.events.iter().position(|event| event == last) {
                return self.events.drain(..=end).collect();
            }
            self.hear().await;
        }
    }

    /// Returns the events up to the end of a list; there may be none.
    pub(super) async fn told_by_list(&mut self, count: u64) -> Vec<String> {
        while self.state().counts.lists < count {
            self.hear().await;
        }
        self.pass(Duration::ZERO).await
    }

    /// Lets time pass; returns the events meanwhile.
    pub(super) async fn pass(&mut self, time: Duration) -> Vec<String> {
        let until = Instant::now() + time;
        while tokio::time::timeout_at(until, self.hear()).await.is_ok() {}
        self.events.drain(..).collect()
    }

    async fn hear(&mut self) {
        let patience = Duration::from_secs(600);
        let sent = timeout(patience, self.inbox.recv())
            .await
            .unwrap_or_else(|_| panic!("nothing more: {:?}", self.asked()))
            .unwrap();
        // Issues take another way: nothing empty goes through the index.
        assert!(!sent.events.is_empty() || sent.doubt.is_some());
        if let Some((_, doubt)) = sent.doubt {
            self.doubts.push(doubt);
        }
        let shown = sent
            .events
            .iter()
            .filter(|event| self.shows_looks || !matches!(event, Event::Looked(_)))
            .filter(|event| !matches!(event, Event::Version(..)));
        let versions = sent.events.iter().filter_map(|event| match event {
            Event::Version(_, versions) => Some((versions.seen, versions.changed)),
            _ => None,
        });
        self.versions.extend(versions);
        self.events.extend(shown.map(name));
    }
}

fn name(event: &Event) -> String {
    match event {
        Event::Looked(_) => "looked".to_owned(),
        Event::Vanished(ids) => {
            let names: Vec<&str> = ids.iter().map(|id| &*id.name).collect();
            format!("vanished {}", names.join(" "))
        }
        Event::Init(_) => "init".to_owned(),
        Event::InitApply(located) => format!("+{}", located.object.metadata().name),
        Event::InitDone(_) => "done".to_owned(),
        Event::Apply(located) => format!("apply {}", located.object.metadata().name),
        Event::Delete(id) => format!("delete {}", id.name),
        Event::Issues(_)
        | Event::ApiServer(_)
        | Event::Doubts(_)
        | Event::Version(..)
        | Event::Alive => {
            panic!("{event:?}")
        }
    }
}

fn page(
    version: u64,
    said: impl IntoIterator<Item = WatchEvent>,
    next: Option<&str>,
) -> ObjectPage {
    let mut page = ObjectPage {
        version,
        next: next.map(str::to_owned),
        ..ObjectPage::default()
    };
    for one in said {
        page.changed = page.changed.max(one.version());
        match one {
            WatchEvent::Put(object, _) => page.objects.push(object),
            WatchEvent::Unreadable(unreadable, _) => page.unreadable.push(unreadable),
            other => panic!("no list says {other:?}"),
        }
    }
    page
}

pub(super) fn put(name: &str, version: u64) -> WatchEvent {
    WatchEvent::Put(object(name), version)
}

/// Returns an object that differs from [`put`]'s, and from itself in every other version.
pub(super) fn changed(name: &str, version: u64) -> WatchEvent {
    let Object::Service(mut service) = object(name) else {
        unreachable!("it is a Service");
    };
    service.metadata.creation_timestamp = Some(version.to_string().into());
    WatchEvent::Put(Object::Service(service), version)
}

pub(super) fn unreadable(name: &str, version: u64) -> WatchEvent {
    let unreadable = Unreadable {
        namespace: "default".into(),
        name: name.into(),
        reason: "a strange number".to_owned(),
    };
    WatchEvent::Unreadable(unreadable, version)
}

pub(super) fn gone(name: &str, version: u64) -> WatchEvent {
    WatchEvent::Gone(object(name).id(), version)
}

pub(super) fn bookmark(version: u64) -> WatchEvent {
    WatchEvent::Bookmark(version)
}

/// Returns a Service; the transport converts it to the requested kind.
fn object(name: &str) -> Object {
    Object::Service(Service {
        metadata: ObjectMeta {
            name: name.into(),
            ..ObjectMeta::default()
        },
        ..Service::default()
    })
}

fn as_kind(page: ObjectPage, resource: &Resource) -> ObjectPage {
    let objects = page.objects.into_iter();
    ObjectPage {
        objects: objects.map(|object| of_kind(object, resource)).collect(),
        ..page
    }
}

fn of_kind(object: Object, resource: &Resource) -> Object {
    let metadata = object.metadata().clone();
    match resource.kind() {
        Kind::Service => object,
        Kind::EndpointSlice => Object::EndpointSlice(EndpointSlice {
            metadata,
            ..EndpointSlice::default()
        }),
        Kind::Node => Object::Node(Node {
            metadata,
            ..Node::default()
        }),
        Kind::ServiceCidr => Object::ServiceCidr(ServiceCidr {
            metadata,
            ..ServiceCidr::default()
        }),
        Kind::ClusterNetworkPolicy => Object::ClusterNetworkPolicy(ClusterNetworkPolicy {
            metadata,
            ..ClusterNetworkPolicy::default()
        }),
        Kind::NetworkPolicy => Object::NetworkPolicy(NetworkPolicy {
            metadata,
            ..NetworkPolicy::default()
        }),
        Kind::Namespace => Object::Namespace(Namespace {
            metadata,
            ..Namespace::default()
        }),
        Kind::Pod => Object::Pod(Pod {
            metadata,
            ..Pod::default()
        }),
    }
}
