//! Answers of API servers, and of other servers.

use super::*;

fn one(resource: &Resource, text: &str) -> Result<Option<RawEvent>, Failure> {
    event(resource, Encoding::Json, text.as_bytes())
}

#[test]
fn a_page_is_read_object_by_object() {
    let body = r#"{"kind":"ServiceList","apiVersion":"v1",
        "metadata":{"resourceVersion":"42","continue":"abc","remainingItemCount":3},
        "items":[
          {"metadata":{"name":"web","namespace":"shop","resourceVersion":"7","managedFields":[{"x":1}],
             "annotations":{"other":"text"}},"spec":{"clusterIP":"10.0.0.1","ports":[{"port":80}]}},
          {"metadata":{"name":"bad","namespace":"shop","resourceVersion":"8"},"spec":{"ports":"none"}},
          {"metadata":{"name":"last","resourceVersion":"9"}}]}"#;
    let page = page(&Resource::Services, Encoding::Json, body.as_bytes()).unwrap();
    assert_eq!((page.version, page.next.as_deref()), (42, Some("abc")));
    let names: Vec<_> = page
        .items
        .iter()
        .map(|item| match item {
            Ok(Read::Object(object)) => object.id().name.to_string(),
            Ok(Read::Endpoints(_)) => "endpoints".to_owned(),
            Err(unreadable) => format!("{}/{} is bad", unreadable.namespace, unreadable.name),
        })
        .collect();
    assert_eq!(names, ["web", "shop/bad is bad", "last"]);
}

#[test]
fn empty_pages_are_pages() {
    for body in [
        r#"{"metadata":{"resourceVersion":"1"},"items":[]}"#,
        r#"{"metadata":{"resourceVersion":"1","continue":""},"items":null}"#,
        r#"{"metadata":{"resourceVersion":"1"}}"#,
    ] {
        let page = page(&Resource::Slices, Encoding::Json, body.as_bytes()).unwrap();
        assert!(page.items.is_empty() && page.next.is_none());
    }
    for body in [
        "",
        "null",
        "[]",
        "<html>",
        r#"{"items":[]}"#,
        r#"{"metadata":{"resourceVersion":"x"}}"#,
    ] {
        let error = page(&Resource::Slices, Encoding::Json, body.as_bytes()).unwrap_err();
        assert!(matches!(error, Failure::Malformed(_)), "{error:?}");
    }
}

#[test]
fn lines_of_a_watch() {
    let services = Resource::Services;
    let put = r#"{"type":"MODIFIED","object":{"metadata":{"name":"a","resourceVersion":"12"}}}"#;
    assert!(matches!(
        one(&services, put),
        Ok(Some(RawEvent::Put(
            12,
            Ok(Read::Object(Object::Service(_)))
        )))
    ));
    let gone =
        r#"{"type":"DELETED","object":{"metadata":{"name":"a","resourceVersion":"13"},"spec":7}}"#;
    assert!(matches!(
        one(&services, gone),
        Ok(Some(RawEvent::Gone(13, Err(_))))
    ));
    let mark = r#"{"type":"BOOKMARK","object":{"kind":"Service","metadata":{"resourceVersion":"14"},"spec":{}}}"#;
    assert!(matches!(
        one(&services, mark),
        Ok(Some(RawEvent::Bookmark(14)))
    ));
    assert!(matches!(
        one(&services, r#"{"type":"NEW","object":{}}"#),
        Ok(None)
    ));
}

#[test]
fn errors_within_a_watch_are_failures() {
    let error = |code: u16| {
        let text = format!(
            r#"{{"type":"ERROR","object":{{"kind":"Status","code":{code},"message":"m"}}}}"#
        );
        match one(&Resource::Slices, &text) {
            Ok(Some(RawEvent::Error(failure))) => failure,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(error(410), Failure::Gone);
    assert!(matches!(error(500), Failure::Server { code: 500, .. }));
    for text in [
        "",
        "{}",
        "null",
        r#"{"type":"ADDED","object":{"metadata":{}}}"#,
        r#"{"type":7}"#,
    ] {
        let error = one(&Resource::Slices, text).unwrap_err();
        assert!(matches!(error, Failure::Malformed(_)), "{error:?}");
    }
}

/// Lists of a kube-apiserver 1.37.2, without managedFields in JSON.
const LISTS: [(Resource, &[u8], &[u8]); 5] = [
    (
        Resource::Services,
        include_bytes!("answers/services.json"),
        include_bytes!("answers/services.pb"),
    ),
    (
        Resource::Slices,
        include_bytes!("answers/slices.json"),
        include_bytes!("answers/slices.pb"),
    ),
    (
        Resource::Nodes(None),
        include_bytes!("answers/nodes.json"),
        include_bytes!("answers/nodes.pb"),
    ),
    (
        Resource::Namespaces,
        include_bytes!("answers/namespaces.json"),
        include_bytes!("answers/namespaces.pb"),
    ),
    (
        Resource::Pods,
        include_bytes!("answers/pods.json"),
        include_bytes!("answers/pods.pb"),
    ),
];

/// All that is known of the objects of a page, with their versions.
fn content(page: RawPage) -> (u64, u64, Vec<(String, Object)>) {
    let object = |item| match item {
        Ok(Read::Object(object)) => (format!("{object:?}"), object),
        other => panic!("{other:?}"),
    };
    let objects = page.items.into_iter().map(object).collect();
    (page.version, page.changed, objects)
}

#[test]
fn both_encodings_of_a_list_are_the_same_objects() {
    for (resource, json, protobuf) in LISTS {
        let [json, protobuf] = [(Encoding::Json, json), (Encoding::Protobuf, protobuf)]
            .map(|(encoding, bytes)| content(page(&resource, encoding, bytes).unwrap()));
        assert!(json.2.len() >= 2, "{resource:?}");
        assert_eq!(json, protobuf, "{resource:?}");
    }
}

#[test]
fn explanations_of_errors_are_read_in_both_encodings() {
    let (json, protobuf) = (
        include_bytes!("answers/status.json").as_slice(),
        include_bytes!("answers/status.pb").as_slice(),
    );
    for (encoding, bytes) in [(Encoding::Json, json), (Encoding::Protobuf, protobuf)] {
        let status = status(encoding, bytes);
        assert_eq!(
            (&*status.message, status.code),
            ("services \"none\" not found", 404)
        );
        assert_eq!(super::status(encoding, b"what").code, 0);
    }
}

#[test]
fn protobuf_that_is_cut_or_damaged_is_refused_or_read_but_nothing_else() {
    for (resource, _, whole) in LISTS {
        for end in 0..whole.len() {
            let _ = page(&resource, Encoding::Protobuf, &whole[..end]);
        }
        let mut damaged = whole.to_vec();
        for at in 0..whole.len() {
            for byte in [0, 0x7f, 0x80, 0xff, whole[at] ^ 1] {
                damaged[at] = byte;
                let _ = page(&resource, Encoding::Protobuf, &damaged);
                let _ = event(&resource, Encoding::Protobuf, &damaged);
            }
            damaged[at] = whole[at];
        }
    }
    let unasked = page(&Resource::Endpoints, Encoding::Protobuf, LISTS[0].2);
    assert!(matches!(unasked, Err(Failure::Malformed(_))), "{unasked:?}");
}

/// The API server stores any bytes in annotations, so a tenant's must not keep other objects from being read.
#[test]
fn bytes_of_an_annotation_that_are_no_text_concern_nobody() {
    let (resource, _, whole) = &LISTS[0];
    let name = b"\n\x04note\x12";
    let at = whole.windows(name.len()).position(|bytes| bytes == name);
    let mut damaged = whole.to_vec();
    // The name is followed by the length of the value.
    damaged[at.unwrap() + name.len() + 1] = 0xff;
    let [before, after] =
        [whole, &*damaged].map(|bytes| content(page(resource, Encoding::Protobuf, bytes).unwrap()));
    assert_eq!(before, after);
}
