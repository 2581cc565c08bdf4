//! All fields in JSON: of messages in which each field has a value of its own, and of empty messages.

use std::any::type_name;
use std::collections::HashMap;

use expect_test::{expect, expect_file};
use kplane_model::ServiceName;
use kplane_proto::v1 as pb;
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};
use prost_reflect::DynamicMessage;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorSet};
use serde::Serialize;

use super::super::testing::table;
use super::super::{
    approve::ApprovalView,
    changes::ServiceHistoryView,
    convergence::ConvergenceView,
    declared::{Listing, ListingView},
    describe::DescriptionView,
    diff::DiffView,
    endpoints::EndpointListView,
    fleet::FleetView,
    flows::FlowsView,
    freeze::FreezeView,
    graph::GraphView,
    nodes::NodeListView,
    policies::{JudgementView, PolicyDescriptionView, PolicyListView},
    probe::ProbeReportView,
    proxied::ProxiedView,
    services::ServiceListView,
    why::WhyView,
};

use crate::wire::name;

/// Encodes messages whose fields are all set.
#[derive(Default)]
struct Filler {
    messages: HashMap<String, DescriptorProto>,
    /// The number of values of each enum.
    enums: HashMap<String, usize>,
    fields: usize,
}

impl Filler {
    fn new() -> Self {
        let mut filler = Self::default();
        let files = FileDescriptorSet::decode(pb::DESCRIPTORS).unwrap();
        for file in files.file {
            let name = |name: &str| format!(".{}.{name}", file.package());
            let enums = file.enum_type.iter().map(|of| (name(of.name()), of.value.len()));
            filler.enums.extend(enums);
            let messages = file.message_type.iter().map(|of| (name(of.name()), of.clone()));
            filler.messages.extend(messages);
        }
        filler
    }

    fn encode(&mut self, name: &str) -> Vec<u8> {
        let mut out = Vec::new();
        for field in self.messages[name].field.clone() {
            self.fields += 1;
            let number = u32::try_from(field.number()).unwrap();
            let bytes = match field.r#type() {
                Type::Message => self.encode(field.type_name()),
                Type::String | Type::Bytes => format!("{} {}", field.name(), self.fields).into(),
                Type::Fixed64 => {
                    // The epoch: all are of the same start.
                    encode_key(number, WireType::SixtyFourBit, &mut out);
                    out.extend(7_u64.to_le_bytes());
                    continue;
                }
                of => {
                    let value = match of {
                        Type::Bool => 1,
                        Type::Enum => self.fields % self.enums[field.type_name()],
                        _ => self.fields,
                    };
                    encode_key(number, WireType::Varint, &mut out);
                    encode_varint(value as u64, &mut out);
                    continue;
                }
            };
            encode_key(number, WireType::LengthDelimited, &mut out);
            encode_varint(bytes.len() as u64, &mut out);
            out.extend(bytes);
        }
        out
    }
}

/// Returns the JSON of a message with all fields, and of one without any.
fn lines<M: Message + Default, V: Serialize>(view: impl Fn(M) -> V) -> String {
    let name = type_name::<M>().rsplit("::").next().unwrap();
    let filled = Filler::new().encode(&format!(".kplane.v1.{name}"));
    let json = |message| serde_json::to_string(&view(message)).unwrap();
    let filled = json(M::decode(filled.as_slice()).unwrap());
    format!("{name}\n{filled}\n{}\n", json(M::default()))
}

/// Returns the view of a declared list's answer with all fields, and of one without any.
fn declared(of: &'static Listing) -> [ListingView; 2] {
    let about = (!of.is_of_all()).then(|| "shop/web".to_owned());
    let filled = Filler::new().encode(&format!(".{}", of.method.output().full_name()));
    [filled.as_slice(), &[]].map(|bytes| {
        let answer = DynamicMessage::decode(of.method.output(), bytes).unwrap();
        ListingView::new(of, about.clone(), answer, true)
    })
}

/// Every list that the API declares, as it is shown. A new one appears here by itself.
#[test]
fn all_lists() {
    let mut all = String::new();
    for of in Listing::all() {
        let [filled, empty] = declared(of);
        let json = serde_json::to_string(&filled).unwrap();
        let texts = [filled, empty].map(|view| table(&view));
        all += &format!("## {}\n{json}\n\n{}", of.name(), texts.join("\n"));
    }
    expect_file!["golden/lists.txt"].assert_eq(&all);
}

#[test]
fn all_fields() {
    let of = &ServiceName::new("shop", "web");
    let all = [
        lines(|fleet: pb::Fleet| FleetView::from(fleet)),
        lines(|fleet: pb::Fleet| NodeListView::from(fleet)),
        lines(|fleet: pb::Fleet| ApprovalView::from(fleet)),
        lines(|done: pb::ApproveResponse| ApprovalView::from(done)),
        lines(|done| FreezeView::new(done, false)),
        lines(|of: pb::ListServicesResponse| ServiceListView::new(of.services, None)),
        lines(|of: pb::ListServicesResponse| EndpointListView::new(of.services, None)),
        lines(|of| DescriptionView::new("shop", "web", of)),
        lines(|of: pb::Convergence| ConvergenceView::from(of)),
        lines(|of| WhyView::new("shop", "web", "a pod".to_owned(), of)),
        lines(|answer| ProxiedView::new(of, answer)),
        lines(|answer| FlowsView::new(of, &pb::FlowsRequest::default(), answer)),
        lines(|answer| GraphView::new(&pb::GraphRequest::default(), answer)),
        lines(ProbeReportView::new),
        lines(|history| ServiceHistoryView::new(of, "", history)),
        lines(|of: pb::Diff| DiffView::from(of)),
        lines(|of: pb::ListPoliciesResponse| PolicyListView::new(of.policies, None)),
        lines(|of: pb::PolicyDescription| PolicyDescriptionView::from(of)),
        lines(|of| JudgementView::new(&pb::JudgeConnectionRequest::default(), of)),
    ];
    expect_file!["golden/filled.txt"].assert_eq(&all.concat());
}

#[test]
fn names_of_states() {
    let names = |name: fn(i32) -> String| (0..9).map(name).collect::<Vec<_>>().join(" ");
    expect![[r#"
        Unknown NoAgent Disconnected Failing Behind Holding Unverified Unknown Unknown
        Unknown Absent Ready NotReady Draining Terminating Unknown Unknown Unknown
        Unknown Added Changed Removed Unknown Unknown Unknown Unknown Unknown
        Unknown Reaches Refused Dropped NotAdmitted NotProxied Denied Unknown Unknown
    "#]]
    .assert_eq(&format!(
        "{}\n{}\n{}\n{}\n",
        names(name::<pb::LagState>),
        names(name::<pb::RecordedState>),
        names(name::<pb::ChangeVerb>),
        names(name::<pb::PacketOutcome>)
    ));
}
