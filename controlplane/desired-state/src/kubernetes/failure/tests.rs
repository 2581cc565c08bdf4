//! Classification of failures, and their explanations.

use super::*;

const ASKED: Asked = Asked {
    verb: "watch",
    resource: "endpointslices",
    group: "discovery.k8s.io",
};

#[test]
fn statuses_have_their_meanings() {
    for (code, expected) in [
        (401, "unauthorized"),
        (403, "forbidden"),
        (404, "not_served"),
        (410, "gone"),
        (429, "busy"),
        (400, "refused"),
        (422, "refused"),
        (500, "server_error"),
        (504, "server_error"),
        (0, "server_error"),
    ] {
        assert_eq!(
            Failure::of_status(code, "", None).name(),
            expected,
            "{code}"
        );
    }
}

#[test]
fn every_failure_is_one_line_that_says_what_to_do() {
    let text = || "some\n\treason".to_owned();
    let failures = [
        Failure::of_status(401, "", None),
        Failure::of_status(403, "no\nway", None),
        Failure::of_status(404, "", None),
        Failure::of_status(410, "", None),
        Failure::of_status(422, "no\r\nway", None),
        Failure::of_status(429, "", None),
        Failure::of_status(500, "no\u{7}way", None),
        Failure::Unreachable(one_line(&text())),
        Failure::Certificate(one_line(&text())),
        Failure::Credentials(one_line(&text())),
        Failure::Malformed(one_line(&text())),
        Failure::Broken(one_line(&text())),
        Failure::Silent(Duration::from_secs(30)),
    ];
    for failure in failures {
        let line = failure.explain(ASKED);
        assert!(!line.contains(char::is_control), "{line}");
    }
    let forbidden = Failure::of_status(403, "no", None).explain(ASKED);
    assert!(
        forbidden.contains("watch endpointslices.discovery.k8s.io"),
        "{forbidden}"
    );
    assert!(forbidden.contains("rbac.yaml"), "{forbidden}");
}
