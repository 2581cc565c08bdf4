//! Commits, refusals, limits and the probe.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use kplane_dataplane::backend::nftables::{
    Element, ElementOp, Key, ProbeError, Set, probe, push_elements, push_structure, read_elements,
};
use kplane_model::Family;
use kplane_netlink::{
    AttributeWriter, Batch, CommitError, Errno, Label, MAX_ATTRIBUTE_PAYLOAD_BYTES, NfSocket,
    Operation, generation_after,
};

use crate::{SETTINGS, commit, sample, socket_with_tables};
use kplane_rig::kernel::{in_netns, nft};

/// NFT_MSG_NEWTABLE, with NLM_F_CREATE.
const NEW_TABLE: (u16, u16) = (0x0a00, 0x400);
/// NFT_MSG_NEWRULE, with NLM_F_CREATE and NLM_F_APPEND.
const NEW_RULE: (u16, u16) = (0x0a06, 0xc00);

/// An operation of IPv4, of a kind with its flags.
fn operation(action: &'static str, object: &'static str, (kind, flags): (u16, u16)) -> Operation {
    Operation {
        label: Label { action, object },
        kind,
        flags,
        family: 2,
    }
}

#[test]
fn a_commit_is_guarded_by_the_generation() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        let elements = sample::elements(Family::V4);
        let sealed = |op, generation| {
            let mut batch = Batch::new();
            push_elements(&mut batch, Family::V4, op, &elements);
            batch.seal(Some(generation))
        };
        let before = socket.generation().unwrap();
        socket.commit(sealed(ElementOp::Add, before)).unwrap();
        let after = socket.generation().unwrap();
        assert_eq!(after, generation_after(before));

        nft(&["add", "table", "inet", "foreign"], "");
        let outcome = socket.commit(sealed(ElementOp::Delete, after));
        assert!(
            matches!(outcome, Err(CommitError::GenerationMoved)),
            "{outcome:?}"
        );
        assert_eq!(
            read_elements(&mut socket, Family::V4).unwrap().len(),
            elements.len()
        );
        let now = socket.generation().unwrap();
        socket.commit(sealed(ElementOp::Delete, now)).unwrap();
        assert_eq!(read_elements(&mut socket, Family::V4).unwrap(), []);
    });
}

#[test]
fn a_refused_operation_is_named() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        let element = |number| Element {
            set: Set::FirewallServices,
            key: Key::Service(sample::destination(Family::V4, number)),
            data: None,
        };
        let there = [element(1), element(2), element(4)];
        commit(&mut socket, |batch| {
            push_elements(batch, Family::V4, ElementOp::Add, &there);
        });
        let mut batch = Batch::new();
        push_elements(&mut batch, Family::V4, ElementOp::Add, &[element(5)]);
        let gone = [element(1), element(2), element(3), element(4)];
        push_elements(&mut batch, Family::V4, ElementOp::Delete, &gone);
        push_structure(&mut batch, Family::V4, SETTINGS);
        let operations = batch.len();
        let error = socket.commit(batch.seal(None)).unwrap_err();
        println!("{error}");
        let CommitError::Rejected { rejections, .. } = &error else {
            panic!("{error:?}");
        };
        let first = &rejections[0];
        assert_eq!((first.index, first.errno), (1, Errno::ENOENT));
        assert_eq!(first.what.to_string(), "delete element firewall-services");
        let key = [0x0a, 0x60, 0, 3];
        let attribute = first.attribute.as_deref().unwrap();
        assert!(
            attribute.windows(4).any(|bytes| bytes == key),
            "{attribute:?}"
        );
        assert!(error.to_string().starts_with(&format!(
            "operation 2 of {operations} (delete element firewall-services) refused by the kernel: ENOENT"
        )));
        // Nothing was applied, and the socket's messages are still in sequence.
        let found = read_elements(&mut socket, Family::V4).unwrap();
        assert_eq!(BTreeSet::from_iter(found), BTreeSet::from(there));
    });
}

#[test]
fn a_batch_over_the_limit_is_not_sent() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        let limit = socket.max_batch_bytes();
        let mut batch = Batch::new();
        let operation = operation("say", "much", NEW_TABLE);
        while batch.byte_len() <= limit {
            batch.push(operation, |w| w.bytes(1, &[0; MAX_ATTRIBUTE_PAYLOAD_BYTES]));
        }
        let before = socket.generation().unwrap();
        let outcome = socket.commit(batch.seal(None));
        assert!(
            matches!(outcome, Err(CommitError::TooBig { .. })),
            "{outcome:?}"
        );
        assert_eq!(socket.generation().unwrap(), before);
    });
}

#[test]
fn the_probe_leaves_no_trace() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        let before = (socket.generation().unwrap(), nft(&["list", "ruleset"], ""));
        probe(&Family::ALL).unwrap();
        let after = (socket.generation().unwrap(), nft(&["list", "ruleset"], ""));
        assert_eq!(after, before);
    });
}

/// The kernel names an expression that it does not know. The probe depends on that.
#[test]
fn an_unknown_expression_is_pointed_at() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        let mut batch = Batch::new();
        let operation = operation("add rule to", "services", NEW_RULE);
        batch.push(operation, |w| {
            w.str(1, "kplane");
            w.str(2, "services");
            w.nest(4, |w| w.nest(1, |w| w.str(1, "tarot")));
        });
        match socket.commit(batch.seal(None)) {
            Err(CommitError::Rejected { rejections, .. }) => {
                let attribute = rejections[0].attribute.as_deref().unwrap();
                assert!(attribute.windows(5).any(|bytes| bytes == b"tarot"));
            }
            outcome => panic!("{outcome:?}"),
        }
    });
}

/// Runs one of the ignored tests below in a process of its own, set up by `wrap`.
fn in_process(test: &str, wrap: impl FnOnce(&Path) -> Command) {
    let program = std::env::current_exe().unwrap();
    let output = wrap(&program)
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_probe_says_that_privilege_is_missing() {
    in_netns(|| {
        // A process in its own user namespace has no privilege in the network namespace in which it was
        // started.
        in_process("socket::without_privilege", |program| {
            let mut command = Command::new("unshare");
            command.arg("--user").arg(program);
            command
        });
    });
}

#[test]
#[ignore = "run by the_probe_says_that_privilege_is_missing"]
fn without_privilege() {
    let error = probe(&Family::ALL).unwrap_err();
    assert!(matches!(error, ProbeError::NoPrivilege), "{error:?}");
    assert!(error.to_string().contains("CAP_NET_ADMIN"));
    let mut socket = NfSocket::open().unwrap();
    let error = socket.generation().unwrap_err();
    assert_eq!(error.errno(), Some(Errno::EPERM), "{error}");
}

/// Without `CAP_NET_ADMIN` in the initial user namespace, batches are short but work.
#[test]
fn a_user_namespace_has_a_lower_limit() {
    in_netns(|| {
        in_process("socket::in_a_user_namespace", |program| {
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user", "--net"]).arg(program);
            command
        });
    });
}

#[test]
#[ignore = "run by a_user_namespace_has_a_lower_limit"]
fn in_a_user_namespace() {
    probe(&Family::ALL).unwrap();
    let mut socket = socket_with_tables();
    let limit = socket.max_batch_bytes();
    let allowed = std::fs::read_to_string("/proc/sys/net/core/wmem_max").unwrap();
    assert_eq!(limit, 2 * allowed.trim().parse::<usize>().unwrap() - 32);
    // The kernel takes that much, and not four bytes more.
    for (len, sent) in [(limit, true), (limit + 4, false)] {
        let mut batch = Batch::new();
        let table = |pad: usize| {
            move |w: &mut AttributeWriter<'_>| {
                w.str(1, "kplane");
                w.bytes(100, &vec![0; pad]); // of a type that the kernel passes over
            }
        };
        let operation = operation("add table", "kplane", NEW_TABLE);
        let frame = 36; // headers 20, name 12, header of the padding 4
        while batch.byte_len() + frame + 60_000 < len - 2 * frame {
            batch.push(operation, table(60_000));
        }
        let rest = len - batch.byte_len() - frame;
        batch.push(operation, table(rest));
        assert_eq!(batch.byte_len(), len);
        let sealed = batch.seal(Some(socket.generation().unwrap()));
        assert_eq!(sealed.as_bytes().len(), len);
        match socket.commit(sealed) {
            Ok(()) => assert!(sent),
            Err(CommitError::TooBig { .. }) => assert!(!sent),
            Err(error) => panic!("{error}"),
        }
    }
}

/// A list that was not cut: its operation is refused by name, and the table stays as it was.
#[test]
fn an_attribute_that_is_too_long_fails_its_operation_alone() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        let operation = |object| operation("add table", object, NEW_TABLE);
        let mut batch = Batch::new();
        batch.push(operation("good"), |w| w.str(1, "good"));
        batch.push(operation("oversized"), |w| {
            w.str(1, "oversized");
            w.bytes(100, &vec![0; 70_000]);
        });
        let error = socket.commit(batch.seal(None)).unwrap_err();
        assert!(error.to_string().contains("add table oversized"), "{error}");
        let tables = nft(&["list", "tables"], "");
        assert!(
            !tables.contains("good") && !tables.contains("oversized"),
            "{tables}"
        );
    });
}
