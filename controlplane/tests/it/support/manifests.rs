//! Services with one endpoint each, and folders of them.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Writes a file in one step, as careful programs do.
pub(crate) fn put(folder: &Path, name: &str, text: impl AsRef<[u8]>) {
    let beside = folder.join(".new");
    fs::write(&beside, text).unwrap();
    fs::rename(beside, folder.join(name)).unwrap();
}

/// Returns Services with these numbers, each with one endpoint.
pub(crate) fn manifests(numbers: impl IntoIterator<Item = usize>) -> String {
    let mut text = String::new();
    for n in numbers {
        let _ = write!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: svc-{n}, namespace: shop}}\n\
             spec: {{clusterIP: 10.96.{}.{}, ports: [{{port: 80}}]}}\n{}",
            n / 250,
            n % 250 + 1,
            slice(n)
        );
    }
    text
}

/// Returns the EndpointSlice of the Service with this number.
pub(crate) fn slice(n: usize) -> String {
    format!(
        "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: svc-{n}-1, namespace: shop, labels: {{kubernetes.io/service-name: svc-{n}}}}}\n\
         addressType: IPv4\nendpoints: [{{addresses: [10.0.{}.{}]}}]\nports: [{{name: \"\", port: 80}}]\n",
        n / 250,
        n % 250 + 1
    )
}
