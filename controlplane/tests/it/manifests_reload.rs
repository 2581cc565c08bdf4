//! Hot reload of manifests: a real folder, real inotify. Nothing sleeps and hopes: a test waits for
//! a batch with a deadline, and "nothing happens" means that the next batch is the one caused by a
//! later, visible change.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kplane_desired_state::k8s::Object;
use kplane_desired_state::source::manifests::Manifests;
use kplane_desired_state::source::{Batch, Event, QUEUE, Source, SourceError};
use tempfile::TempDir;
use tokio::sync::mpsc::{self, Receiver};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A deadline far above what a busy machine needs.
const DEADLINE: Duration = Duration::from_secs(10);

/// A folder that is watched.
struct Watched {
    dir: TempDir,
    batches: Receiver<Batch>,
    task: JoinHandle<Result<(), SourceError>>,
}

impl Watched {
    /// Watches a folder with these files, given as path and names of Services; the first batch has
    /// been received.
    async fn folder(files: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("m")).unwrap();
        for (path, names) in files {
            put(&dir.path().join("m").join(path), &services(names));
        }
        Self::path(dir, "m").await
    }

    async fn path(dir: TempDir, path: &str) -> Self {
        let (sink, batches) = mpsc::channel(QUEUE);
        let task = tokio::spawn(Manifests::new(dir.path().join(path)).run(sink));
        let mut watched = Self { dir, batches, task };
        let first = watched.batch().await;
        assert_eq!(first.first().map(String::as_str), Some("Init(Service)"));
        watched
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join("m").join(path)
    }

    fn put(&self, path: &str, names: &str) {
        put(&self.at(path), &services(names));
    }

    /// Returns the next batch with more than the event that the source is alive.
    async fn batch(&mut self) -> Vec<String> {
        loop {
            let batch = timeout(DEADLINE, self.batches.recv()).await.unwrap().unwrap();
            if batch.events != [Event::Alive] {
                return lines(&batch);
            }
        }
    }

    /// Checks that no event is pending: the next batch is that of a new Service.
    async fn reported_nothing(&mut self) {
        put(
            &self.dir.path().join("m/sentinel.yaml"),
            &services("sentinel"),
        );
        assert_eq!(self.batch().await, ["apply sentinel"]);
        fs::remove_file(self.at("sentinel.yaml")).unwrap();
        assert_eq!(self.batch().await, ["delete sentinel"]);
    }
}

fn put(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn services(names: &str) -> String {
    let service =
        |name| format!("---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n");
    names.split_whitespace().map(service).collect()
}

fn lines(batch: &Batch) -> Vec<String> {
    let mut lines = Vec::new();
    for event in &batch.events {
        match event {
            Event::InitApply(located) => lines.push(format!("have {}", name(&located.object))),
            Event::Apply(located) => lines.push(format!("apply {}", name(&located.object))),
            Event::Delete(id) => lines.push(format!("delete {}", id.name)),
            Event::Vanished(ids) => {
                let names: Vec<&str> = ids.iter().map(|id| &*id.name).collect();
                lines.push(format!("vanished {}", names.join(" ")));
            }
            // Folders with Services alone are never complete; `manifests_doubt.rs` tests that.
            Event::Doubts(_) => {}
            Event::Issues(issues) => lines.extend(issues.iter().map(ToString::to_string)),
            other => lines.push(format!("{other:?}")),
        }
    }
    lines
}

fn name(object: &Object) -> String {
    object.metadata().name.to_string()
}

#[tokio::test]
async fn the_first_batch_is_everything() {
    let dir = tempfile::tempdir().unwrap();
    put(&dir.path().join("b.yml"), &services("b"));
    put(&dir.path().join("sub/a.yaml"), &services("a"));
    put(&dir.path().join(".hidden.yaml"), &services("hidden"));
    put(&dir.path().join(".git/x.yaml"), &services("hidden"));
    put(&dir.path().join("notes.txt"), "not a manifest");
    let (sink, mut batches) = mpsc::channel(QUEUE);
    let task = tokio::spawn(Manifests::new(dir.path()).run(sink));
    let first = timeout(DEADLINE, batches.recv()).await.unwrap().unwrap();
    let rest = [
        "EndpointSlice",
        "Node",
        "ServiceCidr",
        "NetworkPolicy",
        "Namespace",
        "Pod",
        "ClusterNetworkPolicy",
    ];
    let mut expected = vec!["Init(Service)", "have a", "have b", "InitDone(Service)"]
        .into_iter()
        .map(str::to_owned)
        .collect::<Vec<_>>();
    expected.extend(rest.iter().flat_map(|k| [format!("Init({k})"), format!("InitDone({k})")]));
    assert_eq!(lines(&first), expected);
    // The source ends with its consumer.
    drop(batches);
    timeout(DEADLINE, task).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn write() {
    let mut watched = Watched::folder(&[("a.yaml", "a b")]).await;
    watched.put("a.yaml", "b c");
    assert_eq!(watched.batch().await, ["apply c", "vanished a"]);
    watched.put("new.json", "");
    put(
        &watched.at("new.json"),
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"j"}}"#,
    );
    assert_eq!(watched.batch().await, ["apply j"]);
    assert!(!watched.task.is_finished());
}

#[tokio::test]
async fn atomic_rename_into_the_folder() {
    let mut watched = Watched::folder(&[("a.yaml", "a")]).await;
    let outside = watched.dir.path().join("outside.yaml");
    put(&outside, &services("b"));
    fs::rename(&outside, watched.at("a.yaml")).unwrap();
    assert_eq!(watched.batch().await, ["apply b", "vanished a"]);
}

#[tokio::test]
async fn delete_and_rename_away() {
    let mut watched = Watched::folder(&[("a.yaml", "a"), ("b.yaml", "b")]).await;
    fs::remove_file(watched.at("a.yaml")).unwrap();
    assert_eq!(watched.batch().await, ["delete a"]);
    fs::rename(watched.at("b.yaml"), watched.at("b.yaml.off")).unwrap();
    assert_eq!(watched.batch().await, ["delete b"]);
}

/// Renaming a file and damaging it on the way is no deletion.
#[tokio::test]
async fn a_file_that_is_replaced_by_a_broken_one_is_not_deleted_by_name() {
    let mut watched = Watched::folder(&[("a.yaml", "a b")]).await;
    // The content is not JSON.
    fs::rename(watched.at("a.yaml"), watched.at("a.json")).unwrap();
    assert_eq!(watched.batch().await[0], "vanished a b");
}

#[tokio::test]
async fn rename_within_the_folder_tells_nothing() {
    let mut watched = Watched::folder(&[("a.yaml", "a"), ("sub/x.yaml", "x")]).await;
    fs::rename(watched.at("a.yaml"), watched.at("z.yaml")).unwrap();
    fs::rename(watched.at("z.yaml"), watched.at("sub/z.yaml")).unwrap();
    watched.reported_nothing().await;
    fs::rename(watched.at("sub"), watched.at("other")).unwrap();
    watched.reported_nothing().await;
    watched.put("other/x.yaml", "y");
    assert_eq!(watched.batch().await, ["apply y", "vanished x"]);
}

#[tokio::test]
async fn a_file_counts_when_its_writer_closes_it() {
    let mut watched = Watched::folder(&[("a.yaml", "a b")]).await;
    let mut file = fs::File::create(watched.at("a.yaml")).unwrap();
    file.write_all(services("a").as_bytes()).unwrap();
    file.sync_all().unwrap();
    // The file was truncated, and its content is valid YAML without b: it must not be read now.
    watched.reported_nothing().await;
    file.write_all(services("c").as_bytes()).unwrap();
    drop(file);
    assert_eq!(watched.batch().await, ["apply c", "vanished b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_never_rests_deletes_nothing() {
    let names = "a b c d e f g h";
    let mut watched = Watched::folder(&[("a.yaml", names)]).await;
    let path = watched.at("a.yaml");
    let writer = std::thread::spawn(move || {
        for n in 0..500 {
            // Pauses from none to just long enough for a read.
            std::thread::sleep(Duration::from_micros(n * 37 % 9_000));
            let mut file = fs::File::create(&path).unwrap();
            // Every prefix is valid YAML with fewer Services.
            for (index, name) in names.split(' ').enumerate() {
                let version = format!("spec: {{clusterIP: 10.0.{}.{}}}\n", n / 250, n % 250);
                file.write_all((services(name) + &version).as_bytes()).unwrap();
                if (n + index as u64).is_multiple_of(64) {
                    std::thread::sleep(Duration::from_millis(4));
                }
            }
        }
    });
    let mut batches = 0;
    while !writer.is_finished() {
        let batch = timeout(DEADLINE, watched.batches.recv()).await.unwrap().unwrap();
        let deleted = lines(&batch).into_iter().filter(|line| line.starts_with("delete"));
        assert_eq!(deleted.collect::<Vec<_>>(), [""; 0]);
        batches += 1;
        let last = batch.events.iter().any(|event| match event {
            Event::Apply(located) => match &located.object {
                Object::Service(s) => s.spec.cluster_ip.as_deref() == Some("10.0.1.249"),
                _ => false,
            },
            _ => false,
        });
        if last {
            break;
        }
    }
    println!("{batches} batches");
    writer.join().unwrap();
}

#[tokio::test]
async fn an_editor_that_renames_the_old_file_away_deletes_nothing() {
    let mut watched = Watched::folder(&[("a.yaml", "a b")]).await;
    fs::rename(watched.at("a.yaml"), watched.at("a.yaml~")).unwrap();
    let mut file = fs::File::create(watched.at("a.yaml")).unwrap();
    watched.reported_nothing().await;
    file.write_all(services("a b c").as_bytes()).unwrap();
    drop(file);
    assert_eq!(watched.batch().await, ["apply c"]);
}

#[tokio::test]
async fn a_file_that_becomes_unreadable_deletes_nothing() {
    let mut watched = Watched::folder(&[("a.yaml", "a")]).await;
    // Root may read everything, so the file becomes a link to nothing instead.
    symlink("nowhere", watched.at("link")).unwrap();
    fs::rename(watched.at("link"), watched.at("a.yaml")).unwrap();
    assert_eq!(
        watched.batch().await,
        [
            "a.yaml: file: cannot be read: No such file or directory (os error 2); 1 object of \
             this file keeps its last good state"
        ]
    );
    fs::set_permissions(watched.at("."), fs::Permissions::from_mode(0o755)).unwrap();
}

#[tokio::test]
async fn config_map_volume() {
    let dir = tempfile::tempdir().unwrap();
    let volume = dir.path().join("m");
    put(&volume.join("..2026_1/a.yaml"), &services("a"));
    symlink("..2026_1", volume.join("..data")).unwrap();
    symlink("..data/a.yaml", volume.join("a.yaml")).unwrap();
    let mut watched = Watched::path(dir, "m").await;

    put(&volume.join("..2026_2/a.yaml"), &services("b"));
    symlink("..2026_2", volume.join("..data_tmp")).unwrap();
    fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
    fs::remove_dir_all(volume.join("..2026_1")).unwrap();
    assert_eq!(watched.batch().await, ["apply b", "vanished a"]);
}

#[tokio::test]
async fn subfolders_come_and_go() {
    let mut watched = Watched::folder(&[("a.yaml", "a")]).await;
    let outside = watched.dir.path().join("new");
    put(&outside.join("deep/er/b.yaml"), &services("b"));
    fs::rename(&outside, watched.at("new")).unwrap();
    assert_eq!(watched.batch().await, ["apply b"]);
    watched.put("new/deep/er/b.yaml", "c");
    assert_eq!(watched.batch().await, ["apply c", "vanished b"]);
    fs::rename(watched.at("new"), &outside).unwrap();
    assert_eq!(watched.batch().await, ["vanished c"]);
}

#[tokio::test]
async fn a_folder_that_vanishes_deletes_nothing() {
    let mut watched = Watched::folder(&[("a.yaml", "a"), ("sub/b.yaml", "b")]).await;
    let away = watched.dir.path().join("away");
    fs::rename(watched.at("."), &away).unwrap_err();
    fs::rename(watched.dir.path().join("m"), &away).unwrap();
    let reported = watched.batch().await;
    let path = watched.dir.path().join("m").display().to_string();
    assert_eq!(
        reported,
        [format!(
            "{path}: folder: cannot be read: No such file or directory (os error 2); restore it, \
             until then 2 objects keep their last good state"
        )]
    );
    // The folder comes back with a change: it is read at once, and watched again.
    put(&away.join("a.yaml"), &services("a c"));
    fs::rename(&away, watched.dir.path().join("m")).unwrap();
    assert_eq!(watched.batch().await, ["apply c"]);
    watched.put("sub/b.yaml", "d");
    assert_eq!(watched.batch().await, ["apply d", "vanished b"]);
}

#[tokio::test]
async fn a_folder_that_is_removed_and_made_anew() {
    let mut watched = Watched::folder(&[("a.yaml", "a")]).await;
    fs::remove_dir_all(watched.dir.path().join("m")).unwrap();
    assert!(watched.batch().await[0].ends_with("until then 1 object keeps its last good state"));
    fs::create_dir(watched.dir.path().join("m")).unwrap();
    assert!(watched.batch().await[0].contains("a folder without manifests replaced it"));
    watched.put("b.yaml", "b");
    assert_eq!(watched.batch().await, ["apply b", "vanished a"]);
}

#[tokio::test]
async fn a_folder_that_is_replaced_by_an_empty_one_at_once() {
    let mut watched = Watched::folder(&[("a.yaml", "a")]).await;
    fs::remove_dir_all(watched.dir.path().join("m")).unwrap();
    fs::create_dir(watched.dir.path().join("m")).unwrap();
    let reported = watched.batch().await;
    assert!(
        reported[0].contains("; restore it, until then 1 object keeps"),
        "{reported:?}"
    );
    watched.put("a.yaml", "a b");
    while watched.batch().await != ["apply b"] {}
}

#[tokio::test]
async fn a_single_file() {
    let dir = tempfile::tempdir().unwrap();
    put(&dir.path().join("m/all.txt"), &services("a"));
    put(&dir.path().join("m/other.yaml"), &services("other"));
    let mut watched = Watched::path(dir, "m/all.txt").await;
    watched.put("other.yaml", "x");
    watched.put("all.txt", "b");
    assert_eq!(watched.batch().await, ["apply b", "vanished a"]);
    fs::remove_file(watched.at("all.txt")).unwrap();
    assert_eq!(watched.batch().await, ["delete b"]);
    watched.put("all.txt", "c");
    assert_eq!(watched.batch().await, ["apply c"]);
}

#[tokio::test]
async fn many_files_at_once_are_one_batch() {
    let mut watched = Watched::folder(&[("a.yaml", "a")]).await;
    let staged = watched.dir.path().join("staged");
    for n in 0..20 {
        put(
            &staged.join(format!("{n:02}.yaml")),
            &services(&format!("s{n:02}")),
        );
    }
    fs::rename(&staged, watched.at("staged")).unwrap();
    assert_eq!(watched.batch().await.len(), 20);
}

#[tokio::test]
async fn nothing_there_is_an_error() {
    let (sink, _batches) = mpsc::channel(QUEUE);
    let error = Manifests::new("/does/not/exist").run(sink).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot read manifests at /does/not/exist; check the path and its permissions"
    );
}

/// Reload works; `cargo xtask bench` measures its speed.
#[tokio::test]
async fn each_of_many_edits_is_seen() {
    let mut watched = Watched::folder(&[("a.yaml", "a0")]).await;
    for n in 1..=50 {
        watched.put("a.yaml", &format!("a{n}"));
        assert_eq!(watched.batch().await.len(), 2);
    }
}
