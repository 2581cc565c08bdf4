//! IP sets of every type: written by kplane, listed by kplane and by `ipset`.

use std::net::IpAddr;
use std::process::Command;

use kplane_model::{Cidr, Family, Protocol};
use kplane_netlink::ipset::{self, Entry, IpSets, SetType};

use kplane_rig::kernel::in_netns;

/// More than fit into one message of a list.
const MANY: u32 = 5_000;

fn ip(number: u32) -> IpAddr {
    IpAddr::V4((0x0a00_0000 + number).into())
}

fn v6(number: u32) -> IpAddr {
    IpAddr::V6((0xfd00_u128 << 112 | u128::from(number)).into())
}

fn entry(kind: SetType, number: u32) -> Entry {
    let port = u16::try_from(number % 60_000).unwrap();
    match kind {
        SetType::Ip => Entry::Ip(ip(number)),
        SetType::IpPort => Entry::IpPort(v6(number), Protocol::Tcp, port),
        SetType::IpPortIp => Entry::IpPortIp(ip(number), Protocol::Udp, port, ip(7)),
        SetType::IpPortNet => {
            let range: Cidr = "10.128.0.0/9".parse().unwrap();
            Entry::IpPortNet(ip(number), Protocol::Sctp, port, range)
        }
        SetType::Port => Entry::Port(port),
    }
}

fn family(kind: SetType) -> Family {
    match kind {
        SetType::IpPort => Family::V6,
        _ => Family::V4,
    }
}

fn all(sets: &mut IpSets, commands: &[ipset::SetCommand<'_>]) {
    let (refused, _) = sets.perform(commands).unwrap();
    assert_eq!(refused, []);
}

fn listed(name: &str) -> String {
    let output = Command::new("ipset").args(["list", name]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn d3_sets_of_every_type_hold_what_they_are_told() {
    in_netns(|| {
        let mut sets = IpSets::open().unwrap();
        for kind in SetType::ALL {
            let family = family(kind);
            let capacity = 2 * MANY;
            let create = |name| ipset::SetCommand::Create {
                name,
                kind,
                family,
                capacity,
            };
            all(&mut sets, &[create("A")]);
            let entries: Vec<Entry> = (1..=MANY).map(|number| entry(kind, number)).collect();
            let add = entries.iter().map(|entry| ipset::SetCommand::Add("A", *entry));
            all(&mut sets, &add.collect::<Vec<_>>());
            // A second time is fine.
            all(&mut sets, &[ipset::SetCommand::Add("A", entries[0])]);
            let found = sets.list("A").unwrap().unwrap();
            assert!(found.is(kind, family), "{kind:?}");
            let (mut held, mut expected) = (found.entries, entries.clone());
            held.sort_unstable();
            expected.sort_unstable();
            assert_eq!((held, found.strange), (expected, 0), "{kind:?}");
            let text = listed("A");
            assert!(
                text.contains(&format!("Type: {}\n", kind.as_str())),
                "{text}"
            );
            assert!(text.contains(&format!("Number of entries: {MANY}\n")));

            all(&mut sets, &[create("B")]);
            let delete = entries.iter().map(|entry| ipset::SetCommand::Delete("A", *entry));
            let mut commands: Vec<_> = delete.collect();
            commands.push(ipset::SetCommand::Delete("A", entries[0]));
            commands.push(ipset::SetCommand::Add("A", entries[3]));
            commands.push(ipset::SetCommand::Swap("A", "B"));
            all(&mut sets, &commands);
            assert_eq!(sets.list("A").unwrap().unwrap().entries, []);
            assert_eq!(sets.list("B").unwrap().unwrap().entries, [entries[3]]);
            assert_eq!(sets.names().unwrap(), ["A", "B"]);
            all(&mut sets, &["A", "B"].map(ipset::SetCommand::Destroy));
            assert_eq!(sets.list("A").unwrap(), None);
        }
    });
}

#[test]
fn d3_a_full_set_says_so() {
    in_netns(|| {
        let mut sets = IpSets::open().unwrap();
        let create = ipset::SetCommand::Create {
            name: "A",
            kind: SetType::Ip,
            family: Family::V4,
            capacity: 64,
        };
        all(&mut sets, &[create]);
        let again = sets.perform(&[create]).unwrap().0;
        assert_eq!(again.len(), 1, "there is one");
        let add: Vec<_> = (0..200)
            .map(|number| ipset::SetCommand::Add("A", Entry::Ip(ip(number))))
            .collect();
        let (refused, _) = sets.perform(&add).unwrap();
        let codes: Vec<i32> = refused.iter().map(|refusal| refusal.code).collect();
        assert_eq!(codes, vec![ipset::code::HASH_FULL; 200 - 64]);
        assert_eq!(refused[0].index, 64);
    });
}
