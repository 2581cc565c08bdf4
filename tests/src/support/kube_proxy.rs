//! Rules in the manner of kube-proxy that serve a Service, written by hand.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::Result;
use kplane_model::Family;
use kplane_rig::netns::NetNs;

use super::nft;
use super::programs::without_counters;
use super::service::{At, Svc};

/// kube-proxy in a mode that it had; what it left goes on serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Nftables,
    /// Over x_tables.
    Legacy,
    /// Over nf_tables.
    Nft,
}

/// Chains of a Service, of its first endpoints and of its addresses outside.
const SVC: &str = "KUBE-SVC-ERIFXISQEP7F7OF4";
const EXT: &str = "KUBE-EXT-ERIFXISQEP7F7OF4";
const SEPS: [&str; 3] = [
    "KUBE-SEP-IT2ZTR26TO4XFPTO",
    "KUBE-SEP-JVBAKFCBLNRRKOSC",
    "KUBE-SEP-YIL6JZP7A3QYXJU2",
];

impl Mode {
    /// Puts rules for a Service's TCP port into a node's namespace, in both families: ClusterIP
    /// and node port, on all endpoints, masqueraded for everybody but pods.
    pub fn serve(self, node: &NetNs, service: &Svc) -> Result<()> {
        for family in Family::ALL {
            match self {
                Self::Nftables => nft::load(node, &nftables(service, family))?,
                Self::Legacy | Self::Nft => {
                    self.restore(node, family, &iptables(service, family))?;
                }
            }
        }
        Ok(())
    }

    /// Adds what a listing of iptables says.
    pub fn restore(self, node: &NetNs, family: Family, text: &str) -> Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), text)?;
        let mut command = Command::new(self.program(family, "restore"));
        command.arg("--noflush").arg(file.path());
        node.output(command).map(drop)
    }

    /// Lists iptables, without what changes from one moment to the next.
    pub fn save(self, node: &NetNs, family: Family) -> Result<Vec<String>> {
        let command = Command::new(self.program(family, "save"));
        Ok(without_counters(&node.output(command)?))
    }

    fn program(self, family: Family, verb: &str) -> String {
        let base = match family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        match self {
            Self::Legacy => format!("{base}-legacy-{verb}"),
            Self::Nftables | Self::Nft => format!("{base}-nft-{verb}"),
        }
    }
}

fn pods(family: Family) -> &'static str {
    match family {
        Family::V4 => "10.244.0.0/16",
        Family::V6 => "fd44::/32",
    }
}

/// E1-E7, in small.
fn nftables(service: &Svc, family: Family) -> String {
    let (ip, kind) = match family {
        Family::V4 => ("ip", "ipv4_addr"),
        Family::V6 => ("ip6", "ipv6_addr"),
    };
    let to = service.address(At::ClusterIp, family, 1);
    let (cluster_ip, port, node_port) = (to.ip(), to.port(), service.node_port());
    let endpoints: Vec<String> = service
        .endpoints
        .iter()
        .enumerate()
        .map(|(n, ep)| {
            let address = ep.address(family);
            format!("{n} : {} . {}", address.ip(), address.port())
        })
        .collect();
    let (count, endpoints, pods) = (endpoints.len(), endpoints.join(", "), pods(family));
    format!(
        "table {ip} kube-proxy {{
          comment \"rules for kube-proxy\"
          map service-ips {{
            type {kind} . inet_proto . inet_service : verdict
            elements = {{ {cluster_ip} . tcp . {port} : goto service-ULMVA6XW-test/svc/tcp/tcp }}
          }}
          map service-nodeports {{
            type inet_proto . inet_service : verdict
            elements = {{ tcp . {node_port} : goto external-ULMVA6XW-test/svc/tcp/tcp }}
          }}
          chain mark-for-masquerade {{ meta mark set meta mark or 0x4000; }}
          chain masquerading {{
            meta mark and 0x4000 == 0 return
            meta mark set meta mark xor 0x4000
            masquerade fully-random
          }}
          chain service-ULMVA6XW-test/svc/tcp/tcp {{
            {ip} daddr {cluster_ip} {ip} saddr != {pods} jump mark-for-masquerade
            meta l4proto tcp dnat {ip} to numgen random mod {count} map {{ {endpoints} }}
          }}
          chain external-ULMVA6XW-test/svc/tcp/tcp {{
            jump mark-for-masquerade
            goto service-ULMVA6XW-test/svc/tcp/tcp
          }}
          chain services {{
            {ip} daddr . meta l4proto . th dport vmap @service-ips
            fib daddr type local meta l4proto . th dport vmap @service-nodeports
          }}
          chain nat-prerouting {{ type nat hook prerouting priority -100; jump services; }}
          chain nat-output {{ type nat hook output priority -100; jump services; }}
          chain nat-postrouting {{ type nat hook postrouting priority 100; jump masquerading; }}
        }}\n"
    )
}

/// C1-C6 and C11, in small.
fn iptables(service: &Svc, family: Family) -> String {
    let to = service.address(At::ClusterIp, family, 1);
    let (cluster_ip, port, node_port) = (to.ip(), to.port(), service.node_port());
    let pods = pods(family);
    let mut nat = String::new();
    let count = service.endpoints.len();
    for (index, (ep, sep)) in service.endpoints.iter().zip(SEPS).enumerate() {
        let address = ep.address(family);
        let rest = count - index;
        let chance = match rest {
            1 => String::new(),
            _ => format!(
                "-m statistic --mode random --probability 0.{:010} ",
                10_000_000_000 / rest
            ),
        };
        let _ = write!(
            nat,
            "-A {SVC} -m comment --comment \"test/svc -> {address}\" {chance}-j {sep}\n\
             -A {sep} -s {} -m comment --comment test/svc -j KUBE-MARK-MASQ\n\
             -A {sep} -p tcp -m comment --comment test/svc -m tcp -j DNAT --to-destination {address}\n",
            address.ip(),
        );
    }
    let seps: String = SEPS.map(|sep| format!(":{sep} - [0:0]\n")).concat();
    format!(
        "*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n\
         *filter\n\
         :KUBE-EXTERNAL-SERVICES - [0:0]\n\
         :KUBE-FORWARD - [0:0]\n\
         :KUBE-NODEPORTS - [0:0]\n\
         :KUBE-PROXY-CANARY - [0:0]\n\
         :KUBE-PROXY-FIREWALL - [0:0]\n\
         :KUBE-SERVICES - [0:0]\n\
         -I INPUT -m conntrack --ctstate NEW -m comment --comment \"kubernetes externally-visible service portals\" -j KUBE-EXTERNAL-SERVICES\n\
         -I INPUT -m comment --comment \"kubernetes health check service ports\" -j KUBE-NODEPORTS\n\
         -I INPUT -m conntrack --ctstate NEW -m comment --comment \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL\n\
         -I FORWARD -m conntrack --ctstate NEW -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
         -I FORWARD -m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD\n\
         -I OUTPUT -m conntrack --ctstate NEW -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
         -A KUBE-FORWARD -m comment --comment \"kubernetes forwarding rules\" -m mark --mark 0x4000/0x4000 -j ACCEPT\n\
         -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
         COMMIT\n\
         *nat\n\
         :KUBE-MARK-MASQ - [0:0]\n\
         :KUBE-NODEPORTS - [0:0]\n\
         :KUBE-POSTROUTING - [0:0]\n\
         :KUBE-PROXY-CANARY - [0:0]\n\
         :KUBE-SERVICES - [0:0]\n\
         :{SVC} - [0:0]\n\
         :{EXT} - [0:0]\n\
         {seps}\
         -I PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
         -I OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
         -I POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING\n\
         -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n\
         -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
         -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n\
         -A KUBE-POSTROUTING -m comment --comment \"kubernetes service traffic requiring SNAT\" -j MASQUERADE --random-fully\n\
         -A KUBE-SERVICES -d {cluster_ip} -p tcp -m comment --comment \"test/svc cluster IP\" -m tcp --dport {port} -j {SVC}\n\
         -A KUBE-SERVICES -m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n\
         -A KUBE-NODEPORTS -p tcp -m comment --comment test/svc -m tcp --dport {node_port} -j {EXT}\n\
         -A {EXT} -m comment --comment \"masquerade traffic for test/svc external destinations\" -j KUBE-MARK-MASQ\n\
         -A {EXT} -j {SVC}\n\
         -A {SVC} ! -s {pods} -d {cluster_ip} -p tcp -m tcp --dport {port} -j KUBE-MARK-MASQ\n\
         {nat}\
         COMMIT\n"
    )
}
