//! Answers of API servers, and of other servers.

use super::*;

fn one(resource: &Resource, text: &str) -> Result<Option<Line>, Failure> {
    line(resource, text.as_bytes())
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
    let page = page(&Resource::Services, body.as_bytes()).unwrap();
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
        let page = page(&Resource::Slices, body.as_bytes()).unwrap();
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
        let error = page(&Resource::Slices, body.as_bytes()).unwrap_err();
        assert!(matches!(error, Failure::Malformed(_)), "{error:?}");
    }
}

#[test]
fn lines_of_a_watch() {
    let services = Resource::Services;
    let put = r#"{"type":"MODIFIED","object":{"metadata":{"name":"a","resourceVersion":"12"}}}"#;
    assert!(matches!(
        one(&services, put),
        Ok(Some(Line::Put(12, Ok(Read::Object(Object::Service(_))))))
    ));
    let gone =
        r#"{"type":"DELETED","object":{"metadata":{"name":"a","resourceVersion":"13"},"spec":7}}"#;
    assert!(matches!(
        one(&services, gone),
        Ok(Some(Line::Gone(13, Err(_))))
    ));
    let mark = r#"{"type":"BOOKMARK","object":{"kind":"Service","metadata":{"resourceVersion":"14"},"spec":{}}}"#;
    assert!(matches!(
        one(&services, mark),
        Ok(Some(Line::Bookmark {
            version: 14,
            initial_end: false
        }))
    ));
    let end = r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"15",
        "annotations":{"k8s.io/initial-events-end":"true"}}}}"#;
    assert!(matches!(
        one(&services, end),
        Ok(Some(Line::Bookmark {
            version: 15,
            initial_end: true
        }))
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
            Ok(Some(Line::Error(failure))) => failure,
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
