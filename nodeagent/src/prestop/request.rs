//! What a hook asks: bytes of any process on the node.

use std::time::Duration;

use super::LONGEST;

/// Largest head of a request, in bytes.
pub(super) const MAX_HEAD: usize = 4_096;

/// What a hook asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Asked {
    /// Longest time of the wait, if the hook names one that is valid.
    pub(super) within: Option<Duration>,
    /// Port of the Pod's endpoints; 0 = all.
    pub(super) port: u16,
}

impl Asked {
    /// Reads the head of a request; `None` if it is not about a Pod.
    pub(super) fn read(head: &[u8]) -> Option<Self> {
        let line = head.split(|byte| *byte == b'\r').next()?;
        let mut words = std::str::from_utf8(line).ok()?.split(' ');
        let (method, target) = (words.next()?, words.next()?);
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        if !matches!(method, "GET" | "HEAD") || path != "/gone" {
            return None;
        }
        let value = |wanted: &str| {
            query
                .split('&')
                .filter_map(|pair| pair.split_once('='))
                .find(|(name, _)| *name == wanted)
                .map(|(_, value)| value)
        };
        Some(Self {
            within: value("within").and_then(duration),
            port: value("port").and_then(|port| port.parse().ok()).unwrap_or(0),
        })
    }
}

/// Reads a time such as `25s`, `1500ms` or `2m`.
fn duration(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(digits)?;
    let number: u64 = number.parse().ok()?;
    let millis = match unit {
        "ms" => 1,
        "s" | "" => 1_000,
        "m" => 60_000,
        _ => return None,
    };
    Some(Duration::from_millis(number.saturating_mul(millis)).min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hook_names_a_time_and_a_port() {
        let read =
            |target: &str| Asked::read(format!("GET {target} HTTP/1.1\r\nhost: x\r\n").as_bytes());
        let plain = Some(Asked::default());
        assert_eq!(read("/gone"), plain);
        for (query, ms) in [
            ("within=25s", 25_000),
            ("a&within=1500ms", 1_500),
            ("within=2m&b=1", 120_000),
            ("within=7", 7_000),
            ("within=9999m", 300_000),
            ("within=0s", 0),
        ] {
            let asked = read(&format!("/gone?{query}")).unwrap();
            assert_eq!(asked.within, Some(Duration::from_millis(ms)), "{query}");
        }
        // What cannot be read has no effect: an error would end the Pod at once.
        for query in [
            "within=",
            "within=-1s",
            "within=1h",
            "within",
            "port=x",
            "port=70000",
            "=",
            "&&",
            "within=1\u{e9}",
        ] {
            assert_eq!(read(&format!("/gone?{query}")), plain, "{query}");
        }
        assert_eq!(read("/gone?port=8080").unwrap().port, 8080);
    }

    #[test]
    fn other_requests_are_not_about_pods() {
        for head in [
            "",
            "GET",
            "GET /",
            "POST /gone HTTP/1.1",
            "GET /gones HTTP/1.1",
            "\r\n",
            "GET\t/gone",
        ] {
            assert_eq!(Asked::read(head.as_bytes()), None, "{head:?}");
        }
        assert_eq!(Asked::read(&[0xff; 64]), None);
    }
}
