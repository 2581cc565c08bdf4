//! Starts on a broken folder: a real folder, a real control plane, the status API's view.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;

use kp_controlplane::app::{Bound, Config, Origin, build};
use kplane_agents::hub::{Seen, Summary};
use kplane_desired_state::index::{CliffGuard, Guarded, Held, Selection};
use kplane_desired_state::trust::Trust;
use tempfile::TempDir;
use tokio::time::timeout;

use crate::support::manifests::{manifests, put, slice};
use crate::support::synced;

/// A deadline far above any step of these tests.
const DEADLINE: Duration = Duration::from_secs(30);
/// Number of Services in a complete folder.
const SERVICES: usize = 100;

/// The Services without their slices.
fn services() -> String {
    let text = manifests(0..SERVICES);
    text.split("---\n")
        .filter(|text| text.contains("kind: Service"))
        .map(|text| format!("---\n{text}"))
        .collect()
}

/// A control plane on a folder.
struct Plane {
    bound: Bound,
    folder: TempDir,
}

impl Plane {
    /// Starts a control plane on a folder that `fill` prepares.
    async fn start(fill: impl FnOnce(&Folder)) -> Self {
        Self::guarded(CliffGuard::default(), fill).await
    }

    async fn guarded(cliff_guard: CliffGuard, fill: impl FnOnce(&Folder)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fill(&Folder(folder.path().to_owned()));
        let config = Config {
            cliff_guard,
            ..Config::new(Origin::Manifests(folder.path().to_owned()))
        };
        let bound = synced(config).await;
        Self { bound, folder }
    }

    fn folder(&self) -> Folder {
        Folder(self.folder.path().to_owned())
    }

    fn trust(&self) -> Trust {
        self.bound.hub().store().trust()
    }

    fn doubt(&self) -> String {
        self.trust().doubt().to_owned()
    }

    async fn until_trust(&self, trust: Trust) {
        let mut head = self.bound.hub().store().head();
        let changed = async {
            while self.trust() != trust {
                head.changed().await.unwrap();
            }
        };
        let waited = timeout(DEADLINE, changed).await;
        assert!(waited.is_ok(), "{:?} and not {trust:?}", self.trust());
    }

    /// Waits until the index publishes a summary.
    async fn until(&self, what: impl Fn(&Summary) -> bool) -> Summary {
        let mut summary = self.bound.hub().index().summary();
        let reached = summary.wait_for(|summary| what(summary));
        let Ok(reached) = timeout(DEADLINE, reached).await else {
            panic!("{:?}", self.bound.hub().index().summary().borrow());
        };
        Summary::clone(&reached.unwrap())
    }

    async fn until_held(&self) -> (Held, usize) {
        let summary = self.until(|summary| summary.held.is_some()).await;
        (
            Held::clone(summary.held.as_ref().unwrap()),
            summary.totals.services,
        )
    }

    async fn until_services(&self, count: usize) -> Summary {
        self.until(|summary| summary.totals.services == count).await
    }

    async fn approve(&self, services: usize, without_endpoints: usize) -> Result<(), String> {
        let seen = Seen {
            services,
            without_endpoints,
        };
        let approved = self.bound.hub().index().approvals().approve(seen).await.unwrap();
        approved.map(drop).map_err(|refused| refused.to_string())
    }
}

struct Folder(PathBuf);

impl Folder {
    fn put(&self, name: &str, text: impl AsRef<[u8]>) {
        put(&self.0, name, text);
    }

    fn whole(&self) {
        self.put("shop.yaml", manifests(0..SERVICES));
    }
}

#[tokio::test]
async fn a_folder_that_is_whole_is_believed() {
    let plane = Plane::start(Folder::whole).await;
    assert_eq!(plane.trust(), Trust::Whole);
    // A file that was read once and then cannot be read keeps its objects: nothing is missing.
    plane.folder().put("shop.yaml", "a: [");
    plane.until(|summary| !summary.issues.is_empty()).await;
    assert_eq!(plane.trust(), Trust::Whole);
    plane.until_services(SERVICES).await;
}

/// Checks that a start after `damage` is partial for this reason and serves this number of
/// Services, until the folder is complete.
async fn starts_partial(damage: impl FnOnce(&Folder), doubt: &str, services: usize) {
    let plane = Plane::start(damage).await;
    assert!(plane.doubt().contains(doubt), "{}", plane.doubt());
    assert!(plane.doubt().contains("kpctl approve"));
    println!("{services} of {SERVICES} Services: {}", plane.doubt());
    plane.until_services(services).await;
    let folder = plane.folder();
    for file in ["shop.json", "other.yaml"] {
        // Not every damage causes an issue.
        let _ = fs::remove_file(folder.0.join(file));
    }
    folder.whole();
    plane.until_services(SERVICES).await;
    plane.until_trust(Trust::Whole).await;
}

#[tokio::test]
async fn a_start_with_a_syntax_error_is_partial() {
    let one_of_many = |folder: &Folder| {
        let text = manifests(0..SERVICES).replacen("kind: Service", "kind: : Service", 1);
        folder.put("shop.yaml", text);
    };
    let doubt = "shop.yaml is refused in document 1, line 3: is not valid YAML";
    starts_partial(one_of_many, doubt, SERVICES - 1).await;
    let list = |folder: &Folder| folder.put("shop.json", "{\"kind\": \"List\", \"items\": [{");
    let doubt = "shop.json is refused in document 1, line 1: is not valid JSON";
    starts_partial(list, doubt, 0).await;
}

#[tokio::test]
async fn a_start_with_a_document_that_cannot_be_decoded_is_partial() {
    let damage = |folder: &Folder| {
        let text = manifests(0..SERVICES).replacen("[{port: 80}]", "5", 1);
        folder.put("shop.yaml", text);
    };
    let doubt = "shop.yaml is refused in document 1, line 5: spec.ports must be a list";
    starts_partial(damage, doubt, SERVICES - 1).await;
}

#[tokio::test]
async fn a_start_with_a_file_that_is_half_written_is_partial() {
    let in_a_line = |folder: &Folder| {
        let text = manifests(0..SERVICES);
        let middle = text.find("svc-50, ").unwrap();
        folder.put("shop.yaml", &text[..middle]);
    };
    let doubt = "shop.yaml is refused in document 101, line 604: is not valid YAML";
    starts_partial(in_a_line, doubt, SERVICES / 2).await;
    // Half of the file, which is still valid YAML.
    let in_a_word = |folder: &Folder| {
        let text = manifests(0..SERVICES);
        let slice = text.find("name: svc-49-1").unwrap();
        let middle = slice + text[slice..].find("v4").unwrap();
        folder.put("shop.yaml", &text[..middle]);
    };
    let doubt = "shop.yaml ends in the middle of a line";
    starts_partial(in_a_word, doubt, SERVICES / 2).await;
    let nothing_yet = |folder: &Folder| {
        folder.put("shop.yaml", "");
        folder.put("other.yaml", manifests(SERVICES..SERVICES + 7));
    };
    starts_partial(nothing_yet, "shop.yaml is empty", 7).await;
}

#[tokio::test]
async fn a_start_with_a_file_that_cannot_be_read_is_partial() {
    let link = |folder: &Folder| {
        symlink("nowhere", folder.0.join("shop.yaml")).unwrap();
        folder.put("other.yaml", manifests(SERVICES..SERVICES + 7));
    };
    starts_partial(link, "shop.yaml cannot be read: No such file", 7).await;
    let device = |folder: &Folder| symlink("/dev/null", folder.0.join("shop.yaml")).unwrap();
    let doubt = "shop.yaml cannot be read: it is not a regular file";
    starts_partial(device, doubt, 0).await;
    let binary = |folder: &Folder| folder.put("shop.yaml", b"a: \xff\n");
    starts_partial(binary, "shop.yaml is not UTF-8 text (line 1)", 0).await;
}

#[tokio::test]
async fn a_start_on_an_empty_folder_or_one_without_a_kind_is_partial() {
    starts_partial(|_| {}, "there is no Service", 0).await;
    let without_slices = |folder: &Folder| folder.put("shop.yaml", services());
    let doubt = "there are Services and no EndpointSlice";
    starts_partial(without_slices, doubt, SERVICES).await;
}

/// A Service with an invalid value causes no doubt: its name is known.
#[tokio::test]
async fn a_service_that_cannot_be_served_is_no_doubt() {
    let plane = Plane::start(|folder| {
        let text = manifests(0..SERVICES).replacen("10.96.0.1,", "nonsense,", 1);
        folder.put("shop.yaml", text);
    })
    .await;
    assert_eq!(plane.trust(), Trust::Whole);
    plane.until(|summary| !summary.issues.is_empty()).await;
}

#[tokio::test]
async fn a_folder_that_is_not_there_is_no_start() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config {
        ..Config::new(Origin::Manifests(folder.path().join("nowhere")))
    };
    // The control plane ends without having served any agent: agents keep their state.
    let bound = build(config).await.unwrap();
    let hub = bound.hub().clone();
    let error = timeout(DEADLINE, bound.wait()).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("nowhere"), "{error}");
    assert!(!hub.store().head().borrow().synced);
}

#[tokio::test]
async fn a_person_may_agree_with_a_partial_picture() {
    let plane = Plane::start(|folder| {
        folder.put("a.yaml", "a: [\n");
        folder.put("shop.yaml", manifests(0..SERVICES));
    })
    .await;
    assert!(plane.doubt().starts_with("a.yaml is refused"));
    plane.approve(0, 0).await.unwrap();
    assert_eq!(plane.trust(), Trust::Confirmed);
    // A new doubt is not covered by the earlier approval.
    plane.folder().put("b.yaml", "b: [\n");
    let issues = plane.until(|summary| summary.issues.len() == 2).await;
    assert!(issues.held.is_none());
    assert!(plane.doubt().starts_with("b.yaml"), "{}", plane.doubt());
}

#[tokio::test]
async fn a_rewritten_file_that_lacks_most_deletes_nothing_until_it_is_back() {
    let plane = Plane::start(Folder::whole).await;
    // Ten stay, five are new.
    plane.folder().put(
        "shop.yaml",
        manifests((0..10).chain(SERVICES..SERVICES + 5)),
    );
    let (held, services) = plane.until_held().await;
    assert_eq!((held.services, held.without_endpoints), (90, 0));
    assert_eq!(services, SERVICES + 5);
    assert_eq!(held.examples.len(), 8);
    assert!(
        held.reason.contains("90 of 100 Services would be removed"),
        "{}",
        held.reason
    );
    let issues = plane.until(|_| true).await.issues;
    assert!(
        issues[0].reason.contains("90 Services are kept: "),
        "{issues:?}"
    );
    // Some come back, then all.
    plane.folder().put("shop.yaml", manifests(0..50));
    let held = plane.until(|s| s.held.as_ref().is_some_and(|h| h.services == 50));
    let summary = held.await;
    assert_eq!(summary.totals.services, SERVICES, "the five have gone");
    plane.folder().whole();
    let summary = plane.until(|summary| summary.held.is_none()).await;
    assert_eq!(summary.totals.services, SERVICES);
    assert!(summary.issues.is_empty());
}

#[tokio::test]
async fn what_is_held_goes_when_a_person_has_seen_it() {
    let plane = Plane::start(Folder::whole).await;
    plane.folder().put("shop.yaml", manifests(0..10));
    plane.until_held().await;
    let refused = plane.approve(10, 0).await.unwrap_err();
    assert!(
        refused.starts_with("more objects are held than were approved"),
        "{refused}"
    );
    plane.until_services(SERVICES).await;
    plane.approve(90, 0).await.unwrap();
    assert_eq!(plane.trust(), Trust::Confirmed);
    let summary = plane.until_services(10).await;
    assert!(
        summary.held.is_none() && summary.issues.is_empty(),
        "{summary:?}"
    );
    // The next one is guarded anew.
    plane.folder().whole();
    plane.until_services(SERVICES).await;
    plane.folder().put("shop.yaml", manifests(0..10));
    plane.until_held().await;
}

#[tokio::test]
async fn slices_that_vanish_leave_services_their_endpoints() {
    let plane = Plane::start(|folder| {
        folder.put("shop.yaml", services());
        folder.put("slices.yaml", (0..SERVICES).map(slice).collect::<String>());
    })
    .await;
    assert_eq!(plane.trust(), Trust::Whole);
    let few: String = (0..60).map(slice).collect();
    plane.folder().put("slices.yaml", few);
    let (held, _) = plane.until_held().await;
    assert_eq!((held.services, held.without_endpoints), (0, 40));
    let summary = plane.until(|_| true).await;
    assert_eq!(summary.totals.endpoints, SERVICES);
    // Endpoints under another name are as good, and replace those that are kept.
    let renamed = (60..99).map(|n| slice(n).replace("-1,", "-2,").replace("10.0.", "10.1."));
    let renamed: String = (0..60).map(slice).chain(renamed).collect();
    plane.folder().put("slices.yaml", renamed);
    let one = |s: &Summary| s.held.as_ref().is_some_and(|h| h.without_endpoints == 1);
    let summary = plane.until(one).await;
    assert_eq!(summary.totals.endpoints, SERVICES);
    assert_eq!(summary.held.unwrap().examples[0].to_string(), "shop/svc-99");
}

/// A named Service gets the places of a held one.
#[tokio::test]
async fn what_is_held_gives_way_to_what_is_named() {
    let plane = Plane::start(Folder::whole).await;
    let renamed = manifests(0..SERVICES).replace("svc-", "new-");
    plane.folder().put("shop.yaml", renamed);
    let (held, services) = plane.until_held().await;
    assert_eq!((held.services, services), (SERVICES, SERVICES));
    let page = plane
        .bound
        .hub()
        .index()
        .look(|index| index.ports(&Selection::default()))
        .await
        .unwrap();
    assert!(!page.more && !page.ports.is_empty());
    assert!(page.ports.iter().all(|view| view.port.key.service.name.starts_with("new-")));
}

#[tokio::test]
async fn a_volume_that_is_swapped_for_half_of_itself() {
    let plane = Plane::start(|folder| {
        fs::create_dir(folder.0.join("..2026_1")).unwrap();
        for (name, numbers) in [("a.yaml", 0..50), ("b.yaml", 50..100)] {
            fs::write(folder.0.join("..2026_1").join(name), manifests(numbers)).unwrap();
            symlink(format!("..data/{name}"), folder.0.join(name)).unwrap();
        }
        symlink("..2026_1", folder.0.join("..data")).unwrap();
    })
    .await;
    plane.until_services(100).await;
    let folder = plane.folder();
    fs::create_dir(folder.0.join("..2026_2")).unwrap();
    fs::write(folder.0.join("..2026_2/a.yaml"), manifests(0..30)).unwrap();
    fs::write(folder.0.join("..2026_2/b.yaml"), manifests(100..101)).unwrap();
    symlink("..2026_2", folder.0.join("..data_tmp")).unwrap();
    fs::rename(folder.0.join("..data_tmp"), folder.0.join("..data")).unwrap();
    let (held, services) = plane.until_held().await;
    assert_eq!((held.services, services), (70, 101));
}

/// `rm` of one file is believed; the removal of all files of a folder is not.
#[tokio::test]
async fn one_file_that_is_removed_is_believed_and_many_are_not() {
    let fill = |folder: &Folder| {
        folder.put("a.yaml", manifests(0..50));
        for n in 0..50 {
            folder.put(&format!("{n:02}.yaml"), manifests(50 + n..51 + n));
        }
    };
    let plane = Plane::start(fill).await;
    fs::remove_file(plane.folder().0.join("a.yaml")).unwrap();
    let summary = plane.until_services(50).await;
    assert!(summary.held.is_none());
    let subfolder = plane.folder().0.join("away");
    fs::create_dir(&subfolder).unwrap();
    for n in 0..50 {
        let name = format!("{n:02}.yaml");
        fs::rename(plane.folder().0.join(&name), subfolder.join(&name)).unwrap();
    }
    fs::rename(&subfolder, plane.folder().0.with_extension("away")).unwrap();
    let (held, services) = plane.until_held().await;
    fs::remove_dir_all(plane.folder().0.with_extension("away")).unwrap();
    assert_eq!(held.services, services);
}

#[tokio::test]
async fn a_guard_of_all_deletions_or_of_none() {
    let guard = |deletions| CliffGuard {
        deletions,
        ..CliffGuard::default()
    };
    let all = Plane::guarded(guard(Guarded::All), Folder::whole).await;
    fs::remove_file(all.folder().0.join("shop.yaml")).unwrap();
    let (held, services) = all.until_held().await;
    assert_eq!((held.services, services), (SERVICES, SERVICES));
    assert!(held.reason.contains("by deletions"), "{}", held.reason);
    let off = Plane::guarded(guard(Guarded::Off), Folder::whole).await;
    off.folder().put("shop.yaml", manifests(0..1));
    assert!(off.until_services(1).await.held.is_none());
}
