//! The objects of a fleet: a folder of manifests that all control planes read, and its changes.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use anyhow::Result;

/// Maximum number of Services whose endpoints change, one after the other.
const CHANGING: u32 = 100;
/// Second byte of the first endpoint whose address says which change made it: 10.64.0.0 and following ones.
const STAMPED: u8 = 64;
/// Number of bits of such an address that count.
const STAMP_BITS: u32 = 22;

/// Returns the number of the change that made an endpoint; 0 = none.
pub(super) fn stamp_of(endpoint: Ipv4Addr) -> u64 {
    let [_, second, _, _] = endpoint.octets();
    if second & 0xc0 != STAMPED {
        return 0;
    }
    u64::from(endpoint.to_bits() & ((1 << STAMP_BITS) - 1))
}

/// Returns the names of so many nodes.
pub(super) fn names(agents: u32) -> impl Iterator<Item = String> {
    (0..agents).map(|number| format!("n{number}"))
}

/// A folder of manifests.
#[derive(Debug)]
pub(super) struct Input {
    folder: PathBuf,
    /// Number of the last change.
    last: u32,
    /// Number of Services that change.
    changing: u32,
}

impl Input {
    /// Writes Nodes and Services: some have an endpoint that changes, the others two that stay.
    pub(super) fn new(folder: &Path, nodes: u32, services: u32) -> Result<Self> {
        fs::create_dir(folder)?;
        let changing = services.clamp(1, CHANGING);
        let mut text = String::from("apiVersion: v1\nkind: List\nitems: []\n");
        for number in 0..services.max(1) {
            text += &service(number);
            if number >= changing {
                let [_, _, high, low] = number.to_be_bytes();
                let ips = [[10, 245, high, low], [10, 246, high, low]].map(Ipv4Addr::from);
                text += &slice(number, &ips);
            }
        }
        for node in names(nodes) {
            text += &format!("---\napiVersion: v1\nkind: Node\nmetadata: {{name: {node}}}\n");
        }
        fs::write(folder.join("objects.yaml"), text)?;
        let mut input = Self {
            folder: folder.to_owned(),
            last: 0,
            changing,
        };
        for _ in 0..changing {
            input.change()?;
        }
        Ok(input)
    }

    /// Changes the endpoint of the next Service.
    pub(super) fn change(&mut self) -> Result<()> {
        let change = self.last + 1;
        let number = self.last % self.changing;
        let bits = Ipv4Addr::new(10, STAMPED, 0, 0).to_bits() | change;
        let new = self.folder.join("slice.new");
        fs::write(&new, slice(number, &[Ipv4Addr::from_bits(bits)]))?;
        fs::rename(new, self.folder.join(format!("slice-{number}.yaml")))?;
        self.last = change;
        Ok(())
    }

    /// Returns the number of the last change.
    pub(super) fn last(&self) -> u64 {
        self.last.into()
    }

    /// Returns the number of changes after which the same Service changes again.
    pub(super) fn changing(&self) -> u64 {
        self.changing.into()
    }
}

fn service(number: u32) -> String {
    let [_, _, high, low] = number.to_be_bytes();
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s{number}, namespace: fleet}}\n\
         spec: {{clusterIP: 10.97.{high}.{low}, ports: [{{name: http, port: 80}}]}}\n"
    )
}

fn slice(number: u32, endpoints: &[Ipv4Addr]) -> String {
    let endpoints = endpoints.iter();
    let endpoints: Vec<_> = endpoints
        .map(|ip| format!("{{addresses: [{ip}]}}"))
        .collect();
    format!(
        "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
         metadata: {{name: s{number}-1, namespace: fleet, labels: {{kubernetes.io/service-name: s{number}}}}}\n\
         ports: [{{name: http, port: 8080}}]\nendpoints: [{}]\n",
        endpoints.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_says_which_change_made_it() {
        let stamp = |text: &str| stamp_of(text.parse().unwrap());
        assert_eq!(stamp("10.64.0.1"), 1);
        assert_eq!(stamp("10.127.255.255"), (1 << STAMP_BITS) - 1);
        assert_eq!(stamp("10.245.0.1"), 0);
        assert_eq!(stamp("10.246.255.255"), 0);
    }
}
