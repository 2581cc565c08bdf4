//! Valid and invalid kubeconfigs. The tests do not contact a server.

use super::*;

const GOOD: &str = "\
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: one, cluster: {server: \"https://192.0.2.1:6443\"}}]
users: [{name: u, user: {token: secret}}]
contexts: [{name: c, context: {cluster: one, user: u}}]
";

async fn open_text(text: &str, master: Option<&str>) -> Result<Api, AccessError> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config");
    std::fs::write(&file, text).unwrap();
    let master = master.map(str::to_owned);
    Api::new(Access::Kubeconfig { file, master }, 0).await
}

#[tokio::test]
async fn a_good_one_opens_without_a_server() {
    let api = open_text(GOOD, None).await.unwrap();
    assert_eq!(api.server(), "https://192.0.2.1:6443");
    let api = open_text(GOOD, Some("https://[2001:db8::1]:1")).await.unwrap();
    assert_eq!(api.server(), "https://[2001:db8::1]:1");
    let api = Api::new(
        Access::Anonymous {
            master: "192.0.2.9:8080".to_owned(),
        },
        0,
    );
    assert_eq!(api.await.unwrap().server(), "http://192.0.2.9:8080");
}

#[tokio::test]
async fn bad_ones_are_refused_in_one_line_that_says_what_to_do() {
    let cases = [
        (
            "current-context: c",
            "current-context: x",
            "names the context \"x\"",
        ),
        ("current-context: c", "", "has no current-context"),
        (
            "current-context: c",
            "current-context: \"\"",
            "has no current-context",
        ),
        ("user: u", "user: v", "names the user \"v\""),
        ("cluster: one", "cluster: two", "names the cluster \"two\""),
        (
            "server: \"https://192.0.2.1:6443\"",
            "{}",
            "is not a kubeconfig",
        ),
        (
            "https://192.0.2.1:6443",
            "ftp://192.0.2.1",
            "is not the address of an API server",
        ),
        (
            "https://192.0.2.1:6443",
            "a b",
            "is not the address of an API server",
        ),
        (
            "server: ",
            "certificate-authority: /no/such, server: ",
            "certificate-authority cannot be used",
        ),
        (
            "server: ",
            "proxy-url: \"socks5://192.0.2.7\", server: ",
            "the proxy socks5://192.0.2.7 cannot be used",
        ),
        (
            "token: secret",
            "client-certificate-data: aGk=, client-key-data: aGk=",
            "a certificate or key cannot be used",
        ),
        (
            "token: secret",
            "exec: {apiVersion: client.authentication.k8s.io/v1, command: /no/such, interactiveMode: Never}",
            "credentials cannot be obtained",
        ),
        (GOOD, "clusters: [", "is not a kubeconfig"),
        (GOOD, "", "has no current-context"),
    ];
    for (from, to, expected) in cases {
        assert!(GOOD.contains(from));
        let error = open_text(&GOOD.replace(from, to), None).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{to}: {error}");
        assert!(!error.contains('\n'), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
    let missing = Access::Kubeconfig {
        file: "/no/such".into(),
        master: None,
    };
    let error = Api::new(missing, 0).await.unwrap_err().to_string();
    assert!(
        error.contains("cannot read the kubeconfig /no/such"),
        "{error}"
    );
    let error = open_text(GOOD, Some("::")).await.unwrap_err().to_string();
    assert!(error.starts_with("--master: "), "{error}");
}

/// New credentials in the file are used, invalid ones are not; the file is read at most every 5 s.
#[tokio::test(start_paused = true)]
async fn credentials_are_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config");
    std::fs::write(&file, GOOD).unwrap();
    let access = Access::Kubeconfig {
        file: file.clone(),
        master: None,
    };
    let api = Api::new(access, 0).await.unwrap();
    std::fs::write(&file, GOOD.replace("192.0.2.1", "192.0.2.2")).unwrap();
    api.renew().await.unwrap();
    assert_eq!(api.server(), "https://192.0.2.1:6443", "a moment ago");
    tokio::time::advance(RENEW_EVERY).await;
    api.renew().await.unwrap();
    assert_eq!(api.server(), "https://192.0.2.2:6443");
    std::fs::write(&file, "nonsense: [").unwrap();
    tokio::time::advance(RENEW_EVERY).await;
    api.renew().await.unwrap_err();
    assert_eq!(api.server(), "https://192.0.2.2:6443");
}

/// After a reboot the ClusterIP does not work, because the proxy that would program it waits for the API server.
#[test]
fn a_pod_hears_of_the_trap_that_its_address_is() {
    let reported = |master: Option<&str>| {
        let master = master.map(str::to_owned);
        let failure = Failure::Unreachable("timed out".to_owned());
        match (Access::InCluster { master }).explain(failure) {
            Failure::Unreachable(why) => why,
            other => panic!("{other:?}"),
        }
    };
    let why = reported(None);
    assert!(
        why.starts_with("timed out; ") && why.contains("KPLANE_API_SERVER"),
        "{why}"
    );
    assert_eq!(reported(Some("https://192.0.2.1:6443")), "timed out");
    let other = (Access::InCluster { master: None }).explain(Failure::Unauthorized);
    assert_eq!(other, Failure::Unauthorized);
}

#[test]
fn a_pod_whose_manifest_names_the_api_server_does_not_need_kplane() {
    let names = |host: Option<&str>, cluster_ip: Option<&str>| {
        names_another(|name| {
            let value = match name {
                "KUBERNETES_SERVICE_HOST" => host,
                _ => cluster_ip,
            };
            value.map(str::to_owned)
        })
    };
    assert!(names(Some("192.0.2.1"), Some("10.96.0.1")));
    assert!(!names(Some("10.96.0.1"), Some("10.96.0.1")));
    assert!(!names(Some("10.96.0.1"), None));
    assert!(!names(None, None));
}
