//! `--cleanup` as people run it: on the way back, twice, and when they should not (I4).

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output};
use std::thread;

use tempfile::TempDir;

use super::agent::{Agent, binary};
use super::leftovers::{CompetingProxy, SERVICE, TABLES};
use kplane_rig::kernel::{in_netns, nft};
use kplane_rig::link::Netlink;

const OURS: &str = "table ip kplane {}\ntable ip6 kplane {}\n";
const GONE: &str =
    "removed: kplane's nftables table ip kplane\nremoved: kplane's nftables table ip6 kplane\n";
const NOTHING: &str = "there was nothing to remove\n";

/// Exit code, standard output, standard error.
type Ran = (Option<i32>, String, String);

fn ran(output: Output) -> Ran {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

fn run(flags: &[&str]) -> Ran {
    ran(binary(flags).output().unwrap())
}

fn fine(stdout: &str) -> Ran {
    (Some(0), stdout.to_owned(), String::new())
}

fn tables() -> String {
    nft(&["list", "tables"], "")
}

/// Refused, with all of `words` in the one line that says why; nothing was changed.
fn refused(flags: &[&str], words: &[&str]) {
    let before = nft(&["list", "ruleset"], "");
    let (code, stdout, stderr) = run(flags);
    assert_eq!((code, &*stdout), (Some(1), ""), "{flags:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{flags:?}: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{flags:?}: {word:?} in {stderr}");
    }
    assert_eq!(nft(&["list", "ruleset"], ""), before);
}

#[test]
fn i4_cleanup_takes_what_is_ours_and_no_more() {
    in_netns(|| {
        nft(&["-f", "-"], &format!("{OURS}{TABLES}"));
        let (code, stdout, stderr) = run(&["--cleanup"]);
        assert_eq!((code, &*stderr), (Some(0), ""));
        assert!(stdout.starts_with(GONE), "{stdout}");
        assert!(
            stdout.contains("\nkept: kube-proxy's nftables table ip kube-proxy\n"),
            "{stdout}"
        );
        assert!(stdout.contains("--cleanup-kube-proxy"), "{stdout}");
        assert_eq!(tables(), "table ip kube-proxy\ntable ip6 kube-proxy\n");
        let (code, stdout, _) = run(&["--cleanup"]);
        assert_eq!(code, Some(0));
        assert!(stdout.starts_with(NOTHING), "{stdout}");
    });
}

#[test]
fn i4_a_dry_run_says_what_would_go_and_changes_nothing() {
    in_netns(|| {
        nft(&["-f", "-"], &format!("{OURS}{TABLES}"));
        let would = GONE.replace("removed", "would remove");
        let theirs = would.replace("kplane", "kube-proxy");
        let flags = ["--cleanup-kube-proxy", "--dry-run"];
        assert_eq!(run(&flags), fine(&format!("{would}{theirs}")));
        assert_eq!(tables().lines().count(), 4);
        nft(&["flush", "ruleset"], "");
        assert_eq!(run(&flags), fine("there is nothing to remove\n"));
        // One that would be refused says so, and what would go all the same.
        nft(&["-f", "-"], OURS);
        let programs = TempDir::new().unwrap();
        let _rival = CompetingProxy::start(programs.path());
        let (code, stdout, stderr) = run(&flags);
        assert_eq!((code, stdout), (Some(1), would));
        assert!(stderr.contains("while a kube-proxy runs"), "{stderr}");
    });
}

#[test]
fn i4_cleanup_says_what_is_gone_and_what_is_left() {
    in_netns(|| {
        nft(&["-f", "-"], &format!("{OURS}{TABLES}"));
        let theirs = GONE.replace("kplane", "kube-proxy");
        let both = ["--cleanup-kube-proxy"];
        assert_eq!(run(&both), fine(&format!("{GONE}{theirs}")));
        assert_eq!(run(&both), fine(NOTHING));
        assert_eq!(nft(&["list", "ruleset"], ""), "");

        // Chains that others need stay, and that is no success.
        let needed = "table ip nat {\n\
            chain KUBE-MARK-MASQ { counter; }\n\
            chain CNI-DN-1 { counter jump KUBE-MARK-MASQ; }\n}\n";
        nft(&["-f", "-"], needed);
        nft(&["-f", "-"], TABLES);
        let (code, stdout, stderr) = run(&both);
        assert_eq!((code, stdout), (Some(1), theirs), "{stderr}");
        assert!(stderr.contains("KUBE-MARK-MASQ kept"), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    });
}

/// In modes iptables and ipvs the chains are ours by the word of whoever cleans up.
#[test]
fn i4_in_mode_iptables_chains_are_ours() {
    in_netns(|| {
        let chains = "table ip nat { chain KUBE-SERVICES { counter; }; }\n";
        nft(&["-f", "-"], &format!("{chains}{TABLES}"));
        let programs = TempDir::new().unwrap();
        let competing_proxy = CompetingProxy::start(programs.path());
        let mode = ["--cleanup", "--backend", "iptables"];
        refused(
            &mode,
            &["uses the same names in this mode", "kube-proxy runs"],
        );
        drop(competing_proxy);
        let (code, stdout, stderr) = run(&mode);
        assert_eq!((code, &*stderr), (Some(0), ""));
        assert!(
            stdout.contains("removed: kplane's iptables-nft: 1 chain"),
            "{stdout}"
        );
        assert!(
            stdout.contains("kept: kube-proxy's nftables table ip kube-proxy"),
            "{stdout}"
        );
        assert!(!nft(&["list", "ruleset"], "").contains("KUBE-SERVICES"));
    });
}

/// It would write its rules again.
#[test]
fn i4_cleanup_is_refused_beside_an_agent() {
    in_netns(|| {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("web.yaml"), SERVICE).unwrap();
        // So that the agent answers at kube-proxy's ports, and is not taken for a kube-proxy.
        Netlink::open().unwrap().up("lo").unwrap();
        let mut agent = Agent::start(folder.path());
        agent.until("update applied");
        let pid = format!("(process {} of user 0)", agent.child.id());
        refused(&["--cleanup"], &["while a kp-nodeagent runs", &pid]);
        refused(&["--cleanup-kube-proxy"], &[&pid]);
        let (code, stdout, stderr) = run(&["--cleanup", "--dry-run"]);
        assert_eq!(code, Some(1));
        assert_eq!(stdout, GONE.replace("removed", "would remove"));
        assert!(stderr.contains(&pid), "{stderr}");
        agent.stop();
        assert_eq!(run(&["--cleanup"]), fine(GONE));
    });
}

/// The tables of a kube-proxy that runs stay; those of ours go, on the way back.
#[test]
fn i4_a_running_kube_proxy_keeps_its_rules() {
    in_netns(|| {
        nft(&["-f", "-"], &format!("{OURS}{TABLES}"));
        let programs = TempDir::new().unwrap();
        let competing_proxy = CompetingProxy::start(programs.path());
        let process = format!("process {} is a kube-proxy", competing_proxy.pid());
        refused(&["--cleanup-kube-proxy"], &[&process, "--cleanup"]);
        let (code, stdout, stderr) = run(&["--cleanup"]);
        assert_eq!((code, &*stderr), (Some(0), ""));
        assert!(stdout.starts_with(GONE), "{stdout}");
        assert_eq!(tables(), "table ip kube-proxy\ntable ip6 kube-proxy\n");
    });
}

/// On the way back, nothing goes before kube-proxy has taken over.
#[test]
fn i4_cleanup_waits_for_the_rules_of_kube_proxy() {
    in_netns(|| {
        nft(&["-f", "-"], OURS);
        let late = ["--cleanup", "--after-kube-proxy=1s"];
        refused(&late, &["no kube-proxy runs; start it"]);
        let programs = TempDir::new().unwrap();
        let _rival = CompetingProxy::start(programs.path());
        refused(&late, &["it runs, and has not written rules"]);
        let chains = "chain KUBE-PROXY-CANARY {}; chain KUBE-NODEPORTS {}; chain KUBE-SERVICES {};";
        nft(&["-f", "-"], &format!("table ip nat {{ {chains} }}\n"));
        refused(&late, &["it runs, and has not written rules"]);
        assert!(tables().contains("table ip kplane\n"), "{}", tables());
        let rule = "add rule ip nat KUBE-SERVICES jump KUBE-NODEPORTS\n";
        nft(&["-f", "-"], rule);
        let (code, stdout, stderr) = run(&["--cleanup", "--after-kube-proxy"]);
        assert_eq!((code, &*stderr), (Some(0), ""));
        assert!(stdout.starts_with(GONE), "{stdout}");
        nft(&["delete", "table", "ip", "nat"], "");
        nft(&["-f", "-"], &format!("{OURS}{TABLES}"));
        let (code, stdout, stderr) = run(&["--cleanup", "--after-kube-proxy"]);
        assert_eq!((code, &*stderr), (Some(0), ""));
        assert!(stdout.starts_with(GONE), "{stdout}");
        assert_eq!(tables(), "table ip kube-proxy\ntable ip6 kube-proxy\n");
        // kube-proxy has taken over rules that have its own names. What has kplane's goes.
        let ip = |words: &str| {
            let output = Command::new("ip").args(words.split(' ')).output().unwrap();
            assert!(output.status.success(), "{words}: {output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        Netlink::open().unwrap().up("lo").unwrap();
        ip("rule add priority 50 fwmark 0x51 lookup 27504");
        ip("route add local default dev lo table 27504 proto static");
        let shared = ["--cleanup", "--after-kube-proxy", "--backend=iptables"];
        let (code, stdout, stderr) = run(&shared);
        assert_eq!((code, &*stderr), (Some(0), ""));
        assert!(stdout.starts_with("kept: the rules"), "{stdout}");
        assert!(
            stdout.contains("removed: kplane's ip rule to table 27504"),
            "{stdout}"
        );
        assert!(!ip("rule list").contains("27504"));
        assert_eq!(ip("route list table all").matches("27504").count(), 0);
    });
}

/// An agent's container: no privilege but `CAP_NET_ADMIN`, which must not look into other processes.
#[test]
fn i4_a_kube_proxy_is_found_with_net_admin_alone() {
    let run = || {
        let mut bare = Command::new("setpriv");
        bare.args(["--bounding-set=-all,+net_admin", "--inh-caps=-all"])
            .arg(env!("CARGO_BIN_EXE_kp-nodeagent"))
            .args(["--cleanup-kube-proxy", "--cache-dir="]);
        ran(bare.output().unwrap())
    };
    in_netns(|| {
        nft(&["-f", "-"], TABLES);
        let programs = TempDir::new().unwrap();
        let competing_proxy = CompetingProxy::start(programs.path());
        let (code, stdout, stderr) = run();
        assert_eq!((code, &*stdout), (Some(1), ""), "{stderr}");
        let process = format!(
            "process {} is a kube-proxy in this network namespace",
            competing_proxy.pid()
        );
        assert!(stderr.contains(&process), "{stderr}");

        // One of another namespace, such as a node of kind's beside us, is no reason.
        in_netns(|| {
            nft(&["-f", "-"], TABLES);
            let (code, stdout, stderr) = run();
            assert_eq!((code, &*stderr), (Some(0), ""));
            assert_eq!(stdout.lines().count(), 2, "{stdout}");
        });
    });
}

/// Answers everything that comes to an address with this body; never, without one. Ends with the process.
fn serve(address: &str, body: Option<&'static str>) {
    Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
    let listener = TcpListener::bind(address).unwrap();
    let answer = move |mut stream: TcpStream| {
        let mut request = [0; 1024];
        let _ = stream.read(&mut request);
        match body {
            Some(body) => {
                let answer = format!("HTTP/1.0 200 OK\r\n\r\n{body}");
                let _ = stream.write_all(answer.as_bytes());
            }
            None => std::mem::forget(stream),
        }
    };
    thread::spawn(move || listener.incoming().flatten().for_each(answer));
}

/// A kube-proxy in a process namespace of its own, or inside of k3s, has no process that can be seen.
#[test]
fn i4_a_kube_proxy_is_found_by_what_it_answers() {
    const CILIUM: &str = r#"{"lastUpdated":"x","currentTime":"y"}"#;
    const KUBE_PROXY: &str = r#"{"lastUpdated":"x","currentTime":"y","nodeEligible":true}"#;
    let cases: [(&str, Option<&'static str>, Option<&str>); 6] = [
        (
            "127.0.0.1:10249",
            Some("iptables"),
            Some("127.0.0.1:10249 answers /proxyMode as kube-proxy does"),
        ),
        (
            "[::]:10256",
            Some(KUBE_PROXY),
            Some("answers /healthz as kube-proxy does"),
        ),
        ("0.0.0.0:10256", None, Some("does not answer")),
        // A port that this node's configuration names.
        (
            "127.0.0.1:777",
            Some("nftables"),
            Some("answers /proxyMode"),
        ),
        ("0.0.0.0:10256", Some(CILIUM), None),
        ("0.0.0.0:778", Some("iptables"), None),
    ];
    for (address, body, found) in cases {
        in_netns(|| {
            serve(address, body);
            nft(&["-f", "-"], TABLES);
            let flags = [
                "--cleanup-kube-proxy",
                "--metrics-bind-address=127.0.0.1:777",
            ];
            match found {
                Some(evidence) => refused(&flags, &[evidence]),
                None => assert_eq!(run(&flags).0, Some(0), "{address} {body:?}"),
            }
        });
    }
}
