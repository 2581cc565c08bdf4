//! The first minute of somebody who has the programs and one machine, in the words of the documentation.

use std::env;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::chart::root;
use kplane_tests::link::Route;
use kplane_tests::netns::NetNs;
use kplane_tests::product::Product;
use kplane_tests::support::nft::nft;

const PAGE: &str = "docs/introduction.md";
/// The heading above the commands.
const HEADING: &str = "## A Service on one machine, in a minute";
/// The machine's own address, of a network for documentation (RFC 5737).
const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 10));
const GATEWAY: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
/// Runs the lines in one shell, without the machine's own folder of caches. When one fails, what runs in the background ends.
const IN_A_SHELL: &str = r#"mount -t tmpfs none /var/lib && exec bash -euo pipefail -c "trap 'kill \$(jobs -p) 2> /dev/null || :' EXIT
$1""#;
/// What the server of the page answers: a list of its folder.
const ANSWER: &str = "web.yaml";

/// The page's commands, unchanged and in one shell, serve a Service on a machine that has an address and nothing else,
/// and leave nothing behind.
pub(crate) fn the_first_minute_goes_as_the_page_says() -> Result<()> {
    let page = fs::read_to_string(root().join(PAGE)).context(PAGE)?;
    let script = script(&page)?;
    let machine = NetNs::new("stranger")?;
    let netlink = machine.netlink()?;
    netlink.bridge("eth0")?;
    netlink.add_address("eth0", ADDRESS, 24)?;
    netlink.up("eth0")?;
    netlink.add_route(&Route::default_via(GATEWAY).dev("eth0"))?;

    let home = tempfile::tempdir()?;
    let folder = Product::build()?.folder;
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([folder].into_iter().chain(env::split_paths(&path)))?;
    let mut shell = Command::new("timeout");
    shell
        .args([
            "120", "unshare", "--mount", "bash", "-c", IN_A_SHELL, "bash", &script,
        ])
        .current_dir(home.path())
        .env("HOME", home.path())
        .env("PATH", path);
    let printed = machine.output(shell)?;
    ensure!(
        printed.contains(ANSWER),
        "the Service did not answer:\n{printed}"
    );
    let left = nft(&machine, "list tables")?;
    ensure!(left.trim().is_empty(), "rules are left: {left}");
    Ok(())
}

/// Returns the code below the heading, up to the next one.
fn script(page: &str) -> Result<String> {
    let section = page.split_once(HEADING).context(HEADING)?.1;
    let section = section.split("\n## ").next().unwrap_or_default();
    let lines = section.lines().filter_map(|line| line.strip_prefix("    "));
    let script = lines.collect::<Vec<_>>().join("\n");
    ensure!(
        script.contains("kp-nodeagent"),
        "{PAGE} has no commands below {HEADING}"
    );
    Ok(script)
}
