//! The way of batches to agents' streams.

use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::{Event, Located};
use kplane_rig::cluster::objects;
use serde_json::json;
use tokio::time::sleep;

use super::*;

fn batch(events: Vec<Event>) -> Batch {
    Batch {
        events,
        observed_at: SystemTime::now(),
    }
}

/// A new Service with this number.
fn service(number: u8) -> Event {
    let ip = format!("10.96.0.{number}");
    let spec = json!({"clusterIP": ip, "clusterIPs": [ip]});
    let value = objects::service("shop", &format!("web-{number}"), spec);
    Event::Apply(Box::new(Located::sample(&value)))
}

/// Changes that come more often than streams shall send are announced together, the last of them as well.
#[tokio::test(start_paused = true)]
async fn many_changes_are_announced_together() {
    let (hub, sink) = Hub::sample_with_index("test", Admission::default());
    let mut streams = hub.store().announcements();
    sink.send(Batch::sample(&Kind::ALL, [])).await.unwrap();
    streams.wait_for(|head| head.synced).await.unwrap();
    let announced = tokio::spawn(async move {
        let mut announced = 0;
        while streams.changed().await.is_ok() {
            announced += 1;
            let sent = streams.borrow_and_update().revision;
            if sent > 200 {
                return announced;
            }
        }
        panic!("the last change is not announced");
    });
    for number in 0..200 {
        sink.send(batch(vec![service(number)])).await.unwrap();
        sleep(Duration::from_millis(10)).await;
    }
    let announced = announced.await.unwrap();
    assert!((20..30).contains(&announced), "{announced}");
}
