//! Details of many Services, slice by slice.

use super::super::view::SLICE;
use super::*;

/// Returns the details of all Services, and the number of slices in which they came.
fn all(index: &Index) -> (Vec<(ServiceName, ServiceDetail)>, usize) {
    let names = index.names(&Selection::default());
    let (mut all, mut slices) = (Vec::new(), 0);
    while all.len() < names.len() {
        let details = index.details(&names[all.len()..]);
        assert!(!details.is_empty() && details.len() <= SLICE.0);
        let names = names[all.len()..].iter().cloned();
        all.extend(names.zip(details));
        slices += 1;
    }
    (all, slices)
}

fn numbered(number: usize) -> Value {
    let ip = format!("10.96.{}.{}", number >> 8, number & 255);
    service(&format!("s-{number:04}"), &ip)
}

/// What each detail has is what a question about its Service alone gets.
#[test]
fn a_detail_of_many_is_that_of_one() {
    let mut stray = slice("s-0001-x", "-", &["10.0.0.9"]);
    stray["metadata"]["labels"] = json!({});
    let mut other = stray.clone();
    other["metadata"]["name"] = json!("a-stray");
    let mut elsewhere = stray.clone();
    elsewhere["metadata"]["namespace"] = json!("other");
    let mut wrong = numbered(2);
    wrong["spec"]["externalIPs"] = json!(["no address"]);
    let objects = [
        numbered(0),
        numbered(1),
        wrong,
        // It comes last, and does not get its address.
        service("s-0003", "10.96.0.0"),
        slice("s-0000-a", "s-0000", &["10.0.0.1", "bad address"]),
        stray,
        other,
        elsewhere,
    ];
    let (index, _) = index(&objects);
    let (all, _) = all(&index);
    assert_eq!(all.len(), 4);
    for (name, detail) in &all {
        let mut detail = detail.clone();
        detail.issues.sort();
        assert_eq!(index.detail(name, &[]).as_ref(), Some(&detail), "{name}");
    }
    let issues = all.iter().map(|(_, detail)| detail.issues.len());
    assert_eq!(issues.collect::<Vec<_>>(), [1, 0, 1, 1]);
    let strays = |place: usize| all[place].1.facts.strays.iter().map(|name| &**name);
    assert_eq!(strays(0).count(), 0, "it has a slice");
    assert_eq!(strays(1).collect::<Vec<_>>(), ["s-0001-x", "a-stray"]);
    assert_eq!(strays(2).collect::<Vec<_>>(), ["a-stray", "s-0001-x"]);
}

/// No question holds the index's task for longer, however many Services or endpoints there are.
#[test]
fn a_slice_is_bounded() {
    let (services, endpoints) = SLICE;
    let count = 3 * services + 1;
    let (small, _) = index(&(0..count).map(numbered).collect::<Vec<_>>());
    assert_eq!(all(&small).1, 4);

    let ips: Vec<_> = (0..900).map(|n| format!("10.1.{}.{}", n >> 8, n & 255)).collect();
    let ips: Vec<_> = ips.iter().map(String::as_str).collect();
    let objects = (0..20).flat_map(|number| {
        let name = format!("s-{number:04}");
        [numbered(number), slice(&name, &name, &ips)]
    });
    let (large, _) = index(&objects.collect::<Vec<_>>());
    let in_slice = endpoints / ips.len() + 1;
    assert_eq!(all(&large).1, 20_usize.div_ceil(in_slice));
}
