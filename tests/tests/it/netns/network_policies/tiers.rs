//! ClusterNetworkPolicies.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kplane_model::Family;
use kplane_tests::client::Probe;
use serde_json::json;

use super::{Case, SILENCE, SOON, Stage, WEB, destination, namespace, play, pod, policy};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "an Admin denial of ingress, for the subject only",
        policies: &[
            "tier: Admin, priority: 10, subject: {namespaces: {matchLabels: {team: red}}}, \
             ingress: [{action: Deny, from: [{namespaces: {matchLabels: {team: blue}}}]}]",
        ],
        lines: "here>a no; c>b/udp no; there>a; b>a; a>here; node1>a; outside>a; here>svc1 no; node2>a",
    },
    Case {
        name: "an Admin denial of egress by Pods, behind a ClusterIP too",
        policies: &[
            "tier: Admin, priority: 10, subject: {pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: web}}}}, \
             egress: [{action: Deny, to: [{pods: {namespaceSelector: {matchLabels: {team: blue}}, podSelector: {matchLabels: \
             {tier: back}}}}]}]",
        ],
        lines: "a>c no; a>svc2 no; b>c; a>here; c>a; here>c",
    },
    Case {
        name: "the smaller priority comes first",
        policies: &[
            "tier: Admin, priority: 20, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]",
            "tier: Admin, priority: 10, subject: {namespaces: {matchLabels: {team: red}}}, \
                 ingress: [{action: Accept, from: [{namespaces: {matchLabels: {team: red}}}]}]",
        ],
        lines: "a>b; b>a/udp; here>a no; there>here no; here>c no; outside>a",
    },
    Case {
        name: "the first rule of a policy that matches counts, by ports",
        policies: &[
            "tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {team: red}}}, ingress: [\
             {action: Accept, from: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {number: 8081}}}]}, \
             {action: Deny, from: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {range: {start: 8000, end: 9000}}}}]}]",
        ],
        lines: "here>a:8081; here>a no; here>a/udp; here>a:8081/udp; b>a no; outside>a",
    },
    Case {
        name: "an Admin Accept counts more than a NetworkPolicy that denies",
        policies: &[
            "in x: podSelector: {}, policyTypes: [Ingress]",
            "tier: Admin, priority: 1, subject: {namespaces: {}}, \
                 ingress: [{action: Accept, from: [{pods: {podSelector: {matchLabels: {app: client}}}}]}]",
        ],
        lines: "here>a; there>b; here>svc1; a>b no; c>a no; outside>a no",
    },
    Case {
        name: "Accept of one end does not help where the other denies",
        policies: &[
            "in y: podSelector: {}, policyTypes: [Ingress]",
            "tier: Admin, priority: 1, subject: {namespaces: {}}, egress: [{action: Accept, to: [{namespaces: {}}]}]",
        ],
        lines: "a>here no; a>c no; a>b; here>a",
    },
    Case {
        name: "Pass leaves it to NetworkPolicies, and the rest of the tier does not count",
        policies: &[
            "in x: podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {}}]}]",
            "tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Pass, from: [{namespaces: \
                 {matchLabels: {team: red}}}, {namespaces: {matchLabels: {team: blue}}}]}]",
            "tier: Admin, priority: 2, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]",
        ],
        lines: "b>a; here>a no; a>b; here>b; there>a no; there>b no; there>here no; a>here",
    },
    Case {
        name: "Baseline counts where no NetworkPolicy isolates, and there only",
        policies: &[
            "in x: podSelector: {matchLabels: {app: web}}, ingress: [{from: [{namespaceSelector: {}}]}]",
            "tier: Baseline, priority: 1, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]",
        ],
        lines: "here>a; b>a; there>a; a>b no; here>b no; a>here no; outside>b; outside>a no",
    },
    Case {
        name: "a policy that isolates for egress leaves the Baseline's ingress",
        policies: &[
            "in x: podSelector: {}, policyTypes: [Egress], egress: [{}]",
            "tier: Baseline, priority: 1, subject: {namespaces: {matchLabels: {team: red}}}, \
                 ingress: [{action: Deny, from: [{namespaces: {}}]}], egress: [{action: Deny, to: [{namespaces: {}}]}]",
        ],
        lines: "a>here; a>b no; here>a no",
    },
    Case {
        name: "Pass in the Baseline tier allows",
        policies: &[
            "tier: Baseline, priority: 1, subject: {namespaces: {}}, ingress: [{action: Pass, from: [{namespaces: {matchLabels: \
             {team: red}}}]}, {action: Deny, from: [{namespaces: {}}]}]",
        ],
        lines: "a>here; b>a; here>a no; there>a no",
    },
    Case {
        name: "networks mean Pods as well, unless a rule for Pods comes before",
        policies: &[
            "tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {team: red}}}, egress: [\
             {action: Accept, to: [{namespaces: {matchLabels: {team: red}}}]}, \
             {action: Deny, to: [{networks: ['0.0.0.0/0', '::/0']}]}]",
        ],
        lines: "a>b; a>here no; b>c no; a>svc2 no; here>a; c>b; node1>a",
    },
    Case {
        name: "networks of one family",
        policies: &[
            "tier: Admin, priority: 1, subject: {pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: web}}}}, \
             egress: [{action: Deny, to: [{networks: ['10.244.2.0/24']}]}]",
        ],
        lines: "a>there/4 no; a>there/6; a>b; b>there; a>svc2/4 no",
    },
    Case {
        name: "nodes: the addresses of some nodes, but not the Pod's own",
        policies: &[
            "tier: Admin, priority: 1, subject: {namespaces: {}}, egress: [\
             {action: Deny, to: [{nodes: {matchLabels: {topology.kubernetes.io/zone: zone-2}}}]}]",
        ],
        lines: "a>far2 no; b>far1 no; there>far2; a>c; here>a; a>port2; there>port1",
    },
    Case {
        name: "a named port is the destination's",
        policies: &["tier: Admin, priority: 1, subject: {namespaces: {}}, \
             egress: [{action: Deny, to: [{namespaces: {}}], protocols: [{destinationNamedPort: web}]}]"],
        lines: "b>a no; b>a:8081; b>a/udp no; b>c:8081 no; b>c; outside>a",
    },
    Case {
        name: "a named port of the subject",
        policies: &["tier: Admin, priority: 1, subject: {namespaces: {}}, \
             ingress: [{action: Deny, from: [{namespaces: {}}], protocols: [{destinationNamedPort: admin}]}]"],
        lines: "b>a; b>a:8081 no; b>c no; b>c:8081; outside>a:8081",
    },
    Case {
        name: "a Pod reaches itself through its Service, whatever policies say",
        policies: &[
            "tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}], \
             egress: [{action: Deny, to: [{networks: ['0.0.0.0/0', '::/0']}]}]",
        ],
        lines: "a>svc1; c>svc2; a>b no; node1>a; a>far2 no",
    },
];

pub(crate) fn tiers_come_before_and_behind_network_policies() -> Result<()> {
    play(CASES)
}

/// Rules with parts that are not known: `Accept` accepts nothing, the others deny everything. They are reported.
pub(crate) fn what_is_not_understood_opens_nothing() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy(
        "isolated",
        "in x: podSelector: {}, policyTypes: [Ingress]",
    ))?;
    stage.apply(&policy(
        "odd",
        "tier: Admin, priority: 1, subject: {namespaces: {}}, \
         ingress: [{action: Accept, from: [{namespaces: {}, workloads: {}}]}, {action: Allow, from: [{namespaces: {matchLabels: \
         {team: green}}}]}]",
    ))?;
    stage.check(
        "an unknown action denies everything",
        "a>b no; here>a no; a>here no; outside>a no; node1>a",
    )?;
    stage.apply(&policy(
        "odd",
        "tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {team: red}}}, \
         egress: [{action: Accept, to: [{domainNames: [example.org]}]}, {action: Deny, to: [{networks: ['0.0.0.0/0', '::/0']}]}]",
    ))?;
    stage.check("names of domains", "a>here no; a>c no; here>c")?;
    stage.apply(&policy("odd", "tier: Other, priority: 1, subject: {namespaces: {}}, egress: [{action: Deny, to: [{namespaces: {}}]}]"))?;
    stage.check("an unknown tier has no effect", "a>here; a>c; here>a no")
}

/// Labels change, policies go, and what is denied now is cut.
pub(crate) fn tiers_follow_labels_and_cut() -> Result<()> {
    let mut stage = Stage::open()?;
    let mut open = Probe::tcp(destination("a", WEB, Family::V4)?).open(stage.ns("here")?)?;
    let mut other = Probe::tcp(destination("a", WEB, Family::V6)?).open(stage.ns("there")?)?;
    let deny = "tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {team: red}}}, \
                ingress: [{action: Deny, from: [{pods: {namespaceSelector: {matchLabels: {team: blue}}, podSelector: {}}}]}]";
    stage.apply(&policy("deny", deny))?;
    let started = Instant::now();
    while open.echo(SILENCE).is_ok() {
        ensure!(started.elapsed() < SOON, "a denied connection goes on");
    }
    other.echo(SOON)?;
    stage.check("at first", "here>a no; c>b no; there>a")?;
    stage.cluster.apply(&[namespace("z", "team: blue")?, namespace("y", "")?])?;
    stage.check("other namespaces", "here>a; c>b; there>a no")?;
    let started = Instant::now();
    while other.echo(Duration::from_millis(100)).is_ok() {
        ensure!(
            started.elapsed() < SOON,
            "a connection of a namespace that is denied now goes on"
        );
    }
    let by_label = deny.replace(
        "podSelector: {}",
        "podSelector: {matchLabels: {bad: 'yes'}}",
    );
    stage.apply(&policy("deny", &by_label))?;
    stage.check("by labels of Pods", "there>a; here>a")?;
    let mut there = pod("there")?;
    there["metadata"]["labels"] = json!({"bad": "yes"});
    stage.cluster.apply(&[there])?;
    stage.check("another label", "there>a no; there>b no; here>a")?;
    let accept = by_label.replace("priority: 1", "priority: 0").replace("Deny", "Accept");
    stage.apply(&policy("accept", &accept))?;
    stage.check("an earlier policy", "there>a")?;
    stage.delete(&policy("accept", &accept))?;
    stage.check("without it", "there>a no")?;
    stage.delete(&policy("deny", deny))?;
    stage.check("without policies", "there>a; here>a; c>b")
}
