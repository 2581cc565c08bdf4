//! The program on a folder in which reads block: the other files are served, and the program ends
//! on request.

use std::fs::{self, File, OpenOptions};
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kplane_http::client::until;
use kplane_rig::mounts;
use kplane_rig::process::Process;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tempfile::TempDir;

use crate::support::loopback::address;

/// A deadline far above any step of these tests, except steps that block forever.
const DEADLINE: Duration = Duration::from_secs(60);

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.10
  ports: [{port: 80}]
";

/// A folder with one good file.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("m")).unwrap();
    fs::write(folder.path().join("m/web.yaml"), SERVICE).unwrap();
    folder
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_kp-controlplane"))
}

/// Waits for the end of a process.
fn ended(process: &mut Process) -> ExitStatus {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < deadline, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts `--check` of a folder; the result is its output and exit code.
fn check(folder: &Path) -> impl FnOnce() -> (Option<i32>, String) {
    let output = folder.join("output");
    let mut command = program();
    command.arg("--check").arg(folder.join("m"));
    command.stdout(File::create(&output).unwrap());
    let mut running = Process::start(command).unwrap();
    move || {
        let status = ended(&mut running);
        (status.code(), fs::read_to_string(output).unwrap())
    }
}

/// Serves a folder, sees the good file served, and ends it.
fn serves_and_ends(folder: &Path) {
    let own = address();
    let at = |port| SocketAddr::from((own, port));
    let mut command = program();
    command.arg("--manifests").arg(folder.join("m"));
    for (flag, port) in [("agent", 7465), ("status", 7466), ("http", 7467)] {
        command.arg(format!("--{flag}-listen={}", at(port)));
    }
    command.stderr(Stdio::null());
    let running = Process::start(command).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().unwrap();
    runtime.block_on(until(at(7467), "/metrics", |reply| {
        reply.is_some_and(|reply| {
            reply.body.lines().any(|line| line == "kplane_controlplane_services 1")
        })
    }));
    assert!(running.terminate(DEADLINE).unwrap().success());
}

#[test]
fn what_is_no_file_of_a_sane_size_is_named_and_keeps_nobody() {
    let folder = folder();
    let m = folder.path().join("m");
    mkfifo(&m.join("pipe.yaml"), Mode::S_IRUSR).unwrap();
    mkfifo(&folder.path().join("outside"), Mode::S_IRUSR).unwrap();
    symlink("../outside", m.join("link.yaml")).unwrap();
    symlink("/dev/zero", m.join("device.yaml")).unwrap();
    let huge = File::create(m.join("huge.yaml")).unwrap();
    huge.set_len((256 << 20) + 1).unwrap();

    let checked = check(folder.path());
    serves_and_ends(folder.path());
    let (code, text) = checked();
    assert_eq!(code, Some(1), "{text}");
    for file in ["pipe", "link", "device"] {
        let named = format!("{file}.yaml: file: cannot be read: it is not a regular file");
        assert!(text.contains(&named), "{text}");
    }
    assert!(
        text.contains("huge.yaml: file: cannot be read: it is larger than 256 MiB"),
        "{text}"
    );
    assert!(
        text.contains("1 Services with 0 endpoints would be served"),
        "{text}"
    );
}

/// A file system whose server never answers, like that of a dead NFS server: a thread that waits
/// for it cannot be interrupted. Only this thread and its children see the file system.
struct DeadFileSystem {
    /// Channel of the file system's requests. No program reads from it; without it the requests
    /// fail.
    device: Option<File>,
    at: PathBuf,
}

impl Drop for DeadFileSystem {
    fn drop(&mut self) {
        self.device = None;
        umount2(&self.at, MntFlags::MNT_DETACH).unwrap();
    }
}

fn dead_file_system(at: &Path) -> anyhow::Result<DeadFileSystem> {
    mounts::separate()?;
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0",
        device.as_raw_fd()
    );
    mount(
        Some("dead"),
        at,
        Some("fuse"),
        MsFlags::empty(),
        Some(options.as_str()),
    )?;
    Ok(DeadFileSystem {
        device: Some(device),
        at: at.to_owned(),
    })
}

#[test]
fn a_disk_that_never_answers_keeps_nobody() {
    let folder = folder();
    let dead = folder.path().join("dead");
    fs::create_dir(&dead).unwrap();
    let _dead = match dead_file_system(&dead) {
        Ok(dead) => dead,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "cannot mount: {error:#}");
            kplane_rig::privilege::skip(&format!("cannot mount: {error:#}"));
            return;
        }
    };
    symlink("../dead/shop.yaml", folder.path().join("m/dead.yaml")).unwrap();
    let checked = check(folder.path());
    serves_and_ends(folder.path());
    let (code, text) = checked();
    assert_eq!(code, Some(1), "{text}");
    let named = "dead.yaml: file: cannot be read: the disk does not answer within 5 s";
    assert!(text.contains(named), "{text}");
    assert!(
        text.contains("1 Services with 0 endpoints would be served"),
        "{text}"
    );
}
