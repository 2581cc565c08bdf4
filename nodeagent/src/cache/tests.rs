//! Tests of the cache file, and of the thread that writes it.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::PathBuf;

use kplane_model::{DesiredKey, DesiredObject, Family};
use kplane_proto::convert::encode_object;
use nix::sys::stat::Mode;
use tempfile::TempDir;

use super::*;
use crate::desired::fixture::{key_of, local, node, svc, svc6};
use crate::desired::{Desired, Freshness, Position, Remembered};

fn objects() -> Vec<DesiredObject> {
    vec![
        svc("a", &["10.0.0.1:80", "10.0.0.2:80"]),
        svc6("a", &[]),
        local("a", &["10.0.0.1:80"]),
        node("z"),
    ]
}

fn saved(objects: Vec<DesiredObject>) -> SavedState {
    let remembered = objects.into_iter().map(|object| Remembered {
        hash: ObjectHash::of(&encode_object(&object)),
        object: Arc::new(object),
        held: false,
    });
    SavedState {
        position: Position {
            epoch: 7,
            revision: 8,
        },
        digest: Digest::default(),
        confirmed_ms: 9,
        cluster: "c1".into(),
        freshness: Freshness::of([("Node", "12"), ("Service", "345")].into_iter()),
        last_known: [Some([192, 168, 0, 1].into()), None],
        pod_ranges: vec!["10.244.1.0/24".parse().unwrap()],
        objects: remembered.collect(),
    }
}

impl Cache {
    fn load(&self) -> Option<SavedState> {
        let disk = Disk {
            path: self.path().to_owned(),
            node: self.node.clone(),
            source: self.source.clone(),
        };
        disk.load()
    }

    fn path(&self) -> &Path {
        match &self.place {
            Storage::File(path) => path,
            Storage::MemoryFile(_) => panic!("there is no file"),
        }
    }
}

fn cache(folder: &TempDir) -> Cache {
    Cache::new(folder.path(), "n1".into())
}

/// Writes with a thread, as an agent does.
fn write(cache: &Cache, objects: Vec<DesiredObject>) {
    let (writer, _) = cache.clone().start().unwrap();
    writer.close(Some(saved(objects)));
}

fn read(cache: &Cache) -> Option<Vec<DesiredObject>> {
    let objects = cache.load()?.objects;
    Some(objects.iter().map(|one| (*one.object).clone()).collect())
}

fn encoded(node: &str, objects: Vec<DesiredObject>) -> Vec<u8> {
    let mut bytes = Vec::new();
    format::encode(&mut bytes, node, &saved(objects)).unwrap();
    bytes
}

#[test]
fn what_was_written_is_read() {
    let folder = TempDir::new().unwrap();
    let inner = TempDir::new_in(&folder).unwrap().path().join("made/on/demand");
    let cache = Cache::new(&inner, "n1".into());
    assert_eq!(read(&cache), None, "nothing is there, and nothing is made");
    assert!(!inner.exists());
    write(&cache, objects());
    assert_eq!(read(&cache), Some(objects()));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&inner), mode(cache.path())), (0o700, 0o600));
    write(&cache, vec![node("y")]);
    assert_eq!(read(&cache), Some(vec![node("y")]));
    assert_eq!(
        fs::read_dir(&inner).unwrap().count(),
        1,
        "nothing else is left"
    );
}

/// A folder is a source by its path; a control plane of any cluster may have written the other files.
#[test]
fn a_file_of_another_source_is_of_no_use() {
    use crate::desired::folder_id;
    let long = format!("/{}", "x".repeat(1_000));
    let folders = [Some("/a"), Some("/b"), Some(&*long), None];
    let source = |folder: Option<&str>| folder.map(|folder| folder_id(Path::new(folder)));
    for written in folders {
        let folder = TempDir::new().unwrap();
        let (writer, _) = cache(&folder).start().unwrap();
        let cluster = source(written).unwrap_or_else(|| "a-uid".to_owned());
        assert!(cluster.len() <= 64, "{cluster}");
        let cluster = cluster.as_str().into();
        writer.close(Some(SavedState {
            cluster,
            ..saved(objects())
        }));
        for reader in folders {
            let read = cache(&folder).of(source(reader)).load();
            assert_eq!(read.is_some(), reader == written, "{written:?} {reader:?}");
        }
    }
}

#[test]
fn a_file_that_is_cut_or_changed_anywhere_is_of_no_use() {
    let whole = encoded("n1", objects());
    let decode = |bytes: Vec<u8>| format::decode(bytes, "n1");
    assert_eq!(decode(whole.clone()).unwrap().saved.objects.len(), 4);
    for length in 0..whole.len() {
        let cut = decode(whole[..length].to_vec());
        assert!(matches!(cut, Err(FileError::Damaged)), "{length} bytes");
        let mut flipped = whole.clone();
        flipped[length] ^= 1 << (length % 8);
        let flipped = decode(flipped);
        assert!(matches!(flipped, Err(FileError::Damaged)), "byte {length}");
    }
    let mut longer = whole;
    longer.push(0);
    assert!(matches!(decode(longer), Err(FileError::Damaged)));
}

/// Changes bytes and corrects the checksum, so that only the changed field is wrong.
fn sealed(mut bytes: Vec<u8>, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    bytes.truncate(bytes.len() - 16);
    change(&mut bytes);
    Cache::seal(&mut bytes);
    bytes
}

/// Everything comes back as it was, and so does what later versions add.
#[test]
fn a_picture_is_read_as_it_was_written() {
    let mut before = saved(objects());
    before.objects[0].held = true;
    let mut bytes = Vec::new();
    format::encode(&mut bytes, "n1", &before).unwrap();
    assert_eq!(Cache::parse(bytes.clone(), "n1").unwrap(), before);
    let later = sealed(bytes.clone(), |bytes| bytes.extend(b"a field of later"));
    assert_eq!(Cache::parse(later, "n1").unwrap(), before);
    // Before there were ranges, files ended after the addresses, and once after the freshness.
    let ranges = 2 * size_of::<u32>() + 1 + 4;
    let tail = ranges + 2 * size_of::<u32>() + 4;
    let before = SavedState {
        pod_ranges: Vec::new(),
        ..before
    };
    let earlier = sealed(bytes.clone(), |bytes| bytes.truncate(bytes.len() - ranges));
    assert_eq!(Cache::parse(earlier, "n1").unwrap(), before);
    let before = SavedState {
        last_known: [None; 2],
        ..before
    };
    let earlier = sealed(bytes.clone(), |bytes| bytes.truncate(bytes.len() - tail));
    assert_eq!(Cache::parse(earlier, "n1").unwrap(), before);
    let strange = sealed(bytes.clone(), |bytes| {
        bytes.truncate(bytes.len() - tail);
        bytes.extend([0, 0, 0, 1, 0, 0, 0, 3, 10, 0, 0]);
    });
    let strange = Cache::parse(strange, "n1");
    assert!(matches!(strange, Err(FileError::Damaged)), "{strange:?}");
    // Before there was freshness, files ended after the cluster.
    let tail = tail + 5 * size_of::<u32>() + "Node12Service345".len();
    let earlier = sealed(bytes.clone(), |bytes| bytes.truncate(bytes.len() - tail));
    let before = SavedState {
        freshness: Freshness::default(),
        ..before
    };
    assert_eq!(Cache::parse(earlier, "n1").unwrap(), before);
    // Before there were cluster and confirmation, files ended after the objects.
    let tail = tail + size_of::<u64>() + size_of::<u32>() + "c1".len();
    let earlier = sealed(bytes, |bytes| bytes.truncate(bytes.len() - tail));
    let expected = SavedState {
        confirmed_ms: 0,
        cluster: "".into(),
        ..before
    };
    assert_eq!(Cache::parse(earlier.clone(), "n1").unwrap(), expected);
    // The time of the write says at which time it was confirmed at the earliest.
    let folder = TempDir::new().unwrap();
    let cache = cache(&folder);
    fs::write(cache.path(), earlier).unwrap();
    let written = fs::metadata(cache.path())
        .unwrap()
        .modified()
        .unwrap()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let confirmed = cache.load().unwrap().confirmed_ms;
    assert_eq!(u128::from(confirmed), written.as_millis());
}

#[test]
fn files_of_others_are_named() {
    let foreign = format::decode(encoded("n2", objects()), "n1").unwrap_err();
    assert_eq!(foreign.to_string(), "written for node \"n2\"");
    const VERSION: usize = b"kplane desired state\n".len() + 3;
    let newer = sealed(encoded("n1", objects()), |bytes| bytes[VERSION] = 2);
    let newer = format::decode(newer, "n1").unwrap_err();
    assert_eq!(newer.to_string(), "format 2 is not known to this version");
    // The file is complete, but its lengths are wrong.
    for (length, cut) in [(40, 1), (60, 10)] {
        let short = sealed(encoded("n1", objects()), |bytes| {
            bytes.truncate(bytes.len() - cut);
        });
        assert!(matches!(
            format::decode(short, "n1"),
            Err(FileError::Damaged)
        ));
        let huge = sealed(encoded("n1", objects()), |bytes| bytes[length] = 0xff);
        // Any content must neither panic nor reserve memory.
        let _ = format::decode(huge, "n1");
    }
}

#[test]
fn one_object_that_makes_no_sense_stops_no_other() {
    let hostile = svc("bad", &["127.0.0.1:80"]);
    let key = DesiredKey::Service(key_of("bad", Family::V4));
    assert_eq!(hostile.key(), key);
    let loaded = format::decode(encoded("n1", vec![hostile, node("z")]), "n1").unwrap();
    assert_eq!((loaded.saved.objects.len(), loaded.skipped), (1, 1));
}

/// `cache-1` is a file of the release before files had cluster and confirmation, `cache-2` of the one before they had
/// freshness, `cache-3` of the one before they had addresses, and `cache-4` of the one before they had ranges of Pods,
/// written by these releases. `cache-5` is the same state as this version writes it.
#[test]
fn files_of_the_last_release_are_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let earlier = fs::read(folder.join("cache-1")).unwrap();
    let before = Cache::parse(earlier.clone(), "n1").unwrap();
    let expected = SavedState {
        confirmed_ms: 1_800_000_000_123,
        cluster: "0b9f4a3e-5f0c-4c6b-9a53-1d2f7c1f8e55".into(),
        ..before.clone()
    };
    let second = fs::read(folder.join("cache-2")).unwrap();
    assert_eq!(Cache::parse(second.clone(), "n1").unwrap(), expected);
    let expected = SavedState {
        freshness: Freshness::of([("Node", "12"), ("Service", "345")].into_iter()),
        ..expected
    };
    let third = fs::read(folder.join("cache-3")).unwrap();
    assert_eq!(Cache::parse(third.clone(), "n1").unwrap(), expected);
    let expected = SavedState {
        last_known: ["192.0.2.1", "2001:db8::1"].map(|ip| Some(ip.parse().unwrap())),
        ..expected
    };
    let fourth = fs::read(folder.join("cache-4")).unwrap();
    assert_eq!(Cache::parse(fourth.clone(), "n1").unwrap(), expected);
    let expected = SavedState {
        pod_ranges: ["10.244.1.0/24", "fd00:10:244:1::/64"]
            .map(|range| range.parse().unwrap())
            .into(),
        ..expected
    };
    let mut written = Vec::new();
    format::encode(&mut written, "n1", &expected).unwrap();
    let file = folder.join("cache-5");
    if !file.exists() && std::env::var_os("KPLANE_WRITE_GOLDEN").is_some() {
        fs::write(&file, &written).unwrap();
    }
    let golden = fs::read(&file).unwrap();
    assert_eq!(golden, written, "the format has changed");
    assert_eq!(Cache::parse(golden.clone(), "n1").unwrap(), expected);
    // The earlier releases read the later file: they ignore what follows the fields that they know.
    assert!(golden.starts_with(&earlier[..earlier.len() - 16]));
    assert!(golden.starts_with(&second[..second.len() - 16]));
    assert!(golden.starts_with(&third[..third.len() - 16]));
    assert!(golden.starts_with(&fourth[..fourth.len() - 16]));

    let kinds: Vec<_> = before
        .objects
        .iter()
        .map(|one| match &*one.object {
            DesiredObject::Service(program) => program.port.key.to_string(),
            DesiredObject::Local(local) => format!("endpoints of {}", local.key),
            DesiredObject::Node(node) => node.name.to_string(),
            DesiredObject::Policy(object) => object.key().to_string(),
        })
        .collect();
    assert_eq!(
        (kinds.len(), &*kinds[4], before.position.revision),
        (5, "n1", 8),
        "{kinds:?}"
    );
    // Both are exactly what the control plane sent, so no snapshot is needed.
    for saved in [before, expected] {
        let mut desired = Desired::default();
        desired.restore(saved.clone());
        assert_eq!(desired.resume().unwrap().digest, saved.digest);
    }
}

/// The fuzz target's work (`fuzz/targets/cache.rs`) on its seeds, with each byte changed in turn.
#[test]
fn whatever_a_file_contains_is_refused_or_can_be_served() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut served = 0;
    for name in ["cache-1", "cache-2"] {
        let golden = fs::read(folder.join(name)).unwrap();
        for place in 0..golden.len() - 16 {
            for bits in [0x01, 0x80, 0xff] {
                let changed = sealed(golden.clone(), |bytes| bytes[place] ^= bits);
                if let Ok(saved) = Cache::parse(changed, "n1") {
                    let mut desired = Desired::default();
                    desired.restore(saved);
                    desired.serve_restored();
                    assert!(desired.saved_state(1).is_some());
                    served += 1;
                }
            }
        }
    }
    assert!(served > 100, "{served}");
}

/// The agent neither follows nor waits for anything but a regular file.
#[test]
fn only_a_regular_file_is_read() {
    let folder = TempDir::new().unwrap();
    let cache = cache(&folder);
    write(&cache, objects());
    let elsewhere = folder.path().join("elsewhere");
    fs::rename(cache.path(), &elsewhere).unwrap();
    symlink(&elsewhere, cache.path()).unwrap();
    assert_eq!(read(&cache), None);
    fs::remove_file(cache.path()).unwrap();
    nix::unistd::mkfifo(cache.path(), Mode::S_IRWXU).unwrap();
    assert_eq!(read(&cache), None);
    // The next state replaces the file.
    write(&cache, objects());
    assert_eq!(read(&cache), Some(objects()));
    fs::remove_file(cache.path()).unwrap();
    fs::create_dir(cache.path()).unwrap();
    assert_eq!(read(&cache), None);
    write(&cache, objects());
    assert!(cache.path().is_dir(), "no more than a warning");
}

/// A disk that takes nothing: the old file stays, and no caller waits.
#[test]
fn a_disk_that_takes_nothing_leaves_the_old_file() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("desired-n1");
    file::replace(&path, |to| to.write_all(b"old")).unwrap();
    let inode = fs::metadata(&path).unwrap().ino();
    let full = file::replace(&path, |to| {
        to.write_all(b"new")?;
        Err(std::io::ErrorKind::StorageFull.into())
    });
    assert!(full.unwrap_err().to_string().contains("no storage space"));
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
    assert_eq!(
        fs::read_dir(&folder).unwrap().count(),
        1,
        "it has its room back"
    );
    // No folder can be made beneath a file.
    let nowhere = Cache::new(&path.join("below"), "n1".into());
    write(&nowhere, objects());
    assert_eq!(read(&nowhere), None);
}

/// While the disk is busy, states replace each other.
#[test]
fn the_newest_picture_is_written_in_the_end() {
    let folder = TempDir::new().unwrap();
    let cache = cache(&folder);
    let (writer, left) = cache.clone().start().unwrap();
    assert!(left.saved.is_none());
    for round in 0..100 {
        writer.take(saved(vec![node(&format!("z{round}"))]));
    }
    writer.close(None);
    assert_eq!(read(&cache), Some(vec![node("z99")]));
}

/// A process that ends while it works on something tells the next one, whether it is killed or panics.
#[test]
fn a_note_of_a_long_work_outlives_the_process() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("suspects-n1");
    let (writer, left) = cache(&folder).start().unwrap();
    let mut tell = writer.notes().unwrap();
    for text in ["long", "", "longer"] {
        tell(text.to_owned());
        let deadline = Instant::now() + Duration::from_secs(10);
        while fs::read_to_string(&file).ok().as_deref() != Some(text) {
            assert!(Instant::now() < deadline, "{text:?} is not written");
            std::thread::yield_now();
        }
    }
    assert_eq!(left.suspects, "");
    let (writer, left) = cache(&folder).start().unwrap();
    assert_eq!(left.suspects, "longer");
    let mut tell = writer.notes().unwrap();
    let engine = std::thread::spawn(move || {
        let _keeper = writer;
        tell("quick".to_owned());
        panic!("a deliberate panic of the engine");
    });
    assert!(engine.join().is_err());
    let (_, left) = cache(&folder).start().unwrap();
    assert_eq!(left.suspects, "quick");
    assert_eq!(Cache::forget(folder.path()).unwrap(), 1);
}

/// A cleanup removes the cache file, so that the rules do not come back with the next start.
#[test]
fn a_clean_up_forgets() {
    let folder = TempDir::new().unwrap();
    let cache = cache(&folder);
    write(&cache, objects());
    fs::write(folder.path().join("other"), b"").unwrap();
    assert_eq!(Cache::forget(folder.path()).unwrap(), 1);
    assert_eq!(
        (read(&cache), folder.path().join("other").exists()),
        (None, true)
    );
    assert_eq!(Cache::forget(folder.path()).unwrap(), 0);
    assert_eq!(Cache::forget(&folder.path().join("none")).unwrap(), 0);
}

#[test]
fn a_name_is_a_file_however_long_it_is() {
    let name = |node: &str| Cache::new(Path::new("/c"), node.into()).path().to_owned();
    assert_eq!(name("n1"), PathBuf::from("/c/desired-n1"));
    let [long, longer] = [200, 253].map(|length| "n".repeat(length));
    assert_eq!(name(&long), PathBuf::from(format!("/c/desired-{long}")));
    let other = format!("{}x", &longer[..252]);
    assert_ne!(name(&longer), name(&other));
    for name in [name(&longer), name(&other)] {
        assert!(name.file_name().unwrap().len() + ".new".len() <= 255);
    }
}
