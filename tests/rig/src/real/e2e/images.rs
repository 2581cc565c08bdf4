//! The images of the tests' Pods, under the names by which the tests ask for them.
//!
//! `agnhost` is Kubernetes' own program. Around it is Debian's user land in place of Alpine's.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::Programs;
use crate::process::output;
use crate::real::NodePrograms;
use crate::real::image::Image;
use crate::real::images::{GROUP, PASSWD, which, with_busybox};

/// Programs of this machine that the images contain, and Debian's packages that contain them.
pub const REQUIRED: [(&str, &str); 9] = [
    ("dash", "dash"),
    ("bash", "bash"),
    ("curl", "curl"),
    ("wget", "wget"),
    ("nc.openbsd", "netcat-openbsd"),
    ("dig", "bind9-dnsutils"),
    ("ip", "iproute2"),
    ("ss", "iproute2"),
    ("conntrack", "conntrack"),
];
/// Their places in the images. busybox has programs with most of these names, whose options are not those that the
/// tests use. Its shell would run its own programs even so, so there is another one.
const PLACES: [(&str, &str); 10] = [
    ("bin/sh", "dash"),
    ("bin/bash", "bash"),
    ("bin/curl", "curl"),
    ("bin/wget", "wget"),
    ("bin/nc", "nc.openbsd"),
    ("bin/dig", "dig"),
    ("bin/ip", "ip"),
    ("bin/ss", "ss"),
    ("bin/getent", "getent"),
    ("bin/conntrack", "conntrack"),
];
const NAMES: &str = "hosts: files dns\n";
/// The folder of the certificate that agnhost's TLS servers show.
const CERTIFICATE: &str = "test/images/agnhost/porter";

/// Writes the archives of all images that the tests of networks use, once, and returns their paths.
///
/// # Errors
/// A program is missing, or the cache is not writable.
pub fn archives(tests: &Programs, nodes: &NodePrograms) -> Result<Vec<PathBuf>> {
    let mut list = Command::new(tests.tests());
    list.arg("--list-images");
    let list = output(list).context("list the tests' images")?;
    let mut archives = Vec::new();
    for name in list.lines().map(str::trim) {
        if let Some(image) = image(name, tests, nodes)? {
            archives.push(image.archive(nodes.images())?);
        }
    }
    Ok(archives)
}

/// Returns the image with a name; `None` if no test of networks asks for it.
fn image(name: &str, tests: &Programs, nodes: &NodePrograms) -> Result<Option<Image>> {
    let (path, _) = name.rsplit_once(':').unwrap_or((name, ""));
    // An image of a private registry has the same last name.
    if path.contains("authenticated") {
        return Ok(None);
    }
    let last = path.rsplit('/').next().unwrap_or_default();
    Ok(Some(match last {
        "agnhost" => agnhost(name, &["/agnhost"], tests)?
            .arguments(&["pause"])
            .copy("coredns", &nodes.coredns()),
        // Kubernetes' tests want a web server that becomes ready.
        "nginx" => agnhost(name, &["/agnhost", "netexec", "--http-port=80"], tests)?,
        "busybox" => with_busybox(Image::new(name, &[]))?
            .text("etc/passwd", PASSWD)
            .text("etc/group", GROUP),
        "distroless-iptables" | "glibc-dns-testing" => userland(Image::new(name, &[]))?,
        "pause" => Image::new(name, &["/pod", "pause"]).copy("pod", &nodes.pod()),
        "regression-issue-74839" => {
            Image::new(name, &["/regression-issue-74839"]).copy(last, &tests.in_pods(last))
        }
        _ => return Ok(None),
    }))
}

fn agnhost(name: &str, entrypoint: &[&str], tests: &Programs) -> Result<Image> {
    let certificate = tests.source(CERTIFICATE)?;
    let image = Image::new(name, entrypoint)
        .copy("agnhost", &tests.in_pods("agnhost"))
        .link("agnhost-2", "agnhost")
        .copy("localhost.crt", &certificate.join("localhost.crt"))
        .copy("localhost.key", &certificate.join("localhost.key"))
        .folder("uploads", 0o777);
    userland(image)
}

fn userland(image: Image) -> Result<Image> {
    let mut image = with_busybox(image)?
        .text("etc/passwd", PASSWD)
        .text("etc/group", GROUP)
        .text("etc/nsswitch.conf", NAMES);
    for (place, program) in PLACES {
        // A link of busybox may have the place.
        image = image.program(place, &which(program)?);
    }
    Ok(image)
}
