use kplane_proto::v1::NodeState;

use super::*;

fn verified() -> NodeSnapshot {
    NodeSnapshot {
        name: "a".to_owned(),
        mark: Mark::Kplane,
        ready: true,
        linux: true,
        agent: PodState::Ready,
        served: Some(Served {
            state: NodeState::InSync,
            verified: true,
            error: String::new(),
            backend: "nftables".to_owned(),
        }),
        ..NodeSnapshot::default()
    }
}

#[test]
fn a_node_is_verified_if_nothing_at_all_is_missing() {
    assert_eq!(Stage::of(&verified()), Stage::Kplane);
    let served = |change: fn(&mut Served)| {
        let mut node = verified();
        node.served.iter_mut().for_each(change);
        node
    };
    let node = |change: fn(&mut NodeSnapshot)| {
        let mut node = verified();
        change(&mut node);
        node
    };
    let cases = [
        (
            node(|node| node.kube_proxy = PodState::Leaving),
            "kube-proxy's pod has not ended",
        ),
        (node(|node| node.ready = false), "the node is not Ready"),
        (
            node(|node| node.agent = PodState::Absent),
            "the agent has no pod on the node yet",
        ),
        (
            node(|node| node.served = None),
            "no agent has connected to the control plane",
        ),
        (
            served(|served| served.verified = false),
            "the agent has not read the kernel back yet",
        ),
        (
            served(|served| {
                served.state = NodeState::Failing;
                served.error = "no nf_tables".to_owned();
            }),
            "the agent reports a failure: no nf_tables",
        ),
        (
            served(|served| served.state = NodeState::Conflict),
            "two agents claim the node",
        ),
    ];
    for (node, reason) in cases {
        assert_eq!(Stage::of(&node), Stage::Moving(trouble(reason)), "{reason}");
    }
    // A node that is verified and gets a change goes on.
    let busy = served(|served| served.state = NodeState::Syncing);
    assert_eq!(Stage::of(&busy), Stage::Kplane);
}

#[test]
fn rules_are_removed_when_kube_proxy_serves_again_and_not_before() {
    let mut node = NodeSnapshot {
        mark: Mark::Returning,
        ..verified()
    };
    assert!(matches!(Stage::of(&node), Stage::Returning(_)));
    node.agent = PodState::Absent;
    assert!(matches!(Stage::of(&node), Stage::Returning(_)));
    node.kube_proxy = PodState::Ready;
    assert_eq!(Stage::of(&node), Stage::ToCleanUp);
    node.cleanup = PodState::Ready;
    assert!(matches!(Stage::of(&node), Stage::Returning(_)));
    node.cleanup = PodState::Succeeded;
    assert_eq!(Stage::of(&node), Stage::ToUnmark);
}
