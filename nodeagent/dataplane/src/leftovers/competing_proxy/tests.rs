//! Tests of the parsers. Detection itself needs processes: `nodeagent/tests/it/kernel/`.

use std::net::SocketAddr;

use super::ports::{is_health, is_mode, listening};

fn socket(line: &str) -> Option<(SocketAddr, String)> {
    listening(line)
}

/// Lines of the kernel's list, one of them from an old kernel.
#[test]
fn sockets_that_listen_are_read() {
    let v4 = "   1: 0100007F:2809 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 43211 1 0000000000000000 100 0 0 10 0";
    let of = |text: &str, inode: &str| Some((text.parse().unwrap(), inode.to_owned()));
    assert_eq!(socket(v4), of("127.0.0.1:10249", "43211"));
    let v6 = "   0: 00000000000000000000000000000000:2810 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 58 1 0";
    assert_eq!(socket(v6), of("[::]:10256", "58"));
    let mapped = v6.replacen(
        "00000000000000000000000000000000:2810",
        "0000000000000000FFFF00000100007F:2810",
        1,
    );
    assert_eq!(socket(&mapped), of("127.0.0.1:10256", "58"));
    for other in [
        &*v4.replace(" 0A ", " 01 "),
        "",
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode",
        "1: zz:1 0:0 0A 0 0 0 0 0 1",
        "1: 0100007F 0:0 0A 0 0 0 0 0 1",
        "1: \u{e4}100007F:1 0:0 0A 0 0 0 0 0 1",
    ] {
        assert_eq!(socket(other), None, "{other}");
    }
}

/// Answers of kube-proxy, and not those of a program on its port (Cilium).
#[test]
fn answers_of_kube_proxy_are_known() {
    assert!(is_mode("ipvs") && is_mode("nftables\n"));
    assert!(!is_mode("") && !is_mode("404 page not found") && !is_mode("noop"));
    let its =
        r#"{"lastUpdated":"2026-01-01 00:00:00 +0000 UTC","currentTime":"..","nodeEligible":true}"#;
    assert!(is_health(its));
    let ciliums = r#"{"lastUpdated":"2026-01-01 00:00:00 +0000 UTC","currentTime":".."}"#;
    assert!(!is_health(ciliums) && !is_health("ok"));
}
