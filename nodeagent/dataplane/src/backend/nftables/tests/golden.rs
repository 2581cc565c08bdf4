//! Compares kplane's bytes with those that `nft` sends for the same text: `golden.txt`.
//!
//! nft leaves out attributes that the kernel fills in. kplane sends them, so that it reads back what it sent.

use std::collections::BTreeMap;

use kplane_model::{Family, Protocol};

use super::super::affinity::Group;
use super::super::affinity_id::AffinityId;
use super::super::chain::RuleStep;
use super::super::rule::Expressions;
use super::super::schema::{Balancer, Class, Set, TableSettings};
use super::super::structure::{GroupOp, push_groups};
use super::super::uapi::*;
use super::super::userdata;
use super::super::word::{Word, WordStep};
use super::super::{
    Carries, Data, Destination, Element, ElementOp, Key, NodePort, push_elements, push_structure,
};
use crate::backend::PodInterface;
use kplane_netlink::{Attribute, AttributeWriter, Attributes, Batch, Message, Messages};

/// `NFTA_LOOKUP_SET_ID`: nft names sets by number within a batch, too.
const NFTA_LOOKUP_SET_ID: u16 = 4;
/// `NFTA_DYNSET_SET_ID`: the number of a set, like `NFTA_LOOKUP_SET_ID`.
const NFTA_DYNSET_SET_ID: u16 = 2;
/// `NFTA_BITWISE_OP`: 0 (`NFT_BITWISE_MASK_XOR`), which nft sends in some rules.
const NFTA_BITWISE_OP: u16 = 6;
/// `NFTA_SET_ELEM_USERDATA`: nft's own note that a range has no end.
const NFTA_SET_ELEM_USERDATA: u16 = 6;

/// The group of session affinity in `golden.txt`.
const SEVEN: AffinityId = AffinityId::from_bits(7);

struct Golden {
    kind: &'static str,
    family: Family,
    set: &'static str,
    text: &'static str,
    /// Attributes of the message.
    bytes: Vec<u8>,
}

fn golden() -> Vec<Golden> {
    include_str!("golden.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (front, hex) = line.rsplit_once(" | ").unwrap();
            let mut front = front.splitn(4, " | ");
            let mut part = || front.next().unwrap();
            Golden {
                kind: part(),
                family: match part() {
                    "ip" => Family::V4,
                    _ => Family::V6,
                },
                set: part(),
                text: part(),
                bytes: (0..hex.len())
                    .step_by(2)
                    .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
                    .collect(),
            }
        })
        .collect()
}

/// Returns a rule as names and attributes of its expressions, without those that may differ.
fn expressions(list: Attributes<'_>) -> Vec<(String, BTreeMap<u16, Vec<u8>>)> {
    list.map(|expression| {
        let name = expression.children().get(NFTA_EXPR_NAME).unwrap().as_str().unwrap();
        let data = expression.children().get(NFTA_EXPR_DATA).unwrap();
        let filled_in: &[u16] = match name {
            "lookup" => &[NFTA_LOOKUP_SET_ID],
            "dynset" => &[NFTA_DYNSET_SET_ID],
            "bitwise" => &[NFTA_BITWISE_OP],
            "nat" => &[
                NFTA_NAT_REG_ADDR_MAX,
                NFTA_NAT_REG_PROTO_MAX,
                NFTA_NAT_FLAGS,
            ],
            _ => &[],
        };
        let attributes = data
            .children()
            .filter(|a| !filled_in.contains(&a.kind))
            .filter(|a| (name, a.kind, a.payload) != ("lookup", NFTA_LOOKUP_FLAGS, &[0; 4][..]))
            .map(|a| (a.kind, a.payload.to_vec()));
        (name.to_owned(), attributes.collect())
    })
    .collect()
}

/// Returns kplane's steps for the rules of `golden.txt`. IPv6 texts have the steps of the IPv4 ones.
#[expect(clippy::too_many_lines, reason = "a table of rules")]
fn steps(text: &str) -> Vec<RuleStep> {
    let text = text.replace("ip6 daddr != ::1", "ip daddr != 127.0.0.0/8");
    let vip = "ip daddr . meta l4proto . th dport";
    let original_vip = "ip daddr . meta l4proto . ct original proto-dst";
    let text = text.replace("ip6", "ip");
    match text.replace(vip, "VIP").replace(original_vip, "VIP").as_str() {
        "VIP @firewall-services drop" => {
            vec![RuleStep::In(Set::FirewallServices), RuleStep::Drop]
        }
        "meta priority set VIP map @places" => vec![RuleStep::Word(WordStep::LookUp(Set::Places))],
        "meta priority set meta l4proto . th dport map @nodeports" => {
            vec![RuleStep::Word(WordStep::LookUp(Set::Nodeports))]
        }
        "meta priority & 0:8020 == 0:8000" => {
            let mask = Word::STICKY | Word::NODEPORT;
            vec![RuleStep::Word(WordStep::Equals(mask, Word::STICKY))]
        }
        "meta priority & 0:e800 != 0:0" => {
            let special = Word::EXTERNAL | Word::MASQUERADE | Word::INSIDE | Word::STICKY;
            vec![RuleStep::Word(WordStep::HasAny(special))]
        }
        "meta priority set none" => vec![RuleStep::Word(WordStep::Forget)],
        "meta priority & 0:3f vmap @classes" => {
            vec![RuleStep::Word(WordStep::Draw(Set::Classes))]
        }
        "meta priority & 0:7e0 vmap @inside-classes" => {
            vec![RuleStep::Word(WordStep::Draw(Set::InsideClasses))]
        }
        "meta priority set meta priority & ffff:ffe0 | 0:1" => {
            vec![RuleStep::Word(WordStep::First(Balancer::Service))]
        }
        "ct state new ct status confirmed" => vec![RuleStep::Unanswered],
        "ip daddr @cluster-ips goto refuse" => {
            vec![RuleStep::In(Set::ClusterIps), RuleStep::Goto("refuse")]
        }
        "ip saddr @pod-cidrs jump refuse" => {
            vec![RuleStep::In(Set::PodCidrs), RuleStep::Jump("refuse")]
        }
        "ip saddr != @pod-cidrs drop" => vec![RuleStep::NotIn(Set::PodCidrs), RuleStep::Drop],
        "ip saddr . VIP @hairpin drop" => vec![RuleStep::In(Set::Hairpin), RuleStep::Drop],
        "ct state new" => vec![RuleStep::NewConnection],
        "ct status dnat" => vec![RuleStep::Dnatted],
        "ct status ! dnat" => vec![RuleStep::NotDnatted],
        "fib daddr type local" => vec![RuleStep::ToThisNode],
        "fib saddr type local" => vec![RuleStep::FromThisNode],
        "ip daddr != 127.0.0.0/8" => vec![RuleStep::NotToLoopback],
        "meta l4proto tcp reject with tcp reset" => {
            vec![RuleStep::Is(Protocol::Tcp), RuleStep::TcpReset]
        }
        "reject" => vec![RuleStep::Unreachable],
        "meta mark & 0x4000 == 0x4000" => vec![RuleStep::Marked],
        "meta mark set meta mark | 0x4000" => vec![RuleStep::SetMark],
        "meta mark set meta mark ^ 0x4000" => vec![RuleStep::FlipMark],
        "masquerade fully-random" => vec![RuleStep::Masquerade],
        "dnat to VIP . numgen random mod 3 map @service-endpoints" => {
            vec![RuleStep::Dnat(Balancer::Service, Class::of(3).unwrap())]
        }
        "dnat to meta l4proto . th dport . numgen random mod 16384 map @nodeport-endpoints" => {
            vec![RuleStep::Dnat(
                Balancer::Nodeport,
                Class::of(16384).unwrap(),
            )]
        }
        "VIP vmap @sticky-services" => vec![RuleStep::Lead(Set::Sticky(Balancer::Service))],
        "meta l4proto udp ct original VIP vmap @sticky-services" => vec![
            RuleStep::Is(Protocol::Udp),
            RuleStep::OriginalLead(Set::Sticky(Balancer::Service)),
        ],
        "meta l4proto sctp meta l4proto . ct original proto-dst vmap @remember-nodeports" => vec![
            RuleStep::Is(Protocol::Sctp),
            RuleStep::OriginalLead(Set::RememberNodeports),
        ],
        "iifname \"cni0\" drop" => vec![RuleStep::FromPodInterface, RuleStep::Drop],
        "iifname != \"cali*\" drop" => vec![RuleStep::NotFromPodInterface, RuleStep::Drop],
        text if text.starts_with("meta l4proto tcp dnat to ip saddr map @affinity-") => {
            vec![RuleStep::Is(Protocol::Tcp), RuleStep::UseRemembered(SEVEN)]
        }
        text if text.starts_with("update @affinity-") => vec![RuleStep::Remember(SEVEN, 10_800)],
        "drop comment \"an address that no Service has\"" => vec![RuleStep::Drop],
        other => panic!("no steps for {other}"),
    }
}

#[test]
fn expressions_are_those_of_nft() {
    let rules = golden().into_iter().filter(|g| g.kind == "rule");
    for Golden {
        family,
        text,
        bytes,
        ..
    } in rules
    {
        let theirs = Attributes(&bytes);
        let mut ours = Vec::new();
        let mut list = AttributeWriter::new(&mut ours);
        let pod_interface = match text {
            text if text.contains("cni0") => PodInterface::new("cni0", false),
            _ => PodInterface::new("cali", true),
        };
        let settings = TableSettings {
            pod_interface,
            ..TableSettings::default()
        };
        let mut writer = Expressions {
            list: &mut list,
            family,
            settings,
        };
        for step in steps(text) {
            writer.step(step);
        }
        let expected = theirs.get(NFTA_RULE_EXPRESSIONS).unwrap().children();
        assert_eq!(
            expressions(Attributes(&ours)),
            expressions(expected),
            "{family}: {text}"
        );
        if let Some(userdata) = theirs.get(NFTA_RULE_USERDATA) {
            let ours = userdata::comment("an address that no Service has");
            assert_eq!(ours, userdata.payload);
        }
    }
}

#[test]
fn sets_are_those_of_nft() {
    for Golden {
        family,
        set,
        text,
        bytes,
        ..
    } in golden().into_iter().filter(|g| ["set", "clients"].contains(&g.kind))
    {
        let group = Group {
            id: SEVEN,
            protocol: Protocol::Tcp,
            timeout_s: 1,
            inside_apart: false,
            shared: false,
        };
        let mut batch = Batch::new();
        push_structure(&mut batch, family, TableSettings::default());
        push_groups(
            &mut batch,
            family,
            TableSettings::default(),
            &[GroupOp::Make(group)],
        );
        let ours = Messages(batch.as_bytes())
            .map(Message::attributes)
            .find(|a| a.get(NFTA_SET_NAME).and_then(Attribute::as_str) == Some(set))
            .unwrap();
        // All attributes are compared but the number within the batch, and the length of verdicts, which nft
        // leaves to the kernel.
        let is_verdict = text.contains(": verdict");
        let fixed = |attributes: Attributes<'_>| {
            attributes
                .filter(|a| a.kind != NFTA_SET_ID)
                .filter(|a| a.kind != NFTA_SET_DATA_LEN || !is_verdict)
                .map(|a| (a.kind, a.payload.to_vec()))
                .collect::<BTreeMap<_, _>>()
        };
        assert_eq!(fixed(ours), fixed(Attributes(&bytes)), "{family}: {text}");
    }
}

/// Returns the element for `text`.
fn element(family: Family, set: &str, text: &str) -> Element {
    let set = Set::all().find(|s| s.name() == set).unwrap();
    let (key, data) = match text.split_once(" : ") {
        Some((key, data)) => (key, Some(data)),
        None => (text, None),
    };
    let parts: Vec<&str> = key.split(" . ").collect();
    let protocol = |text: &str| text.to_uppercase().parse().unwrap();
    let destination = |parts: &[&str]| Destination {
        ip: parts[0].parse().unwrap(),
        protocol: protocol(parts[1]),
        port: parts[2].parse().unwrap(),
    };
    let node_port = |parts: &[&str]| NodePort {
        protocol: protocol(parts[0]),
        port: parts[1].parse().unwrap(),
    };
    // nft writes the number of a class of traffic as two halves.
    let number = |text: &str| {
        let (major, minor) = text.split_once(':').unwrap();
        let half = |text| u32::from_str_radix(text, 16).unwrap();
        half(major) << 16 | half(minor)
    };
    let key = match set {
        Set::Places | Set::FirewallServices | Set::Sticky(_) => Key::Service(destination(&parts)),
        Set::Nodeports | Set::RememberNodeports => Key::NodePort(node_port(&parts)),
        Set::Classes => Key::Number(number(parts[0])),
        Set::ClusterIps => Key::Ip(parts[0].parse().unwrap()),
        Set::Hairpin => Key::Hairpin(destination(&parts[1..])),
        Set::FirewallSources => Key::FirewallSource(destination(&parts), parts[3].parse().unwrap()),
        Set::PodCidrs => Key::Range(parts[0].parse().unwrap()),
        Set::Endpoints(Balancer::Service) => {
            Key::ServiceSlot(destination(&parts), parts[3].parse().unwrap())
        }
        _ => Key::NodePortSlot(node_port(&parts), parts[2].parse().unwrap()),
    };
    let data = data.map(|data| {
        for (verdict, code) in [("jump ", NFT_JUMP), ("goto ", NFT_GOTO)] {
            if let Some(chain) = data.strip_prefix(verdict) {
                return Data::from_verdict(code, chain).unwrap();
            }
        }
        if set.carries() == Carries::Number {
            return Data::Number(number(data));
        }
        let (ip, port) = data.split_once(" . ").unwrap();
        Data::Endpoint(kplane_model::EndpointAddr {
            ip: ip.parse().unwrap(),
            port: port.parse().unwrap(),
        })
    });
    assert_eq!(data.is_some(), set.is_map(), "{family}");
    Element { set, key, data }
}

/// Returns the entries of a list of elements, without nft's notes and the end without a start.
fn entries(list: Attributes<'_>) -> Vec<BTreeMap<u16, Vec<u8>>> {
    let entries = list.map(|entry| {
        entry
            .children()
            .filter(|a| a.kind != NFTA_SET_ELEM_USERDATA)
            .map(|a| (a.kind, a.payload.to_vec()))
            .collect::<BTreeMap<_, _>>()
    });
    let is_lone_end = |entry: &BTreeMap<u16, Vec<u8>>| {
        let key = Attributes(&entry[&NFTA_SET_ELEM_KEY]).get(NFTA_DATA_VALUE).unwrap().payload;
        entry.contains_key(&NFTA_SET_ELEM_FLAGS) && key.iter().all(|byte| *byte == 0)
    };
    entries.filter(|entry| !is_lone_end(entry)).collect()
}

#[test]
fn elements_are_those_of_nft() {
    for Golden {
        kind,
        family,
        set,
        text,
        bytes,
    } in golden()
    {
        let (op, message) = match kind {
            "add" => (ElementOp::Add, msg::NEWSETELEM),
            "delete" => (ElementOp::Delete, msg::DELSETELEM),
            _ => continue,
        };
        let mut batch = Batch::new();
        push_elements(&mut batch, family, op, &[element(family, set, text)]);
        let ours = Messages(batch.as_bytes()).next().unwrap();
        assert_eq!(ours.kind, message);
        let list = |attributes: Attributes<'_>| {
            let list = attributes.get(NFTA_SET_ELEM_LIST_ELEMENTS).unwrap();
            entries(list.children())
        };
        let mut theirs = list(Attributes(&bytes));
        if kind == "delete" {
            // nft sends the data too, which the kernel ignores.
            for entry in &mut theirs {
                entry.remove(&NFTA_SET_ELEM_DATA);
            }
        }
        assert_eq!(list(ours.attributes()), theirs, "{kind} {set} {text}");
    }
}
