//! The truth table.

use anyhow::{Result, ensure};

use super::{Case, play};

pub(super) const ISOLATION: &[Case] = &[
    Case {
        name: "NP1: a default deny of ingress isolates the namespace's Pods for ingress only",
        policies: &["in x: podSelector: {}, policyTypes: [Ingress]"],
        lines: "b>a no; here>a no; there>a no; c>b no; there>b/udp no; here>svc1 no
                    a>here; a>c; b>there/udp; here>c; there>here; a>b no",
    },
    Case {
        name: "NP1: a default deny of egress isolates for egress only",
        policies: &["in x: podSelector: {}, policyTypes: [Egress]"],
        lines: "a>b no; a>here no; a>c no; a>c/udp no; b>there no; a>svc2 no; here>a; c>a; there>b; here>c",
    },
    Case {
        name: "NP1: a connection needs egress at its source and ingress at its destination",
        policies: &[
            "in y: podSelector: {}, egress: [{to: [{namespaceSelector: {}}]}], policyTypes: [Egress]",
            "in x: podSelector: {}, policyTypes: [Ingress]",
        ],
        lines: "here>a no; c>a no; here>there; c>there; there>a no; there>here",
    },
    Case {
        name: "NP1: only the selected Pods are isolated",
        policies: &["in x: podSelector: {matchLabels: {app: web}}"],
        lines: "b>a no; here>a no; here>b; a>b; c>b",
    },
    Case {
        name: "NP2: what one policy allows another does not take away, whatever their order",
        policies: &[
            "in x: podSelector: {}",
            "in x: podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {}}]}]",
            "in x: podSelector: {matchLabels: {app: web}}, ingress: []",
        ],
        lines: "b>a; here>a no; a>b no; c>a no",
    },
    Case {
        name: "NP2: peers and ports of different rules do not mix",
        policies: &[
            "in x: podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {}}], ports: [{port: 8080}]}, \
             {from: [{namespaceSelector: {matchLabels: {team: blue}}}], ports: [{port: 8081}]}]",
        ],
        lines: "b>a; b>a:8081 no; here>a no; here>a:8081; there>a no; there>a:8081 no",
    },
    Case {
        name: "NP3: without policyTypes, egress rules make it about egress too",
        policies: &[
            "in x: podSelector: {matchLabels: {app: db}}, egress: [{to: [{podSelector: {}}]}]",
        ],
        lines: "b>a; b>here no; here>b no; a>b no",
    },
    Case {
        name: "NP3: without policyTypes and egress rules it is about ingress only",
        policies: &["in x: podSelector: {}, egress: []"],
        lines: "b>here; here>b no",
    },
    Case {
        name: "NP3: rules of a direction that policyTypes does not name are ignored",
        policies: &["in x: podSelector: {}, policyTypes: [Egress], ingress: [], egress: [{}]"],
        lines: "here>a; a>here; a>b; b>c",
    },
    Case {
        name: "NP4: an empty rule allows everything",
        policies: &[
            "in x: podSelector: {}, policyTypes: [Ingress, Egress], ingress: [{}], egress: [{}]",
        ],
        lines: "here>a; outside>a; a>c/udp; there>b:8081; node2>a",
    },
    Case {
        name: "NP4: empty lists of peers and ports do not restrict",
        policies: &[
            "in x: podSelector: {}, ingress: [{from: [], ports: [{port: 8081}]}, {from: [{podSelector: {}}], ports: []}]",
        ],
        lines: "here>a no; here>a:8081; b>a; b>a:8081; outside>a:8081; outside>a no",
    },
    Case {
        name: "NP4: selectors that match nobody allow nobody",
        policies: &[
            "in x: podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: nobody}}}]}]",
        ],
        lines: "a>b no; here>b no",
    },
];

pub(crate) fn np1_np2_np3_np4_isolation_is_per_direction_and_policies_add_up() -> Result<()> {
    play(ISOLATION)
}

pub(super) const SELECTORS: &[Case] = &[
    Case {
        name: "NP5: NotIn and DoesNotExist match a missing label",
        policies: &[
            "in y: podSelector: {matchExpressions: [{key: tier, operator: DoesNotExist}]}, \
             ingress: [{from: [{namespaceSelector: {matchExpressions: [{key: team, operator: NotIn, values: [red]}]}}]}]",
        ],
        lines: "a>here no; c>here; there>here; a>c; b>c",
    },
    Case {
        name: "NP5: In and Exists",
        policies: &[
            "in x: podSelector: {matchExpressions: [{key: app, operator: In, values: [db, web]}]}, \
             ingress: [{from: [{namespaceSelector: {matchExpressions: [{key: team, operator: Exists}]}}]}]",
        ],
        lines: "here>a; c>b; a>b; there>a no; there>b no",
    },
    Case {
        name: "NP5: labels and expressions are all needed",
        policies: &[
            "in y: podSelector: {matchLabels: {app: web}, matchExpressions: [{key: tier, operator: NotIn, values: [back]}]}",
        ],
        lines: "a>c; a>here; there>c",
    },
    Case {
        name: "NP6: a podSelector alone means the policy's own namespace",
        policies: &[
            "in x: podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]",
        ],
        lines: "a>b; c>b no; here>b no; there>b no",
    },
    Case {
        name: "NP6: a namespaceSelector alone means all its Pods",
        policies: &[
            "in x: podSelector: {matchLabels: {app: db}}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: blue}}}]}]",
        ],
        lines: "c>b; here>b; a>b no; there>b no",
    },
    Case {
        name: "NP6: both in one peer must match",
        policies: &[
            "in x: podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: blue}}, podSelector: {matchLabels: {app: web}}}]}]",
        ],
        lines: "c>a; here>a no; there>a no; b>a no",
    },
    Case {
        name: "NP6: two peers are alternatives",
        policies: &[
            "in x: podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: blue}}}, {podSelector: {matchLabels: {app: web}}}]}]",
        ],
        lines: "c>b; here>b; a>b; there>b no; b>a no",
    },
    Case {
        name: "NP6: an empty namespaceSelector is all Pods and not the world",
        policies: &["in x: podSelector: {}, ingress: [{from: [{namespaceSelector: {}}]}]"],
        lines: "a>b; c>a; there>b; outside>a no; node2>a no",
    },
    Case {
        name: "NP6: an empty namespaceSelector with a podSelector",
        policies: &[
            "in x: podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: client}}}]}]",
        ],
        lines: "here>a; there>b; c>a no; b>a no",
    },
    Case {
        name: "NP6: each namespace has a label with its name",
        policies: &[
            "in x: podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: z}}}]}]",
        ],
        lines: "there>a; here>a no; b>a no",
    },
];

pub(crate) fn np5_np6_selectors() -> Result<()> {
    play(SELECTORS)
}

pub(super) const BLOCKS: &[Case] = &[
        Case {
            name: "NP7: a block, and what it excepts",
            policies: &[
                "in x: podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.244.0.0/16, except: [10.244.1.9/32, 10.244.2.0/30]}}]}]",
            ],
            lines: "b>a/4; there>a/4; here>a/4 no; c>a/4 no; outside>a/4 no; b>a/6 no; there>b/6 no",
        },
        Case {
            name: "NP7: what one peer excepts another may allow",
            policies: &[
                "in x: podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.244.0.0/16, except: [10.244.1.9/32]}}, \
                 {podSelector: {}}, {ipBlock: {cidr: 10.244.1.8/30}}]}]",
            ],
            lines: "here>a/4; b>a; there>a/4; here>a/6 no",
        },
        Case {
            name: "NP7: blocks of the other family",
            policies: &[
                "in x: podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 'fd44::/32', except: ['fd44:0:0:2::/64']}}]}]",
            ],
            lines: "b>a/6; here>a/6; c>a/6 no; there>a/6 no; b>a/4 no",
        },
        Case {
            name: "NP7: everybody outside",
            policies: &[
                "in x: podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 172.30.0.0/24}}]}]",
            ],
            lines: "outside>a/4; outside>a/6 no; here>a no; outside>a:8081/udp/4",
        },
        Case {
            name: "NP7: egress to a block with a port",
            policies: &[
                "in x: podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 10.244.2.0/24, except: [10.244.2.9/32]}}], ports: [{port: 8081}]}]",
            ],
            lines: "a>c:8081/4; a>c/4 no; a>there:8081/4 no; a>here:8081/4 no; a>c:8081/6 no",
        },
        Case {
            name: "NP7: overlapping blocks of several policies",
            policies: &[
                "in x: podSelector: {matchLabels: {app: web}}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8}}], ports: [{port: 8080}]}]",
                "in x: podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.244.1.0/24, except: [10.244.1.8/29]}}], ports: [{port: 8081}]}]",
                "in x: podSelector: {matchLabels: {app: db}}, ingress: [{from: [{ipBlock: {cidr: 0.0.0.0/0, except: [10.244.2.0/24]}}]}]",
            ],
            lines: "b>a/4; b>a:8081/4; here>a/4; here>a:8081/4 no; c>a/4; c>a:8081/4 no; here>b/4; here>b:8081/4; c>b/4 no
                    a>b/4; a>b:8081/4; outside>b/4; outside>a/4 no; there>b/4 no",
        },];

pub(crate) fn np7_blocks() -> Result<()> {
    play(BLOCKS)
}

pub(super) const PORTS: &[Case] = &[
    Case {
        name: "NP8: a port is TCP unless it says otherwise",
        policies: &["in x: podSelector: {}, ingress: [{ports: [{port: 8080}]}]"],
        lines: "here>a; here>a/udp no; here>a:8081 no; outside>a; c>b; c>b:8081/udp no",
    },
    Case {
        name: "NP8: UDP alone",
        policies: &["in x: podSelector: {}, ingress: [{ports: [{port: 8080, protocol: UDP}]}]"],
        lines: "here>a/udp; here>a no; here>a:8081/udp no",
    },
    Case {
        name: "NP8: no port means all ports of the protocol",
        policies: &["in x: podSelector: {}, ingress: [{ports: [{protocol: UDP}]}]"],
        lines: "here>a/udp; here>a:8081/udp; here>a no; here>a:8081 no",
    },
    Case {
        name: "NP8: SCTP alone",
        policies: &["in x: podSelector: {}, ingress: [{ports: [{port: 8080, protocol: SCTP}]}]"],
        lines: "here>a no; here>a/udp no; b>a no; here>a/sctp; c>b/sctp; outside>a/sctp; here>a:8081/sctp no",
    },
    Case {
        name: "NP8: SCTP on a range of ports, and none by TCP's rules",
        policies: &[
            "in x: podSelector: {}, ingress: [{ports: [{port: 8080, endPort: 8081, protocol: SCTP}, {port: 9000}]}]",
            "in y: podSelector: {}, ingress: [{ports: [{port: 8080}]}]",
        ],
        lines: "here>a:8081/sctp; there>b/sctp; here>a:9000/sctp no; a>here/sctp no; a>here; a>there/sctp",
    },
    Case {
        name: "NP9: for ingress a name is the selected Pod's port",
        policies: &[
            "in x: podSelector: {}, ingress: [{ports: [{port: web}]}]",
            "in y: podSelector: {}, ingress: [{ports: [{port: web}]}]",
        ],
        lines: "here>a; here>a:8081 no; a>c no; a>c:8081; a>here; a>here:8081 no; here>a/udp no",
    },
    Case {
        name: "NP9: a name is of one protocol",
        policies: &["in x: podSelector: {}, ingress: [{ports: [{port: admin, protocol: UDP}]}]"],
        lines: "here>a:8081/udp; here>a:8081 no; here>a/udp no",
    },
    Case {
        name: "NP9: a name that no Pod has",
        policies: &["in x: podSelector: {}, ingress: [{ports: [{port: nothing}]}]"],
        lines: "here>a no; here>a:8081 no",
    },
    Case {
        name: "NP9: for egress a name is each destination's port",
        policies: &[
            "in x: podSelector: {}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: {matchLabels: {team: blue}}}], ports: [{port: web}]}]",
        ],
        lines: "a>here; a>here:8081 no; a>c no; a>c:8081; a>there no",
    },
    Case {
        name: "NP9: for egress to everybody a name is each Pod's port",
        policies: &[
            "in x: podSelector: {}, policyTypes: [Egress], egress: [{ports: [{port: web}]}]",
        ],
        lines: "a>here; a>there; a>c:8081; a>c no; a>here:8081 no",
    },
    Case {
        name: "NP9: for egress to labelled Pods",
        policies: &[
            "in x: podSelector: {}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: {}, podSelector: {matchLabels: {app: web}}}], \
             ports: [{port: admin, protocol: UDP}]}]",
        ],
        lines: "b>a:8081/udp; b>c/udp; b>c:8081/udp no; b>a/udp no; b>a:8081 no",
    },
    Case {
        name: "NP10: a range is inclusive",
        policies: &["in x: podSelector: {}, ingress: [{ports: [{port: 8000, endPort: 8080}]}]"],
        lines: "here>a; here>a:8081 no; here>a/udp no",
    },
    Case {
        name: "NP10: a range begins where it says",
        policies: &[
            "in x: podSelector: {}, ingress: [{from: [{podSelector: {}}], ports: [{port: 8081, endPort: 9000}]}]",
        ],
        lines: "b>a:8081; b>a no; here>a:8081 no",
    },
    Case {
        name: "NP10: ranges for egress to a block",
        policies: &[
            "in x: podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 10.244.0.0/16}}], ports: [{port: 1, endPort: 8080, protocol: UDP}]}]",
        ],
        lines: "a>here/udp/4; a>here:8081/udp/4 no; a>here/4 no; a>c/udp/4; a>c/udp/6 no",
    },
];

pub(crate) fn np8_np9_np10_ports() -> Result<()> {
    play(PORTS)
}

pub(super) const NODES: &[Case] = &[
    Case {
        name: "NP11: from and to the Pod's own node everything is allowed, and other nodes are ordinary addresses",
        policies: &["in x: podSelector: {}, policyTypes: [Ingress, Egress]"],
        lines: "node1>a; node1>b/udp; node2>a no; node2>b/udp no",
    },
    Case {
        name: "NP12: another node is its address",
        policies: &["in x: podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 172.30.1.2/32}}]}]"],
        lines: "node2>a/4; node2>a/6 no; there>a no; c>a no",
    },
];

pub(crate) fn np11_np12_nodes() -> Result<()> {
    play(NODES)
}

pub(super) const SERVICES: &[Case] = &[
    Case {
        name: "NP14: egress sees the endpoint's address and port",
        policies: &[
            "in y: podSelector: {}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: {matchLabels: {team: red}}}], ports: [{port: 8080}]}]",
        ],
        lines: "here>svc1; here>svc2 no; here>port1; c>a; c>a:8081 no",
    },
    Case {
        name: "NP14: a rule for the Service's own address opens nothing",
        policies: &[
            "in y: podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 10.96.0.0/16}}]}]",
        ],
        lines: "here>svc1/4 no; here>a/4 no",
    },
    Case {
        name: "NP14: ingress sees the client behind a ClusterIP",
        policies: &[
            "in x: podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: blue}}}]}]",
        ],
        lines: "here>svc1; there>svc1 no; b>svc1 no",
    },
    Case {
        name: "NP14: by node port, ingress sees the client if the Pod is on the node that was asked",
        policies: &["in x: podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 172.30.0.3/32}}]}]"],
        lines: "outside>port1/4; here>port1/4 no",
    },
    Case {
        name: "NP14: by node port of another node, ingress sees that node",
        policies: &[
            "in y: podSelector: {matchLabels: {app: web}}, ingress: [{from: [{ipBlock: {cidr: 172.30.0.3/32}}]}]",
        ],
        lines: "outside>port2/4 no",
    },
    Case {
        name: "NP14: and may be allowed as that node",
        policies: &[
            "in y: podSelector: {matchLabels: {app: web}}, ingress: [{from: [{ipBlock: {cidr: 172.30.1.1/32}}]}]",
        ],
        lines: "outside>port2/4",
    },
    Case {
        name: "NP15: a Pod reaches itself, through its own Service too",
        policies: &["in x: podSelector: {}, policyTypes: [Ingress, Egress]"],
        lines: "a>a; a>a:8081/udp; a>svc1; b>svc1 no",
    },
];

pub(crate) fn np14_np15_services() -> Result<()> {
    play(SERVICES)
}

/// All policies that allow everything: nothing of Services may be different.
pub(crate) fn np14_services_are_as_before_where_everything_is_allowed() -> Result<()> {
    let all = "podSelector: {}, policyTypes: [Ingress, Egress], ingress: [{}], egress: [{}]";
    let mut stage = super::Stage::open()?;
    let policies = ["x", "y", "z"].map(|ns| super::policy("all", &format!("in {ns}: {all}")));
    stage.apply(&policies.concat())?;
    stage.check(
        "everything is allowed",
        "here>svc1; here>svc2; there>svc1; there>svc2; a>svc1; a>svc2; c>svc2; b>svc1
         node1>svc1; node1>svc2; node2>svc1; outside>port1; outside>port2; here>port1; here>port2; there>port1",
    )
}

/// The userspace proxy connects to endpoints as the node, whose connections policies always allow: a node with isolated Pods
/// is degraded as long as a proxy relays to them.
pub(crate) fn relayed_connections_are_a_failure_of_the_node() -> Result<()> {
    let mut stage = super::Stage::open()?;
    let degraded = |stage: &super::Stage| {
        let failures = stage.cluster.failures().into_iter();
        let relayed = failures.filter(|failure| {
            failure.degraded && failure.reason.contains("userspace proxy relays")
        });
        relayed.count()
    };
    ensure!(degraded(&stage) == 0, "nobody is isolated");
    let deny = super::policy("deny", "in x: podSelector: {}, policyTypes: [Ingress]");
    stage.apply(&deny)?;
    ensure!(
        degraded(&stage) == 1,
        "one node has Pods of the namespace x"
    );
    stage.check(
        "by addresses of Pods, and by Services",
        "here>a no; there>a no; here>svc1",
    )?;
    stage.delete(&deny)?;
    ensure!(degraded(&stage) == 0, "nobody is isolated any more");
    Ok(())
}
