//! Tests of the canary.

use tokio::net::TcpListener;

use super::*;
use crate::desired::CliffGuard;
use crate::desired::fixture::{Plane, svc};

fn canary() -> (Canary, Prober) {
    channel(ServiceName::new("shop", "canary"))
}

fn addresses(prober: &Prober) -> Option<Vec<String>> {
    let addresses = prober.addresses.borrow();
    Some(addresses.as_ref()?.values().map(ToString::to_string).collect())
}

fn missed() -> Result<(), String> {
    Err("no answer".to_owned())
}

#[test]
fn only_what_the_kernel_holds_is_probed() {
    let (follower, prober) = canary();
    let mut desired = Desired::new(CliffGuard::default());
    let mut plane = Plane::new([svc("web", &[])]);
    desired.apply(plane.snapshot_update()).unwrap();
    assert_eq!(addresses(&prober), None);
    let fine = |_: &ServiceName| false;
    follower.programmed(Family::V4, &desired, None, fine);
    assert_eq!(
        addresses(&prober),
        Some(vec![]),
        "the kernel holds no canary"
    );

    plane.put(&svc("canary", &["10.0.0.1:10256"]));
    desired.apply(plane.snapshot_update()).unwrap();
    follower.programmed(Family::V6, &desired, None, fine);
    assert_eq!(
        addresses(&prober),
        Some(vec![]),
        "the other family does not matter"
    );
    follower.programmed(Family::V4, &desired, None, fine);
    let held = Some(vec!["10.96.0.1:80".to_owned()]);
    assert_eq!(addresses(&prober), held);
    follower.programmed(Family::V4, &desired, None, |service| {
        *service.name == *"canary"
    });
    assert_eq!(addresses(&prober), Some(vec![]), "the kernel refused it");
}

#[tokio::test]
async fn an_answer_counts_at_once_and_silence_after_three_probes() {
    let (follower, mut prober) = canary();
    assert_eq!((follower.answers(), follower.failure()), (None, None));
    assert_eq!(prober.note(missed()), AGAIN);
    prober.note(missed());
    assert_eq!(follower.answers(), None);
    prober.note(missed());
    assert_eq!(follower.answers(), Some(false));
    let since = follower.failure().unwrap().since_ms;
    prober.note(missed());
    assert_eq!(follower.failure().unwrap().since_ms, since);
    assert_eq!(prober.note(Ok(())), INTERVAL);
    assert_eq!((follower.answers(), follower.failure()), (Some(true), None));
    prober.note(missed());
    assert_eq!(follower.answers(), Some(true), "one lost packet is no news");
}

#[tokio::test]
async fn the_address_must_answer_as_an_agent_does() {
    let (_follower, prober) = canary();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = async |text: &str| {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = vec![0; REQUEST.len()];
        stream.read_exact(&mut request).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
    };
    let probe = || prober.probe(vec![address]);
    assert_eq!(tokio::join!(probe(), answer("HTTP/1.1 503 \r\n")).0, Ok(()));
    let (other, ()) = tokio::join!(probe(), answer("SSH-2.0"));
    assert!(other.unwrap_err().contains("another program answers"));
    assert!(prober.probe(vec![]).await.unwrap_err().contains("is not in the kernel"));
    drop(listener);
    assert!(prober.probe(vec![address]).await.unwrap_err().contains("refused"));
}
