//! The file that lists where Services can be reached, in the format of `/etc/hosts`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use kplane_model::{Family, FrontendAddr, ServiceKey, ServiceName};

/// The first lines.
const HEAD: &str = "\
# kplane's Services on this machine. kp-nodeagent writes this file, and overwrites changes.
# To use the names, add the lines to /etc/hosts, or give the file to a resolver (dnsmasq: addn-hosts).
";

/// A socket of a ServicePort.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PortSocket {
    /// The ServicePort.
    pub(super) key: ServiceKey,
    /// The place for which the socket stands.
    pub(super) at: FrontendAddr,
    /// The address of the socket.
    pub(super) socket: SocketAddr,
}

/// The file's content, of both families.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    path: Option<PathBuf>,
    places: [Vec<PortSocket>; 2],
}

impl Hosts {
    pub(super) fn new(path: Option<PathBuf>) -> Self {
        Self {
            path,
            ..Self::default()
        }
    }

    /// Returns whether there is a file at all.
    pub(super) fn is_wanted(&self) -> bool {
        self.path.is_some()
    }

    /// Replaces the places of a family, and writes the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn replace(
        &mut self,
        family: Family,
        mut places: Vec<PortSocket>,
    ) -> io::Result<()> {
        places.sort_unstable();
        self.places[family as usize] = places;
        match &self.path {
            Some(path) => write(path, &self.text()),
            None => Ok(()),
        }
    }

    fn text(&self) -> String {
        let mut of_service: BTreeMap<&ServiceName, Vec<&PortSocket>> = BTreeMap::new();
        for place in self.places.iter().flatten() {
            of_service.entry(&place.key.service).or_default().push(place);
        }
        let mut text = HEAD.to_owned();
        for (service, places) in of_service {
            describe(&mut text, service, &places);
        }
        text
    }
}

/// Adds the lines of a Service.
fn describe(text: &mut String, service: &ServiceName, places: &[&PortSocket]) {
    let (namespace, name) = (&service.namespace, &service.name);
    let own = places.iter().find(|place| place.socket.is_ipv4() && is_address(place));
    let _ = match own {
        Some(place) => writeln!(
            text,
            "\n{}\t{name}.{namespace} {name}.{namespace}.svc {name}.{namespace}.svc.cluster.local",
            place.socket.ip()
        ),
        None => writeln!(text, "\n# {name}.{namespace}"),
    };
    for place in places {
        let key = &place.key;
        let port_name = match &*key.port_name {
            "" => String::new(),
            name => format!("{name} "),
        };
        let what = match place.at {
            FrontendAddr::Address { port, .. } => format!("port {port}"),
            FrontendAddr::NodePort { port, .. } => format!("node port {port}"),
        };
        let _ = writeln!(
            text,
            "#\t{port_name}{what}/{}: {}",
            key.protocol, place.socket
        );
    }
}

fn is_address(place: &PortSocket) -> bool {
    matches!(place.at, FrontendAddr::Address { .. })
}

/// Replaces a file as a whole, so that a reader never sees half of it.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let mut file = std::fs::File::create(&new)?;
    file.write_all(text.as_bytes())?;
    drop(file);
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use kplane_model::{KeyParts, Protocol};

    use super::*;

    fn place(name: &str, at: FrontendAddr, socket: &str, family: Family) -> PortSocket {
        PortSocket {
            key: ServiceKey::from(KeyParts {
                family,
                ..KeyParts::clone(&ServiceKey::sample("shop", name))
            }),
            at,
            socket: socket.parse().unwrap(),
        }
    }

    #[test]
    fn the_file_names_addresses_and_sockets() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        let mut hosts = Hosts::new(Some(path.clone()));
        let protocol = Protocol::Tcp;
        let address = |ip: &str| FrontendAddr::Address {
            ip: ip.parse().unwrap(),
            protocol,
            port: 80,
        };
        let node_port = FrontendAddr::NodePort {
            protocol,
            port: 30080,
        };
        let v4 = vec![
            place("web", node_port, "0.0.0.0:30080", Family::V4),
            place("web", address("10.96.0.1"), "127.96.0.1:10080", Family::V4),
        ];
        hosts.replace(Family::V4, v4).unwrap();
        let v6 = vec![place("six", address("fd00::1"), "[::1]:80", Family::V6)];
        hosts.replace(Family::V6, v6).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        expect_test::expect![[r"

            # six.shop
            #	http port 80/TCP: [::1]:80

            127.96.0.1	web.shop web.shop.svc web.shop.svc.cluster.local
            #	http port 80/TCP: 127.96.0.1:10080
            #	http node port 30080/TCP: 0.0.0.0:30080
        "]]
        .assert_eq(text.strip_prefix(HEAD).unwrap());
        let nowhere = folder.path().join("nowhere/hosts");
        assert!(Hosts::new(Some(nowhere)).replace(Family::V4, Vec::new()).is_err());
    }
}
