//! Tests of noticing changes (I3), on a real file system.

use std::fs;
use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

/// Longest that news of a change may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

async fn noticed(watch: &mut FileWatch, what: &str) {
    let changed = tokio::time::timeout(DEADLINE, watch.changed()).await;
    assert!(changed.is_ok(), "{what} was not noticed");
}

#[tokio::test]
async fn i3_writing_renaming_and_removing_is_noticed() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("config.conf");
    fs::write(&file, "1").unwrap();
    let mut watch = FileWatch::new(&file).unwrap();
    fs::write(&file, "2").unwrap();
    noticed(&mut watch, "a write").await;
    let other = folder.path().join("config.conf.new");
    fs::write(&other, "3").unwrap();
    fs::rename(&other, &file).unwrap();
    noticed(&mut watch, "a rename").await;
    // What was renamed into place is another file of the same name.
    fs::write(&file, "4").unwrap();
    noticed(&mut watch, "a write after a rename").await;
    fs::remove_file(&file).unwrap();
    noticed(&mut watch, "removal").await;
    fs::write(&file, "5").unwrap();
    noticed(&mut watch, "a new file").await;
}

/// A kubelet changes a ConfigMap by a new folder, and a link that a rename swaps.
#[tokio::test]
async fn i3_the_swap_of_a_config_map_is_noticed() {
    let volume = TempDir::new().unwrap();
    let file = volume.path().join("config.conf");
    let publish = |version: &str| {
        let folder = volume.path().join(format!("..{version}"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("config.conf"), version).unwrap();
        symlink(format!("..{version}"), volume.path().join("..data_tmp")).unwrap();
        let data = volume.path().join("..data");
        fs::rename(volume.path().join("..data_tmp"), data).unwrap();
    };
    publish("1");
    symlink("..data/config.conf", &file).unwrap();
    let mut watch = FileWatch::new(&file).unwrap();
    for version in ["2", "3"] {
        publish(version);
        noticed(&mut watch, "a swap").await;
        assert_eq!(fs::read_to_string(&file).unwrap(), version);
        fs::remove_dir_all(volume.path().join("..1")).ok();
    }
}

#[tokio::test]
async fn i3_links_to_elsewhere_and_folders_that_come_back_are_followed() {
    let root = TempDir::new().unwrap();
    let (etc, var) = (root.path().join("etc"), root.path().join("var"));
    fs::create_dir(&etc).unwrap();
    fs::create_dir(&var).unwrap();
    fs::write(var.join("real"), "1").unwrap();
    let link = etc.join("config.conf");
    symlink("../var/real", &link).unwrap();
    let mut watch = FileWatch::new(&link).unwrap();
    fs::write(var.join("real"), "2").unwrap();
    noticed(&mut watch, "a write behind a link").await;
    fs::rename(&var, root.path().join("gone")).unwrap();
    noticed(&mut watch, "a folder that is gone").await;
    fs::create_dir(&var).unwrap();
    noticed(&mut watch, "a folder that is back").await;
    fs::write(var.join("real"), "3").unwrap();
    noticed(&mut watch, "a file in a new folder").await;
}

#[tokio::test]
async fn i3_neighbours_do_not_matter() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("config.conf");
    fs::write(&file, "1").unwrap();
    let mut watch = FileWatch::new(&file).unwrap();
    fs::write(folder.path().join("another"), "1").unwrap();
    // Other tests may cause events further up on the way, which must not matter either.
    assert!(!watch.next_matters().await, "another was created");
    assert!(!watch.next_matters().await, "another was closed");
    fs::write(&file, "2").unwrap();
    let matters = async { while !watch.next_matters().await {} };
    tokio::time::timeout(DEADLINE, matters).await.unwrap();
}

#[test]
fn links_in_a_circle_end() {
    let folder = TempDir::new().unwrap();
    let (one, other) = (folder.path().join("one"), folder.path().join("other"));
    symlink(&one, &other).unwrap();
    symlink(&other, &one).unwrap();
    assert!(on_the_way(&one).len() <= (MAX_LINKS + 2) * 8);
}
