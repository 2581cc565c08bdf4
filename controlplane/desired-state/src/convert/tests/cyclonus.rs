//! The 230 cases that cyclonus generates (github.com/mattfenwick/cyclonus v0.5.6, `TestCaseGenerator`; policy-assistant
//! of sigs.k8s.io/network-policy-api has them from there), from objects to verdicts.
//!
//! The file has a case a line, and in it all objects after each step: three Namespaces with three Pods each, and the
//! NetworkPolicies. `denied` is what cyclonus' own model says (`Policy.IsTrafficAllowed`) of TCP, UDP and SCTP to ports 80
//! and 81 of each Pod, from each other Pod.

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufReader;
use std::net::IpAddr;

use flate2::bufread::GzDecoder;
use kplane_model::{NamedPort, PodName, Protocol};
use kplane_policy::{End, Pod, Policies};
use serde::Deserialize;

use crate::convert::{namespace, network_policy};
use crate::k8s::{Namespace, NetworkPolicy, Texts};

#[derive(Deserialize)]
struct Case {
    description: String,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    namespaces: BTreeMap<String, Texts>,
    pods: BTreeMap<String, CasePod>,
    policies: Vec<NetworkPolicy>,
    denied: BTreeSet<String>,
}

#[derive(Deserialize)]
struct CasePod {
    labels: Texts,
    ip: IpAddr,
}

const PROTOCOLS: [(&str, Protocol); 3] = [
    ("TCP", Protocol::Tcp),
    ("UDP", Protocol::Udp),
    ("SCTP", Protocol::Sctp),
];
const PORTS: [u16; 2] = [80, 81];

impl Step {
    fn index(&self) -> Policies {
        let mut index = Policies::default();
        for (name, labels) in &self.namespaces {
            let object = Namespace {
                labels: labels.clone(),
                ..Namespace::default()
            };
            index.put_namespace(&name.as_str().into(), namespace(&object));
        }
        for (name, pod) in &self.pods {
            index.put_pod(pod.served(name));
        }
        for policy in &self.policies {
            let (policy, issues) = network_policy(policy, "case");
            assert!(issues.is_empty(), "{issues:?}");
            index.put_policy(policy);
        }
        index
    }

    /// Returns what is denied, in cyclonus' form.
    fn verdicts(&self) -> BTreeSet<String> {
        let index = self.index();
        let mut denied = BTreeSet::new();
        for (from, source) in &self.pods {
            for (to, target) in self.pods.iter().filter(|(to, _)| *to != from) {
                for (text, protocol) in PROTOCOLS {
                    for port in PORTS {
                        let ends = [source.ip, target.ip].map(End::Address);
                        let judged = index.judge(&ends[0], &ends[1], protocol, port);
                        if !judged.is_allowed() {
                            denied.insert(format!("{from}>{to}:{port}/{text}"));
                        }
                    }
                }
            }
        }
        denied
    }
}

impl CasePod {
    fn served(&self, name: &str) -> Pod {
        let (of, name) = name.split_once('/').unwrap();
        let ports = PROTOCOLS.iter().flat_map(|(text, protocol)| {
            PORTS.map(|port| NamedPort {
                name: format!("serve-{port}-{}", text.to_lowercase()).as_str().into(),
                protocol: *protocol,
                port,
            })
        });
        Pod {
            name: PodName::new(of, name),
            node: "n".into(),
            addresses: vec![self.ip],
            labels: namespace(&Namespace {
                labels: self.labels.clone(),
                ..Namespace::default()
            }),
            ports: ports.collect(),
            terminating: false,
            created: None,
        }
    }
}

#[test]
fn all_generated_cases_have_the_verdicts_of_another_model() {
    let file = include_bytes!("cyclonus.jsonl.gz").as_slice();
    let lines = BufReader::new(GzDecoder::new(file));
    let cases = serde_json::Deserializer::from_reader(lines).into_iter::<Case>();
    let (mut count, mut denied) = (0, 0);
    for case in cases {
        let case = case.unwrap();
        for (number, step) in case.steps.iter().enumerate() {
            let verdicts = step.verdicts();
            assert_eq!(verdicts, step.denied, "{}, step {number}", case.description);
            denied += verdicts.len();
        }
        count += 1;
    }
    assert_eq!(count, 230);
    assert!(denied > 10_000, "{denied}");
}
