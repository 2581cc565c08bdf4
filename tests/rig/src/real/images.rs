//! The images that the rig makes: of pods, their sandboxes, CoreDNS and kube-proxy.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::image::Image;
use super::programs::NodePrograms;
use crate::cluster::Programs;
use crate::process::output;

/// The image of test pods: a server and a client (`/pod`), and busybox.
pub const POD: &str = "localhost/kplane/pod:test";
/// The image of the process that holds a pod's namespaces.
pub(super) const PAUSE: &str = "localhost/kplane/pause:test";
/// The image of CoreDNS.
pub(super) const COREDNS: &str = "localhost/kplane/coredns:test";
/// The name of kube-proxy's image, without its tag.
const KUBE_PROXY: &str = "localhost/kplane/kube-proxy";
pub(super) const PASSWD: &str =
    "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n";
pub(super) const GROUP: &str = "root:x:0:\nnogroup:x:65534:\n";
/// Programs that kube-proxy runs.
const NETFILTER: [&str; 3] = ["nft", "xtables-nft-multi", "xtables-legacy-multi"];
/// Names under which iptables' one program is called.
const IPTABLES: [&str; 6] = [
    "iptables",
    "iptables-save",
    "iptables-restore",
    "ip6tables",
    "ip6tables-save",
    "ip6tables-restore",
];

/// Returns the name of kube-proxy's image.
///
/// # Errors
/// The checkout cannot be read.
pub fn kube_proxy() -> Result<String> {
    Ok(format!("{KUBE_PROXY}:{}", Programs::kubernetes_version()?))
}

/// Writes the archives of all images, once, and returns their paths. The small ones are first.
pub(super) fn archives(programs: &NodePrograms) -> Result<Vec<PathBuf>> {
    let folder = programs.images();
    let images = [
        Image::new(PAUSE, &["/pod", "pause"]).copy("pod", &programs.pod()),
        pod(programs)?,
        Image::new(COREDNS, &["/coredns"]).copy("coredns", &programs.coredns()),
        kube_proxy_image(programs)?,
    ];
    images.iter().map(|image| image.archive(folder)).collect()
}

fn pod(programs: &NodePrograms) -> Result<Image> {
    let image = Image::new(POD, &["/pod"])
        .copy("pod", &programs.pod())
        .text("etc/passwd", PASSWD)
        .text("etc/group", GROUP);
    with_busybox(image)
}

/// Adds busybox, under all its names.
pub(super) fn with_busybox(image: Image) -> Result<Image> {
    let mut list = Command::new("busybox");
    list.arg("--list");
    let applets = output(list).context("busybox is needed: apt-get install busybox-static")?;
    let mut image = image.program("bin/busybox", &which("busybox")?);
    for applet in applets.lines().filter(|applet| *applet != "busybox") {
        image = image.link(&format!("bin/{applet}"), "busybox");
    }
    Ok(image)
}

fn kube_proxy_image(programs: &NodePrograms) -> Result<Image> {
    let mut image = Image::new(&kube_proxy()?, &["/usr/local/bin/kube-proxy"])
        .program("usr/local/bin/kube-proxy", &programs.kube_proxy())
        .text("etc/passwd", PASSWD)
        .text("etc/group", GROUP);
    for program in NETFILTER {
        image = image.program(&format!("usr/sbin/{program}"), &which(program)?);
    }
    for name in IPTABLES {
        image = image.link(&format!("usr/sbin/{name}"), "xtables-nft-multi");
    }
    let extensions = extensions()?;
    for file in fs::read_dir(&extensions).with_context(|| extensions.display().to_string())? {
        let file = file?.path();
        let inside = file.strip_prefix("/")?.display().to_string();
        image = image.program(&inside, &file);
    }
    Ok(image)
}

/// Returns the folder of iptables' matches and targets.
fn extensions() -> Result<PathBuf> {
    let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
    let folder = Path::new("/usr/lib").join(triple).join("xtables");
    ensure!(
        folder.is_dir(),
        "{} does not exist: apt-get install iptables",
        folder.display()
    );
    Ok(folder)
}

/// Returns the path of a program. Folders of administrators' programs may be missing on an ordinary user's `PATH`.
pub(super) fn which(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
        .with_context(|| format!("{program} is not on the PATH"))
}
