//! Legacy Endpoints become slices.

use super::*;
use crate::k8s::LAST_CHANGE_ANNOTATION;

fn endpoints(json: serde_json::Value) -> LegacyEndpoints {
    serde_json::from_value(json).unwrap()
}

fn web(subsets: &serde_json::Value) -> LegacyEndpoints {
    endpoints(serde_json::json!({
        "metadata": {
            "name": "web", "namespace": "shop",
            "annotations": { LAST_CHANGE_ANNOTATION: "2026-01-01T00:00:00Z", "other": "x" },
        },
        "subsets": subsets,
    }))
}

fn names(ids: &[ObjectId]) -> Vec<&str> {
    ids.iter().map(|id| &*id.name).collect()
}

#[test]
fn each_subset_is_a_slice_a_family() {
    let (slices, gone) = Shapes::default().put(&web(&serde_json::json!([{
        "addresses": [{"ip": "10.0.0.1", "nodeName": "n1"}, {"ip": "fd00::1"}, {"ip": "nonsense"}],
        "notReadyAddresses": [{"ip": "10.0.0.2"}],
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    }])));
    assert!(gone.is_empty());
    let slices: Vec<_> = slices
        .into_iter()
        .map(|object| match object {
            Object::EndpointSlice(slice) => slice,
            other => panic!("{other:?}"),
        })
        .collect();
    let [v4, v6] = &slices[..] else {
        panic!("{slices:?}");
    };
    assert_eq!((&*v4.address_type, &*v6.address_type), ("IPv4", "IPv6"));
    let addresses = |slice: &EndpointSlice| {
        slice
            .endpoints
            .iter()
            .flatten()
            .map(|e| {
                (
                    e.addresses[0].to_string(),
                    e.conditions.as_ref().unwrap().ready.unwrap(),
                )
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(
        addresses(v4),
        [
            ("10.0.0.1".to_owned(), true),
            ("10.0.0.2".to_owned(), false)
        ]
    );
    assert_eq!(addresses(v6), [("fd00::1".to_owned(), true)]);
    let first = &v4.endpoints.as_ref().unwrap()[0];
    assert_eq!(first.node_name.as_deref(), Some("n1"));
    assert_eq!(v4.ports.as_ref().unwrap()[0].port, Some(8080));
    assert_eq!(&**v4.metadata.label(SERVICE_NAME_LABEL).unwrap(), "web");
    assert_eq!(v4.metadata.namespace.as_deref(), Some("shop"));
    assert_eq!(v4.metadata.annotations.as_ref().unwrap().len(), 1);
    assert_ne!(v4.metadata.name, v6.metadata.name);
}

#[test]
fn what_disappears_is_named() {
    let mut shapes = Shapes::default();
    let subset = serde_json::json!({"addresses": [{"ip": "10.0.0.1"}]});
    let (slices, _) = shapes.put(&web(&serde_json::json!([subset, subset])));
    assert_eq!(slices.len(), 4);
    let (slices, gone) = shapes.put(&web(&serde_json::json!([subset])));
    assert_eq!(slices.len(), 2);
    assert_eq!(names(&gone), ["web/1/IPv4", "web/1/IPv6"]);
    assert_eq!(
        names(&shapes.gone(&web(&serde_json::Value::Null))),
        ["web/0/IPv4", "web/0/IPv6"]
    );
    assert!(shapes.gone(&web(&serde_json::Value::Null)).is_empty());
}
