//! Addresses with ports, as kube-proxy reads them: IP addresses only, leading zeros are decimal
//! (A4), and a missing port is filled in.

use std::net::{IpAddr, SocketAddr};

use kplane_model::parse_ip;

/// Returns the hosts on which health checks and metrics are served by default.
pub(super) fn default_hosts(v6: bool) -> (&'static str, &'static str) {
    if v6 { ("[::]", "[::1]") } else { ("0.0.0.0", "127.0.0.1") }
}

/// Returns an address with its own port, or else with `port`. Text that is not an address stays as
/// it is, so that the validation reports it.
pub fn with_port(text: &str, port: u16) -> String {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match parse_ip(bare.unwrap_or(text)) {
        Ok(IpAddr::V4(ip)) if bare.is_none() => format!("{ip}:{port}"),
        Ok(IpAddr::V6(ip)) => format!("[{ip}]:{port}"),
        _ => text.to_owned(),
    }
}

/// Reads `10.0.0.1:80` or `[fd00::1]:80`. Port 0 lets the kernel choose one.
pub fn parse(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.rsplit_once(':')?;
    let bracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let ip = parse_ip(bracketed.unwrap_or(host)).ok()?;
    if ip.is_ipv6() != bracketed.is_some() || !port.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some(SocketAddr::new(ip, port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i7_ip_and_port() {
        for (text, expected) in [
            ("0.0.0.0:10256", "0.0.0.0:10256"),
            ("010.0.0.1:080", "10.0.0.1:80"),
            ("[::]:1", "[::]:1"),
        ] {
            assert_eq!(parse(text).unwrap().to_string(), expected);
        }
        for text in [
            "",
            ":1",
            "10.0.0.1",
            "10.0.0.1:",
            "10.0.0.1:+1",
            "10.0.0.1:65536",
            "::1:1",
            "[::1]",
            "[10.0.0.1]:1",
            "localhost:1",
            "[::1:1",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_missing_port_is_filled_in() {
        assert_eq!(with_port("10.0.0.1", 5), "10.0.0.1:5");
        assert_eq!(with_port("::1", 5), "[::1]:5");
        assert_eq!(with_port("[::1]", 5), "[::1]:5");
        assert_eq!(with_port("[::1]:7", 5), "[::1]:7");
        assert_eq!(with_port("nonsense", 5), "nonsense");
    }
}
